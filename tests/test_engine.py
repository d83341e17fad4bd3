"""A real vLLM engine whose weights change as it samples, against plain forwards of each version."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from string import ascii_letters
from typing import Any, NamedTuple

import numpy as np
import plain_script
import pytest
import torch
import varlen_cpu  # noqa: F401  registers the kernel of packed attention
from cases import each_case
from plain_script import EXACT, Versions
from processes import CUDA_ENGINE_PLACE, ENGINE_PLACE, Inbox, crew

from minirl import devices
from minirl.config import Config, DevicesConfig, ModelConfig, RolloutConfig, TasksConfig
from minirl.devices import Placement
from minirl.errors import StaleWeights
from minirl.messages import Role
from minirl.metrics import MAX_LOGPROB_GAP
from minirl.records import StopReason
from minirl.rollout.engine import LIMIT, NUM_NEARER, Canary, Chunk, Engine, Sampling
from minirl.rollout.weight_loader import LoadedTensors, WeightLoader, find_piece
from minirl.rollout.worker import RolloutSetup
from minirl.shm.board import BoardWriter
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import CANARY_TOKENS, TensorSpec, WeightStore
from minirl.train import attention, policy
from minirl.workers import Worker

pytestmark = pytest.mark.vllm

PROMPT = [(5 + 37 * i) % 380 + 2 for i in range(70)]  # more than two blocks of the prefix cache
CONFIG = Config(
    tasks=TasksConfig(max_prompt_tokens=128),
    rollout=RolloutConfig(max_new_tokens=128, max_num_seqs=16, kv_cache_gib=0.125),
)
FREE = Sampling(max_tokens=100, temperature=1.0)


class Result(NamedTuple):
    value: Any = None
    error: Exception | None = None


def run(setups: dict[str, RolloutSetup], board: BoardWriter, pipe: Connection) -> None:
    """The body of the process that holds the engines: vLLM needs its environment before torch is
    imported. A call is an engine's name, a method of Engine, a function of this module, or getattr,
    and its arguments; anything else ends the process."""
    if "TRITON_INTERPRET" in os.environ:  # `make v2`: this one kernel cannot be interpreted
        import vllm.v1.sample.ops.topk_topp_sampler as sampler

        sampler.HAS_TRITON = False
    engines = {}
    for name, setup in setups.items():
        with async_scheduling(name.startswith("async")):
            engines[name] = Engine(setup.config, setup.folder, setup.kind, setup.store, setup.seed)
            core = engines[name]._engine.engine_core.engine_core
            assert (core.batch_queue is not None) == name.startswith("async")
    if "TRITON_INTERPRET" in os.environ:
        first: Any = next(iter(engines.values()))
        assert first._engine.vllm_config.use_v2_model_runner
    pipe.send(Result())
    while isinstance(call := pipe.recv(), tuple):
        name, function, arguments = call
        try:
            pipe.send(Result(function(engines[name], *arguments)))
        except (StaleWeights, ValueError) as error:
            pipe.send(Result(error=error))
    for engine in engines.values():
        engine.shutdown()


@contextmanager
def async_scheduling(is_on: bool) -> Iterator[None]:
    """As on CUDA: vLLM itself turns it off on a CPU."""
    from vllm.platforms import current_platform

    arguments, check = devices.engine_arguments, current_platform.check_and_update_config

    def check_all_else(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = is_on

    kind = type(current_platform)
    kind.check_and_update_config = staticmethod(check_all_else)
    devices.engine_arguments = lambda *a: {**arguments(*a), "async_scheduling": is_on}
    yield
    kind.check_and_update_config, devices.engine_arguments = check, arguments


def steps(engine: Engine, count: int) -> list[Chunk]:
    """So many steps at most."""
    found: list[Chunk] = []
    for _ in range(count):
        if not engine.is_busy:
            break
        found += [chunk._replace(tokens=list(chunk.tokens)) for chunk in engine.step()]
    return found


def unplaced(engine: Engine) -> list[str]:
    """Tensors that are left to the canary, of all ranks."""

    def names(wrapper: Any) -> list[str]:
        return wrapper.worker._loaded.unplaced

    return [name for rank in engine._engine.collective_rpc(names) for name in rank]


def break_copies(engine: Engine, fault: str) -> None:
    """From now on copies go wrong: "all" loses every tensor, "torn" takes every other one from the
    slot of the version before, a name loses that tensor, and "" mends it."""

    def patch(wrapper: Any) -> None:
        worker = wrapper.worker

        def copy(weights: dict[str, Any]) -> None:
            kept = {n: w for n, w in weights.items() if fault not in ("all", n)}
            if fault == "torn":
                store = worker._store
                other = dict(store.views(int(store._versions[0] == store.latest)))
                kept = {n: other[n] if i % 2 else w for i, (n, w) in enumerate(weights.items())}
            type(worker).copy(worker, kept)

        worker.copy = copy

    engine._engine.collective_rpc(patch)


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
        for chunk in self.call(steps, count):
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
SHARDED = replace(HALF, devices=DevicesConfig(kind="cpu", rollout=2, tensor_parallel=2))
IN_HALF = ("half", "sharded") * ("TRITON_INTERPRET" not in os.environ)  # `make v2`: minutes each
UPDATE = 2e-3  # about an update's: less than bfloat16's noise in the canary

Settings = dict[str, tuple[Config, Path]]


@contextmanager
def running(logs: Path, settings: Settings, place: Placement) -> Iterator[dict[str, Remote]]:
    """All in one process: most of a start is imports."""
    versions, setups = dict[str, Versions](), {}
    for name, (config, folder) in settings.items():
        versions[name] = Versions(folder, config.model.dtype)
        if name in IN_HALF:
            versions[name].scale = UPDATE
        versions[name].publish(0)
        ring, store = TrajectoryRing(1, 1), versions[name].store
        setups[name] = RolloutSetup(config, str(folder), place.kind, 1, ring, store)
    with crew(logs, 1) as inbox:
        worker = inbox.workers.spawn(Role.ROLLOUT, 0, f"{__name__}:run", setups, place)
        inbox.take(worker, Result)
        remotes = {name: Remote(name, inbox, worker, versions[name]) for name in settings}
        for remote in remotes.values():
            remote.reload()
        yield remotes
        inbox.workers.stop("end")  # so that vLLM's own processes take their memory away


def sweep_what_a_killed_engine_left(folder: Path) -> None:
    left = [Path(f"/dev/shm/{path.stem}-left") for path in folder.glob("vllm_dist_*.shm")]
    for path in left:
        path.touch()
        (folder / path.name.removesuffix("-left")).unlink(missing_ok=True)  # as vLLM may have
    devices.sweep_temp(folder)
    assert len(left) == 1 and not left[0].exists()


@pytest.fixture(scope="module")
def engines(
    tied_folder: Path, llama_folder: Path, biased_folder: Path, tmp_path_factory: Any
) -> Iterator[dict[str, Remote]]:
    """The Llama has a head of its own (untied). One engine is on two ranks."""
    folders, logs = {"llama": llama_folder}, tmp_path_factory.mktemp("logs")
    settings = {name: (config, folders.get(name, tied_folder)) for name, config in ENGINES.items()}
    with ExitStack() as stack:
        remotes = {}
        if IN_HALF:
            settings["half"] = HALF, biased_folder
            (place,), _ = devices.place(SHARDED, "cpu", devices.num_cores(), ranks=False)
            stack.callback(sweep_what_a_killed_engine_left, logs)
            place, two = devices.with_own_temp(place, logs), {"sharded": (SHARDED, biased_folder)}
            remotes = stack.enter_context(running(logs / "two", two, place))
        yield remotes | stack.enter_context(running(logs, settings, ENGINE_PLACE))


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
    before = engine.add(PROMPT, FREE._replace(max_tokens=5))
    engine.step(5)
    engine.update()
    after = engine.add(PROMPT, FREE._replace(max_tokens=5))
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


@pytest.mark.parametrize("name", IN_HALF)
def test_no_healthy_version_is_stopped(name: str, engines: dict[str, Remote]) -> None:
    """And no tensor is left to the canary."""
    engine, gaps = engines[name], []
    assert engine.call(unplaced) == []
    for _ in range(NUM_VERSIONS):
        engine.update()
        gaps.append(engine.call(getattr, "canary").gap)
    print(f"canary gap: mean {np.mean(gaps):.4f}, largest {max(gaps):.4f}")
    assert 0 < max(gaps) < LIMIT["bfloat16"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reload_that_went_wrong(fault: str, engines: dict[str, Remote]) -> None:
    """The first tensor that was left behind is named."""
    for name in ("tied", "llama", *IN_HALF):
        engine = engines[name]
        names = [spec.name for spec in engine.versions.store.table]
        if fault in ("all", "torn", *names):
            first = {"all": names[0], "torn": names[1]}.get(fault, rf"{fault} \(and 0 more\)")
            first = first if name != "sharded" else fault * (fault in names)
            engine.call(break_copies, fault)
            with pytest.raises(StaleWeights, match=f"did not reach the engine: tensor {first}"):
                engine.update()
            engine.call(break_copies, "")
            engine.update()


def wrong_canary(engine: Remote) -> np.ndarray:
    """Of the next version: what the engine computes is not what the trainer does."""
    version = engine.versions.store.latest + 1
    return plain_script.canary_of(engine.versions.load(version)) + 0.01


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
    tied.update(wrong_canary(tied))
    version = [tied.versions.publish(version + i, None) or version + i for i in (2, 3)][-1]
    tied.step(3)
    assert running.versions[-1] == version, "its slot was overwritten: the newest was loaded"
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
    sampling = FREE._replace(**case)
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


def test_a_seed_repeats_what_is_sampled(tied: Remote) -> None:
    def sample(seed: int) -> list[list[int]]:
        tied.call(Engine.reseed, seed)
        answers = [tied.add(PROMPT[: 40 + i], FREE._replace(max_tokens=20)) for i in range(3)]
        tied.step()
        return [answer.tokens for answer in answers]

    once = sample(7)
    assert sample(8) != once == sample(7) and once[0] != once[1]


def test_what_comes_first_by_priority_is_served_first(tied: Remote) -> None:
    num_seats = CONFIG.rollout.max_num_seqs + 1
    one = FREE._replace(max_tokens=1)
    answers = [tied.add(PROMPT[:20], one, priority=-i) for i in range(num_seats + 3)]
    tied.step(1)
    assert [bool(answer.tokens) for answer in answers] == [False] * 3 + [True] * num_seats
    tied.step()


@pytest.mark.parametrize("name", IN_HALF)
def test_a_trainer_in_bfloat16_is_near_its_engine(
    name: str, engines: dict[str, Remote], biased_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the branches that CUDA takes."""
    engine, gaps = engines[name], list[float]()
    monkeypatch.setattr(policy, "AUTOCAST_ON", {"cpu"})
    monkeypatch.setattr(attention, "VARLEN_ON", {"cpu"})
    answers = [engine.add(prompt) for prompt in PROMPTS]
    engine.step()
    trainer = policy.load_policy(str(biased_folder), "bfloat16")
    trainer.model.load_state_dict(engine.versions.load(answers[0].versions[0]).state_dict())
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens, num = [*prompt, *answer.tokens], len(answer.tokens)
        logprobs_T, _ = trainer(torch.tensor(tokens), attention.boundaries([len(tokens)]))
        gaps += (logprobs_T[-num:] - torch.tensor(answer.logprobs)).abs().tolist()
    print(f"logprob gap: mean {np.mean(gaps):.4f}, largest {max(gaps):.4f}")
    assert 1e-4 < np.mean(gaps) < MAX_LOGPROB_GAP


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


