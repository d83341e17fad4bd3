"""A real vLLM engine whose weights change as it samples, against plain forwards of each version."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_letters
from typing import Any

import engine_child
import numpy as np
import plain_script
import pytest
import torch
from crew import CUDA_ENGINE_PLACE, ENGINE_PLACE, Inbox, crew
from engine_child import Result
from versions import EXACT, Versions

from minirl.config import Config, ModelConfig, RolloutConfig, TasksConfig
from minirl.devices import Placement
from minirl.errors import StaleWeights
from minirl.messages import Role
from minirl.records import StopReason
from minirl.rollout.engine import LIMIT, Engine, Sampling
from minirl.rollout.worker import RolloutSetup
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import CANARY_TOKENS
from minirl.workers import Worker

pytestmark = pytest.mark.vllm

PROMPT = [(5 + 37 * i) % 380 + 2 for i in range(70)]  # more than two blocks of the prefix cache
CONFIG = Config(
    tasks=TasksConfig(max_prompt_tokens=128),
    rollout=RolloutConfig(max_new_tokens=128, max_num_seqs=16, kv_cache_gib=0.125),
)
FREE = Sampling(max_tokens=100, temperature=1.0)


@dataclass
class Written:
    """What a request has got so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop: StopReason | None = None


class Remote:
    """One of the engines in the child process."""

    def __init__(self, name: str, inbox: Inbox, worker: Worker, versions: Versions):
        self.name, self.inbox, self.worker, self.versions = name, inbox, worker, versions
        self.next_key = 0
        self.written: dict[int, Written] = defaultdict(Written)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.worker.send((self.name, function, arguments))
        result = self.inbox.take(self.worker, Result)
        if result.error is not None:
            raise result.error
        return result.value

    def update(self, canary: np.ndarray | None = None) -> int:
        """Publishes the next version and has the engine take it."""
        version = self.versions.store.latest + 1
        self.versions.publish(version, canary)
        self.reload()
        return version

    def reload(self) -> None:
        self.call(Engine.reload)
        assert self.call(getattr, "version") == self.versions.store.latest

    def add(self, prompt: list[int], sampling: Sampling = FREE, priority: int = 0) -> Written:
        self.next_key += 1
        self.call(Engine.add, self.next_key, prompt, sampling, priority)
        return self.written[self.next_key]

    def step(self, count: int = 1000) -> None:
        for chunk in self.call(engine_child.steps, count):
            written = self.written[chunk.key]
            written.tokens += chunk.tokens
            written.logprobs += chunk.logprobs
            written.versions += [chunk.version] * len(chunk.tokens)
            written.stop = chunk.stop

    def errors(self, prompt: list[int], written: Written) -> np.ndarray:
        """How far each logprob is off a plain forward of the version that wrote the token."""
        assert written.tokens
        versions = [-1] * len(prompt) + written.versions
        exact = self.versions.exact(prompt + written.tokens, versions, temperature=1.0)
        return np.abs(exact[len(prompt) :] - np.array(written.logprobs))


KEEP = replace(CONFIG, rollout=replace(CONFIG.rollout, on_update="keep"))
STOP_TEXTS = (*ascii_letters, "=>")
STOP_TOKENS = tuple(range(300, 340))  # of no text: the tokenizer has fewer tokens than the model
SHORT = replace(  # shorter than the canary
    CONFIG,
    tasks=TasksConfig(max_prompt_tokens=8),
    rollout=replace(CONFIG.rollout, max_new_tokens=4, stop=STOP_TEXTS, stop_tokens=STOP_TOKENS),
)
TIGHT_TOKENS = 384  # whose KV fits: fewer than PROMPTS and their answers have
TIGHT = replace(CONFIG, rollout=replace(CONFIG.rollout, kv_cache_gib=TIGHT_TOKENS / 2**20))
ENGINES = {"tied": CONFIG, "llama": CONFIG, "keep": KEEP, "short": SHORT, "tight": TIGHT}
ENGINES |= {"async": CONFIG, "async keep": KEEP}
HALF = replace(CONFIG, model=ModelConfig(dtype="bfloat16"))
if "TRITON_INTERPRET" not in os.environ:  # `make v2`: it would take minutes
    ENGINES |= {"half": HALF}
