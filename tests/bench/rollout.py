"""The rollout bench: the rollout worker against the engine it is made of.

    worker_over_bare_vllm       tokens/s of the worker's loop (logprobs, versions, ring, messages) /
                                of vllm.LLM.generate over the same prompts with the same sampling
    interruptible_over_waiting  tokens/s with weights swapped under running answers / with updates
                                that wait until all running answers are finished (the AReaL paper's
                                figure 6b); long-tailed lengths, an update every so many answers

Reported beside them: bare vLLM without logprobs, and (on CPU) with the packed weights of oneDNN,
which cannot be changed in place, so that no trainer can use them.
"""

import random
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from minirl import devices
from minirl.messages import Finished
from minirl.shm.weights import WeightStore
from minirl.workers import Worker
from tests.bench import Figure, Options, at_least, median
from tests.bench.clock import steady
from tests.bench.models import SHAPES, Publisher, publish, publish_every
from tests.bench.processes import Processes, processes
from tests.bench.worker_harness import WaitingLongTailed, WorkerHarness, config_of, random_prompt

UPDATE_S = 1.0


@dataclass(frozen=True)
class Size:
    num_seqs: int
    num_groups: int
    group_size: int
    prompt_tokens: int
    new_tokens: int
    repeats: int
    tail_tokens: int  # the longest answer of the long tail
    num_updates: int
    answers_per_update: int
    tail_repeats: int
    kv_cache_gib: float = 0.25


SIZES = {
    "tiny": Size(32, 16, 4, 64, 96, 5, 512, 3, 64, 3),
    "135m": Size(16, 8, 4, 32, 32, 2, 128, 2, 32, 2, kv_cache_gib=1.0),
}
QUICK = Size(4, 4, 2, 16, 8, 1, 32, 1, 4, 1)


def measure(options: Options) -> list[Figure]:
    shape = SHAPES[options.model]
    size = QUICK if options.is_quick else SIZES[options.model]
    with processes(2) as here:
        folder = shape.write(here.folder / "model")
        store = WeightStore(shape.table, "float32")
        publisher = here.part(here.train_place, Publisher, folder, store)
        bench = here.part(here.rollout_place, Rivals, folder, here.kind, store, size, shape.vocab)
        here.result(publisher)
        here.result(bench)
        figures = _against_bare(here, bench, publisher, size)
        return figures + _against_waiting(here, bench, publisher, size)


class Rivals:
    """The worker and the bare engines in one process, on the same cores; one works at a time."""

    def __init__(
        self, pipe: Connection, folder: str, kind: str, store: WeightStore, size: Size, vocab: int
    ):
        self.size, self.vocab, self.seed = size, vocab, 0
        longest = max(size.new_tokens, size.tail_tokens)
        config = config_of(
            size.prompt_tokens, longest, size.num_seqs, "recompute", size.kv_cache_gib
        )
        devices.hide_broken_torchvision()
        self.bare: dict[str, Any] = {}
        if kind == "cpu":
            self.bare["onednn"] = bare_engine(config, folder, kind)
        devices.keep_weights_writable()
        self.bare["bare"] = bare_engine(config, folder, kind)
        self.worker = WorkerHarness(pipe, config, folder, kind, store)
        engine = self.worker.engine
        self.waiting = WorkerHarness(pipe, config, folder, kind, store, WaitingLongTailed, engine)

    def prompts(self) -> list[list[int]]:
        """The same for all that are given the same seed."""
        rng, size = random.Random(self.seed), self.size
        return [random_prompt(rng, size.prompt_tokens, self.vocab) for _ in range(size.num_groups)]


def bare_engine(config: Any, folder: str, kind: str) -> Any:
    """vLLM as anybody would start it, with the sizes of the worker's engine."""
    from vllm import LLM

    return LLM(
        model=folder,
        dtype=config.model.dtype,
        max_model_len=config.max_tokens_per_trajectory,
        max_num_seqs=config.rollout.max_num_seqs,
        load_format="dummy",
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        **devices.engine_arguments(config, kind),
    )


def next_prompts(rivals: Rivals) -> None:
    rivals.seed += 1


def run_bare(rivals: Rivals, name: str, logprobs: int | None) -> float:
    """Tokens per second."""
    from vllm import SamplingParams

    size = rivals.size
    params = SamplingParams(
        max_tokens=size.new_tokens, temperature=1.0, logprobs=logprobs, detokenize=False
    )
    prompts = [
        {"prompt_token_ids": prompt} for prompt in rivals.prompts() for _ in range(size.group_size)
    ]
    start = steady()
    outputs = rivals.bare[name].generate(prompts, params, use_tqdm=False)
    spent = steady() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs) / spent