# Without an engine ----------------------------------------------------------------------------


def test_on_cuda_the_store_is_pinned_and_no_copy_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    store, seen = WeightStore((TensorSpec("weight", (1, 3)),), "float32"), list[Any]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "pin", lambda memory: seen.append(memory.nbytes))
    WeightLoader().open_store(store.table, store.dtype, store.path)
    weights, model = dict(store.views(0)), torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(model.weight)  # as in the store
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *_, non_blocking: seen.append(non_blocking))
    LoadedTensors(model, weights, 0, 1).load(model, weights)
    assert seen == [store.memory.nbytes, True]


@each_case("rank_slices")
def test_rank_slices(case: dict[str, Any]) -> None:
    room, full, num_ranks, rows, why = case.values()
    tensor = torch.arange(3.0 * full).view(full, 3)
    for rank, (start, stop) in enumerate(rows):
        for of, held in ((tensor, torch.zeros(room, 3)), (tensor.T, torch.zeros(3, room))):
            piece, own = find_piece(held, of.shape, rank, num_ranks), tensor[start:stop]
            assert piece is not None and piece.held.shape == of[piece.of].shape, why
            assert torch.equal(of[piece.of], own.T if len(of) == 3 else own)


def through(canary: Canary, noise: float, change: float, is_stale: bool, count: int) -> list[str]:
    """What the canary says of each version: the trainer's logprobs change by `change`."""
    dice, trainer, said = np.random.default_rng(0), np.zeros(63), []
    first = trainer
    for _ in range(count):
        serves = first if is_stale else trainer
        said.append(canary.judge(serves + noise * dice.standard_normal(63), trainer))
        trainer = trainer + change * dice.standard_normal(63)
    return said