UPDATE = 2e-3  # about an update's: less than bfloat16's noise in the canary


Settings = dict[str, tuple[Config, Path]]


@contextmanager
def running(logs: Path, settings: Settings, place: Placement) -> Iterator[dict[str, Remote]]:
    """All in one process: most of a start is imports."""
    versions, setups = dict[str, Versions](), {}
    for name, (config, folder) in settings.items():
        versions[name] = Versions(folder, config.model.dtype)
        if name == "half":
            versions[name].scale = UPDATE
        versions[name].publish(0)
        ring, store = TrajectoryRing(1, 1), versions[name].store
        setups[name] = RolloutSetup(config, str(folder), place.kind, 1, ring, store)
    with crew(logs, 1) as inbox:
        worker = inbox.workers.spawn(Role.ROLLOUT, 0, "engine_child:run", setups, place)
        inbox.take(worker, Result)
        remotes = {name: Remote(name, inbox, worker, versions[name]) for name in settings}
        for remote in remotes.values():
            remote.reload()
        yield remotes
        inbox.workers.stop("end")  # so that vLLM's own processes take their memory away


@pytest.fixture(scope="module")
def engines(
    tied_folder: Path, llama_folder: Path, biased_folder: Path, tmp_path_factory: Any
) -> Iterator[dict[str, Remote]]:
    """The Llama has a head of its own (untied)."""
    folders, logs = {"llama": llama_folder, "half": biased_folder}, tmp_path_factory.mktemp("logs")
    settings = {name: (config, folders.get(name, tied_folder)) for name, config in ENGINES.items()}
    with running(logs, settings, ENGINE_PLACE) as remotes:
        yield remotes


@pytest.fixture()
def tied(engines: dict[str, Remote]) -> Remote:
    return engines["tied"]


# In-flight reloads ----------------------------------------------------------------------------

PROMPTS = [PROMPT[: 70 - 9 * i] for i in range(4)]


def through_versions(engine: Remote, num_steps: int, num_updates: int) -> list[Written]:
    """Answers to PROMPTS: after each so many steps the engine gets a new version."""
    answers = [engine.add(prompt) for prompt in PROMPTS]
    for _ in range(num_updates):
        engine.step(num_steps)
        engine.update()
    engine.step()
    assert max(len(set(answer.versions)) for answer in answers) >= 4
    assert all(answer.stop is not None for answer in answers)
    return answers


@pytest.mark.parametrize("name", ["tied", "llama", "async", "tight"])
def test_recompute_is_exact_under_the_tokens_version(name: str, engines: dict[str, Remote]) -> None:
    """Also of sequences that vLLM preempts, where the KV cache is full."""
    engine = engines[name]
    first = engine.versions.store.latest
    answers = through_versions(engine, num_steps=12, num_updates=4)
    assert sum(map(len, PROMPTS)) + sum(len(a.tokens) for a in answers) > TIGHT_TOKENS
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.versions == sorted(answer.versions) and answer.versions[0] == first
        assert engine.errors(prompt, answer).max() < EXACT


@pytest.mark.parametrize("name", ["keep", "async keep"])
def test_keep_is_exact_in_the_first_span(name: str, engines: dict[str, Remote]) -> None:
    keep = engines[name]
    first = keep.versions.store.latest
    answers = through_versions(keep, num_steps=15, num_updates=3)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        spans = [answer.versions.count(first + i) for i in range(4)]
        assert answer.versions == [first + i for i in range(4) for _ in range(spans[i])]
        # One token per step, from the first: prompts this short are prefilled at once.
        assert spans[:3] == [15, 15, 15] or answer.stop is StopReason.STOP
        errors = keep.errors(prompt, answer)
        assert errors[: spans[0]].max() < EXACT
        if len(errors) > spans[0]:  # old keys and values under new weights: by design not exact
            assert errors[spans[0] :].max() > EXACT


