"""The weights bench: what it costs to publish weights, to take them, and to take them often.

    publish_over_memcpy       WeightStore.publish / one memcpy of as many bytes into shared memory
    pause_over_copy           the worse of the two below
    keep_pause_over_copy      Engine.reload with sequences running / a bare load_weights
    recompute_pause_over_copy from the start of the reload until every running sequence has its
                              next token / a bare load_weights and a bare prefill of as many tokens
    *_throughput_cost         share of tokens/s that one update per second takes away; the tiny
                              model is given five per second, whose seconds lost are counted per
                              update: what one costs it would drown in the noise

All on one core, the publisher on another; repeats are interleaved and the figures are medians.
"""

import random
import time
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection

import numpy as np
import torch

from minirl.rollout.engine import Engine, Sampling
from minirl.shm.segment import Segment
from minirl.shm.weights import CANARY_TOKENS, WeightStore
from minirl.workers import Worker
from tests.bench import Figure, Options, at_most, median
from tests.bench.clock import now, steady
from tests.bench.models import SHAPES, Publisher, publish, publish_every
from tests.bench.processes import Processes, processes
from tests.bench.worker_harness import WorkerHarness, config_of, random_prompt

MODES = {"keep": 0.03, "recompute": 0.15}  # and how much of the throughput updates may cost
UPDATE_S = 1.0


@dataclass(frozen=True)
class Size:
    num_seqs: int
    prompt_tokens: int
    new_tokens: int
    steps_before: int  # tokens that each running sequence has written when the reload comes
    num_copies: int
    num_pauses: int
    num_windows: int
    window_s: float
    updates_per_window: int
    kv_cache_gib: float = 0.25


SIZES = {
    "tiny": Size(32, 64, 128, 16, 201, 15, 9, 2.0, 10),
    "135m": Size(8, 64, 128, 16, 15, 5, 3, 6.0, 6),
}
QUICK = Size(4, 16, 32, 4, 3, 2, 1, 1.0, 1)


def measure(options: Options) -> list[Figure]:
    shape = SHAPES[options.model]
    size = QUICK if options.is_quick else SIZES[options.model]
    with processes(2) as here:
        folder = shape.write(here.folder / "model")
        store = WeightStore(shape.table, "float32")
        publisher = here.part(here.train_place, Publisher, folder, store)
        engines = here.part(
            here.rollout_place, Engines, folder, here.kind, store, size, shape.vocab
        )
        here.result(publisher)
        figures = _publishing(here.ask(publisher, time_publishing, size.num_copies))
        here.result(engines)
        figures += _pauses(here, engines, publisher, size)
        for mode, goal in MODES.items():
            limit = goal if options.model == "tiny" else None
            figures += _throughput(here, engines, publisher, size, mode, limit)
    return figures


# -- publishing


def time_publishing(publisher: Publisher, repeats: int) -> tuple[list[float], list[float], int]:
    """Seconds of each publication, and of each plain copy of as many bytes, in turn."""
    store = publisher.store
    num_bytes = store.slot_bytes
    segment = Segment(2 * num_bytes)
    slots = [torch.from_numpy(segment.array(np.uint8, (num_bytes,), i * num_bytes)) for i in (0, 1)]
    sources = [torch.ones(num_bytes, dtype=torch.uint8) for _ in slots]
    publications, copies = [], []
    for i in range(repeats + 2):
        start = now()
        publisher.publish()
        middle = now()
        slots[i % 2].copy_(sources[i % 2])
        publications.append(middle - start)
        copies.append(now() - middle)
    return publications[2:], copies[2:], num_bytes  # the first two take the pages


def _publishing(timed: tuple[list[float], list[float], int]) -> list[Figure]:
    publications, copies, num_bytes = timed
    publish_s, copy_s = median(publications), median(copies)
    return [
        at_most("publish_over_memcpy", publish_s / copy_s, 1.3),
        Figure("publish_ms", 1e3 * publish_s, note=f"of {num_bytes / 2**20:.1f} MiB"),
        Figure("memcpy_gb_per_s", num_bytes / copy_s / 1e9),
    ]