@pytest.mark.parametrize("noise", [1e-6, 0.1])
@pytest.mark.parametrize("change", [0.0, 0.1, 1.0, 10.0])
def test_the_canary_knows_noise_from_an_older_version(noise: float, change: float) -> None:
    dtype = "bfloat16" if noise > 1e-3 else "float32"
    assert not any(through(Canary(dtype), noise, change * noise, False, 1000))
    said = through(Canary(dtype), noise, change * noise, True, 400)
    if noise == 0.1 and change >= 1:
        assert not any(said[:NUM_NEARER]) or change > 3
        assert "older version" in "".join(said) or "(limit" in "".join(said)


def test_the_limit_comes_from_the_first_load() -> None:
    for gap, later, is_fine in ((0.01, 0.24, True), (0.01, 0.26, False), (0.1, 0.39, True)):
        canary, trainer = Canary("bfloat16"), np.zeros(63)
        assert canary.judge(trainer + gap, trainer) == ""
        assert (canary.judge(trainer - later, trainer) == "") == is_fine
        assert "nan off" in canary.judge(trainer * np.nan, trainer)
    for dtype, gap in (("bfloat16", 0.51), ("float32", 0.011)):
        assert Canary(dtype).judge(np.full(63, gap), np.zeros(63)).endswith("model differently")