def run_worker(rivals: Rivals) -> float:
    worker, size = rivals.worker, rivals.size
    before, prompts = worker.num_tokens, rivals.prompts()
    start = steady()
    for prompt in prompts:
        worker.submit(prompt, size.new_tokens, size.group_size)
    worker.run_until(lambda: worker.is_idle)
    return (worker.num_tokens - before) / (steady() - start)


def _against_bare(here: Processes, rivals: Worker, publisher: Worker, size: Size) -> list[Figure]:
    rates: dict[str, list[float]] = {}

    def run(name: str, *call: Any) -> None:
        rates.setdefault(name, []).append(here.ask(rivals, *call))

    for _ in range(size.repeats + 1):
        here.ask(rivals, next_prompts)
        run("bare", run_bare, "bare", 0)
        run("worker", run_worker)
        run("worker_again", run_worker)
        run("bare_again", run_bare, "bare", 0)  # in this order a drift cancels out
        run("no_logprobs", run_bare, "bare", None)
        if here.kind == "cpu":
            run("onednn", run_bare, "onednn", 0)
        here.begin(rivals, run_worker)
        here.ask(publisher, publish_every, UPDATE_S, 1)
        rates.setdefault("updated", []).append(here.result(rivals))
    rates = {name: values[1:] for name, values in rates.items()}  # the first warms up
    for name in ("bare", "worker"):
        pairs = zip(rates[name], rates.pop(f"{name}_again"), strict=True)
        rates[name] = [(first + second) / 2 for first, second in pairs]
    bare = rates["bare"]

    def over_bare(name: str) -> float:
        return median([a / b for a, b in zip(rates[name], bare, strict=True)])

    figures = [
        at_least("worker_over_bare_vllm", over_bare("worker"), 0.95, "both with logprobs"),
        Figure("worker_tokens_per_s", median(rates["worker"]), note=f"{size.num_seqs} at once"),
        Figure("bare_vllm_tokens_per_s", median(bare)),
        Figure("bare_without_logprobs_over_bare", over_bare("no_logprobs")),
        Figure("worker_updated_over_bare", over_bare("updated"), note="with updates in flight"),
    ]
    if "onednn" in rates:
        figures.append(Figure("bare_onednn_over_bare", over_bare("onednn"), note="packed weights"))
    return figures


# -- updates that wait


def run_long_tail(rivals: Rivals, name: str) -> tuple[float, float, float]:
    """Until so many updates were taken: tokens, seconds, finished answers per update."""
    size = rivals.size
    worker = rivals.worker if name == "interruptible" else rivals.waiting
    rng = random.Random(rivals.seed)

    def feed() -> None:
        length = int(rng.lognormvariate(0.0, 1.0) * size.tail_tokens / 8)
        prompt = random_prompt(rng, size.prompt_tokens, rivals.vocab)
        worker.submit(prompt, max(2, min(length, size.tail_tokens)))

    tokens, reloads = worker.num_tokens, worker.num_reloads
    start = steady()
    worker.run_until(lambda: worker.num_reloads - reloads >= size.num_updates, feed)
    spent = steady() - start
    sampled = worker.num_tokens - tokens
    worker.clear()
    return sampled, spent, worker.num_reloads - reloads


def _against_waiting(
    here: Processes, rivals: Worker, publisher: Worker, size: Size
) -> list[Figure]:
    rates: dict[str, list[float]] = {"interruptible": [], "waiting": []}
    for _ in range(size.tail_repeats):
        here.ask(rivals, next_prompts)
        for name, into in rates.items():
            num_finished = 0

            def count(message: object) -> None:
                """Plays controller and trainer: an update as soon as its answers are there."""
                nonlocal num_finished
                if isinstance(message, Finished):
                    before = num_finished // size.answers_per_update
                    num_finished += len(message.trajectories)
                    if num_finished // size.answers_per_update > before:
                        here.begin(publisher, publish)

            here.begin(rivals, run_long_tail, name)
            sampled, spent, _ = here.result(rivals, count)
            into.append(sampled / spent)
            for _ in range(num_finished // size.answers_per_update):
                here.result(publisher)
    ratios = [a / b for a, b in zip(rates["interruptible"], rates["waiting"], strict=True)]
    note = f"an update every {size.answers_per_update} answers"
    return [
        at_least("interruptible_over_waiting", median(ratios), 1.1, note),
        Figure("interruptible_tokens_per_s", median(rates["interruptible"])),
        Figure("waiting_tokens_per_s", median(rates["waiting"])),
    ]
