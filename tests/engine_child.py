"""The part of test_engine.py that runs beside vLLM, in a process of its own: it holds the engines
and calls what it is sent. vLLM needs its environment before torch is imported, hence a process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from minirl.errors import StaleWeights
from minirl.rollout.engine import Chunk, Engine, Sampling
from minirl.rollout.worker import RolloutSetup
from minirl.shm.board import BoardWriter

Weights = dict[str, torch.Tensor]
CALLS_ALLOWED_TO_FAIL = (StaleWeights, ValueError)


@dataclass(frozen=True)
class Call:
    """Of a function of this module, on one of the engines."""

    engine: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Result:
    value: Any = None
    error: Exception | None = None


def run(setups: dict[str, RolloutSetup], board: BoardWriter, pipe: Connection) -> None:
    """The body of the process. A call that is not a Call ends it."""
    engines = {
        name: Engine(s.config, s.folder, s.kind, s.store, s.seed) for name, s in setups.items()
    }
    pipe.send(Result())
    while isinstance(call := pipe.recv(), Call):
        try:
            pipe.send(Result(call.function(engines[call.engine], *call.arguments)))
        except CALLS_ALLOWED_TO_FAIL as error:
            pipe.send(Result(error=error))


def reload(engine: Engine) -> int:
    engine.reload()
    return engine.version


def canary_gap(engine: Engine) -> float:
    return engine.canary_gap


def reseed(engine: Engine, seed: int) -> None:
    engine.reseed(seed)


def add(engine: Engine, key: int, prompt: list[int], sampling: Sampling, priority: int) -> None:
    engine.add(key, prompt, sampling, priority)


def steps(engine: Engine, count: int) -> list[tuple[int, Chunk]]:
    """So many steps at most; each chunk with the version that the engine says it serves."""
    found = []
    for _ in range(count):
        if not engine.is_busy:
            break
        version = engine.version
        found += [
            (version, Chunk(c.key, list(c.tokens), list(c.logprobs), c.stop)) for c in engine.step()
        ]
    return found


def abort(engine: Engine, keys: list[int]) -> None:
    engine.abort(keys)


def lose_tensors(engine: Engine, names: list[str] | None) -> None:
    """From now on these never arrive; None: nothing does. An empty list: all is well again."""

    def lose(weights: Weights) -> Weights:
        return {n: w for n, w in weights.items() if names is not None and n not in names}

    _copy_instead(engine, lose)


def tear(engine: Engine, is_torn: bool) -> None:
    """From now on every other tensor is loaded from the slot of the version before."""

    def tear_apart(weights: Weights) -> Weights:
        other = dict(engine._store.views(1 - engine._store.latest % 2))
        return {n: other[n] if i % 2 else w for i, (n, w) in enumerate(weights.items())}

    _copy_instead(engine, tear_apart if is_torn else lambda weights: weights)


def _copy_instead(engine: Engine, change: Callable[[Weights], Weights]) -> None:
    def patch(wrapper: Any) -> None:
        worker = wrapper.worker
        worker.copy = lambda weights: type(worker).copy(worker, change(weights))

    engine._engine.collective_rpc(patch)