# -- the pause


@dataclass(frozen=True)
class Pause:
    """Seconds of one reload and of its bare parts."""

    reload_s: float
    until_next_token_s: float
    copy_s: float
    prefill_s: float
    step_s: float  # a decode step just before


class Engines:
    """One engine of each mode in one process; one works at a time."""

    def __init__(
        self,
        pipe: Connection,
        folder: str,
        kind: str,
        store: WeightStore,
        size: Size,
        vocab: int,
    ):
        self.size, self.store, self.vocab = size, store, vocab
        self.rng = random.Random(0)
        self.keys = count()
        self.workers: dict[str, WorkerHarness] = {}
        for mode in MODES:
            longest = size.prompt_tokens + CANARY_TOKENS
            config = config_of(longest, size.new_tokens, size.num_seqs, mode, size.kv_cache_gib)
            self.workers[mode] = WorkerHarness(pipe, config, folder, kind, store)

    def prompt(self) -> list[int]:
        return random_prompt(self.rng, self.size.prompt_tokens, self.vocab)


def time_pause(engines: Engines, mode: str) -> Pause:
    """The store has a newer version than the engine of this mode."""
    size, engine = engines.size, engines.workers[mode].engine
    written = {}
    for _ in range(size.num_seqs):
        prompt, key = engines.prompt(), next(engines.keys)
        written[key] = prompt
        engine.add(key, prompt, Sampling(size.new_tokens, 1.0), priority=key)
    while min(len(tokens) for tokens in written.values()) < size.prompt_tokens + size.steps_before:
        step_s = _step(engine, written)
    lengths = {key: len(tokens) for key, tokens in written.items()}
    start = now()
    engine.reload()
    reload_s = now() - start
    while any(len(written[key]) == n for key, n in lengths.items()):
        _step(engine, written)
    until_next_token_s = now() - start
    engine.abort(list(written))
    while engine.is_busy:  # the canary, where the weights changed again
        engine.step()
    copy_s = bare_copy(engine, engines.store)
    prefill_s = bare_prefill(engine, [engines.prompt()[:1] * n for n in lengths.values()])
    return Pause(reload_s, until_next_token_s, copy_s, prefill_s, step_s)


def _step(engine: Engine, written: dict[int, list[int]]) -> float:
    start = now()
    for chunk in engine.step():
        written[chunk.key] += chunk.tokens
    return now() - start


def bare_copy(engine: Engine, store: WeightStore) -> float:
    """The same tensors into the same model by vLLM's own loader, with nothing around it."""

    def load(model: torch.nn.Module) -> float:
        start = now()
        model.load_weights(store.views(store.latest % 2))  # type: ignore[operator]
        return now() - start

    return engine._engine.apply_model(load)[0]