@pytest.mark.parametrize("name", ["tied", "keep"])
def test_no_prefix_is_of_another_version(name: str, engines: dict[str, Remote]) -> None:
    """While a sequence runs vLLM cannot empty its prefix cache, so a salt must do."""
    engine = engines[name]
    running = engine.add(PROMPT)
    engine.step(3)
    before = engine.add(PROMPT, replace(FREE, max_tokens=5))
    engine.step(5)
    engine.update()
    after = engine.add(PROMPT, replace(FREE, max_tokens=5))
    engine.step()
    assert set(before.versions).isdisjoint(after.versions)
    assert len(set(running.versions)) == 2
    assert engine.errors(PROMPT, before).max() < EXACT
    assert engine.errors(PROMPT, after).max() < EXACT


NUM_VERSIONS, LAYER = 200, "model.layers.1"
FAULTS = (
    *("all", "torn", "model.embed_tokens.weight", "lm_head.weight"),
    *(f"{LAYER}.input_layernorm.weight", f"{LAYER}.self_attn.q_proj.weight"),
    *(f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.self_attn.v_proj.bias"),
    *(f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.mlp.up_proj.weight"),
    f"{LAYER}.mlp.down_proj.weight",
)

# The checks of rule 6 -------------------------------------------------------------------------


def check_healthy(engine: Remote) -> None:
    """No healthy version is stopped, and no tensor is left to the canary."""
    assert engine.call(engine_child.unplaced) == []
    gaps = []
    for _ in range(NUM_VERSIONS):
        engine.update()
        gaps.append(engine.call(getattr, "canary").gap)
    print(f"canary gap: mean {np.mean(gaps):.4f}, largest {max(gaps):.4f}")
    assert 0 < max(gaps) < LIMIT["bfloat16"]


def check_noticed(engine: Remote, fault: str, named: str) -> None:
    engine.call(engine_child.break_copies, fault)
    with pytest.raises(StaleWeights, match=f"did not reach the engine: tensor {named}"):
        engine.update()
    engine.call(engine_child.break_copies, "")
    engine.update()


@pytest.mark.skipif("half" not in ENGINES, reason="not under make v2")
def test_no_healthy_version_is_stopped(engines: dict[str, Remote]) -> None:
    check_healthy(engines["half"])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reload_that_went_wrong(fault: str, engines: dict[str, Remote]) -> None:
    """The first tensor that was left behind is named."""
    for engine in (engines[name] for name in ("tied", "llama", "half") if name in engines):
        names = [spec.name for spec in engine.versions.store.table]
        if fault in ("all", "torn", *names):
            first = {"all": names[0], "torn": names[1]}.get(fault, rf"{fault} \(and 0 more\)")
            check_noticed(engine, fault, first)


def wrong_canary(engine: Remote) -> np.ndarray:
    """Of the next version: what the engine computes is not what the trainer does."""
    version = engine.versions.store.latest + 1
    return plain_script.canary(engine.versions.load(version)) + 0.01


def test_a_wrong_canary_is_noticed(tied: Remote) -> None:
    """By an idle engine at once, else unless newer weights overtake it."""
    version = tied.versions.store.latest + 1
    with pytest.raises(StaleWeights, match=f"version {version}: the engine's logprobs of the can"):
        tied.update(wrong_canary(tied))
    with pytest.raises(StaleWeights, match="nan off"):
        tied.update(np.full(CANARY_TOKENS, np.nan, np.float32))
    tied.update()
    assert tied.call(getattr, "canary").gap < EXACT
    running = tied.add(PROMPT)
    tied.step(3)
    tied.update(wrong_canary(tied))
    version = tied.update()
    tied.step(3)
    assert set(running.versions) == {version - 2, version}
    assert tied.errors(PROMPT, running).max() < EXACT
    tied.update(wrong_canary(tied))  # it is on its way
    with pytest.raises(StaleWeights, match="canary"):
        tied.step(2)
    tied.update()
    tied.call(Engine.abort, [tied.next_key])
    tied.step()


# Sampling -------------------------------------------------------------------------------------


CASES = [{"temperature": 1.3}, {"top_k": 10}, {"temperature": 0.7, "top_p": 0.8}]


@pytest.mark.parametrize("case", [*CASES, {"temperature": 0.0, "max_tokens": 20}], ids=str)
def test_logprobs_are_of_the_distribution_sampled_from(case: dict[str, Any], tied: Remote) -> None:
    sampling = replace(FREE, **case)
    answer = tied.add(PROMPT, sampling)
    tied.step()
    version, temperature = answer.versions[0], sampling.temperature or 1.0
    all_TV = tied.versions.distributions(version, PROMPT + answer.tokens, temperature)
    all_TV = all_TV[len(PROMPT) - 1 :]
    sorted_TV, order_TV = all_TV.sort(descending=True)
    before_TV = sorted_TV.exp().cumsum(-1) - sorted_TV.exp()
    is_in_TV = before_TV < sampling.top_p
    if sampling.top_k:
        is_in_TV[:, sampling.top_k :] = False
    kept_TV = sorted_TV.where(is_in_TV, -torch.inf).log_softmax(-1)
    rank_T = (order_TV == torch.tensor(answer.tokens)[:, None]).int().argmax(-1)
    exact_T = kept_TV.gather(1, rank_T[:, None])[:, 0]
    assert np.abs(exact_T.numpy() - np.array(answer.logprobs)).max() < EXACT
    if sampling.temperature == 0:
        assert not rank_T.any()


def test_short_answers_keep_their_stop(engines: dict[str, Remote], tied_folder: Path) -> None:
    from transformers import AutoTokenizer

    engine, tokenizer = engines["short"], AutoTokenizer.from_pretrained(tied_folder)
    prompts = [tokenizer.encode(f"{i:08d}") for i in range(48)]  # whole characters, no letter
    answers = [engine.add(prompt, Sampling(4, 1.0)) for prompt in prompts]
    engine.step(2)
    engine.update()
    engine.step()
    ends: Counter[str] = Counter()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert engine.errors(prompt, answer).max() < EXACT
        *before, last = answer.tokens
        text = tokenizer.decode(before, skip_special_tokens=True)
        assert not any(stop in text for stop in STOP_TEXTS)
        assert not {*before} & {*STOP_TOKENS, tokenizer.eos_token_id}
        is_text = tokenizer.decode(answer.tokens).endswith(STOP_TEXTS)
        is_token, is_eos = last in STOP_TOKENS, last == tokenizer.eos_token_id
        is_cut = answer.stop is StopReason.LENGTH
        assert len(answer.tokens) == 4 if is_cut else is_text or is_token or is_eos
        ends.update(text=is_text and not is_cut, token=is_token and not is_cut, length=is_cut)
    assert all(ends.values())
    assert engine.call(getattr, "canary").gap < EXACT


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_weights_change_in_flight_on_cuda(tied_folder: Path, tmp_path: Path) -> None:
    """With captured graphs, in bfloat16: only the mean is near, but a wrong version is nats off."""
    rollout = replace(CONFIG.rollout, memory_fraction=0.3)
    config = replace(CONFIG, model=ModelConfig(dtype="bfloat16"), rollout=rollout)
    with running(tmp_path, {"cuda": (config, tied_folder)}, CUDA_ENGINE_PLACE) as engines:
        answers = through_versions(engines["cuda"], num_steps=12, num_updates=4)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.versions == sorted(answer.versions)
            assert engines["cuda"].errors(prompt, answer).mean() < 0.1