def bare_prefill(engine: Engine, prompts: list[list[int]]) -> float:
    """vLLM's own steps over as many new tokens, up to the first token of each."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, logprobs=0, detokenize=False)
    for i, prompt in enumerate(prompts):
        salt = f"bare-{time.monotonic_ns()}-{i}"  # nothing of it is in the prefix cache
        inputs = {"type": "token", "prompt_token_ids": prompt, "cache_salt": salt}
        engine._engine.add_request(f"bare-{i}", inputs, params)
    start = now()
    while engine._engine.has_unfinished_requests():
        engine._engine.step()
    return now() - start


def _pauses(here: Processes, engines: Worker, publisher: Worker, size: Size) -> list[Figure]:
    pauses: dict[str, list[Pause]] = {mode: [] for mode in MODES}
    for _ in range(size.num_pauses + 1):
        for mode in MODES:
            here.ask(publisher, publish)
            pauses[mode].append(here.ask(engines, time_pause, mode))
    keep, recompute = pauses["keep"][1:], pauses["recompute"][1:]  # the first warms up
    keep_ratio = median([p.reload_s / p.copy_s for p in keep])
    recompute_ratio = median(
        [p.until_next_token_s / (p.copy_s + p.prefill_s) for p in recompute],
    )
    running = f"{size.num_seqs} running sequences"
    return [
        at_most("pause_over_copy", max(keep_ratio, recompute_ratio), 1.3, "the worse mode"),
        at_most("keep_pause_over_copy", keep_ratio, 1.3),
        at_most("recompute_pause_over_copy", recompute_ratio, 1.3, "copy and prefill"),
        Figure("copy_ms", 1e3 * median([p.copy_s for p in keep + recompute]), note="bare"),
        Figure("keep_reload_ms", 1e3 * median([p.reload_s for p in keep])),
        Figure(
            "keep_next_token_ms", 1e3 * median([p.until_next_token_s for p in keep]), note=running
        ),
        Figure("decode_step_ms", 1e3 * median([p.step_s for p in keep]), note=running),
        Figure("recompute_reload_ms", 1e3 * median([p.reload_s for p in recompute])),
        Figure(
            "recompute_next_token_ms",
            1e3 * median([p.until_next_token_s for p in recompute]),
            note=running,
        ),
        Figure("prefill_ms", 1e3 * median([p.prefill_s for p in recompute]), note="bare"),
    ]


# -- what updates cost


@dataclass(frozen=True)
class Window:
    """Of steady generation."""

    num_tokens: float
    num_reloads: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def cost_of_updates(self, tokens_per_s: float) -> float:
        """Share of throughput lost at one update in UPDATE_S, where without updates it is this.

        By the seconds that one reload cost, since the window may hold more or fewer."""
        lost_s = self.seconds - self.num_tokens / tokens_per_s
        return lost_s / max(1.0, self.num_reloads) / UPDATE_S


def generate(engines: Engines, mode: str, seconds: float) -> Window:
    worker, size = engines.workers[mode], engines.size

    def feed() -> None:
        worker.submit(
            engines.prompt(), engines.rng.randrange(size.new_tokens // 4, size.new_tokens + 1)
        )

    before_tokens, before_reloads = worker.num_tokens, worker.num_reloads
    start, end = steady(), time.monotonic() + seconds
    worker.run_until(lambda: time.monotonic() >= end, feed)
    return Window(
        worker.num_tokens - before_tokens, worker.num_reloads - before_reloads, steady() - start
    )


def clear(engines: Engines, mode: str) -> None:
    engines.workers[mode].clear()


def _throughput(
    here: Processes, engines: Worker, publisher: Worker, size: Size, mode: str, goal: float | None
) -> list[Figure]:
    window_s = size.window_s
    here.ask(engines, generate, mode, window_s)  # fills the engine; also warms it up
    rates, costs = [], []
    before: Window = here.ask(engines, generate, mode, window_s)
    for _ in range(size.num_windows):
        here.begin(engines, generate, mode, window_s)
        here.ask(
            publisher, publish_every, window_s / size.updates_per_window, size.updates_per_window
        )
        during: Window = here.result(engines)
        after: Window = here.ask(engines, generate, mode, window_s)
        rates.append((before.tokens_per_s + after.tokens_per_s) / 2)  # so that a drift cancels out
        costs.append(during.cost_of_updates(rates[-1]))
        before = after
    here.ask(engines, clear, mode)
    name, note = f"{mode}_throughput_cost", f"at {1 / UPDATE_S:g} update/s"
    return [
        # The goals are the tiny model's: a copy takes longer the larger the model is.
        Figure(name, median(costs), note=note)
        if goal is None
        else at_most(name, median(costs), goal, note),
        Figure(f"{mode}_tokens_per_s", median(rates), note="without updates"),
    ]
