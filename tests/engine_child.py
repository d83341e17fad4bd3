"""The part of test_engine.py that runs beside vLLM, in a process of its own: it holds the engines
and calls what it is sent. vLLM needs its environment before torch is imported, hence a process.
"""

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from minirl.errors import StaleWeights
from minirl.rollout.engine import Chunk, Engine
from minirl.rollout.worker import RolloutSetup
from minirl.shm.board import BoardWriter

Weights = dict[str, torch.Tensor]


class Call(NamedTuple):
    """Of a method of Engine, a function of this module, or getattr, on one of the engines."""

    engine: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Result(NamedTuple):
    value: Any = None
    error: Exception | None = None


def run(setups: dict[str, RolloutSetup], board: BoardWriter, pipe: Connection) -> None:
    """The body of the process. A call that is not a Call ends it."""
    if "TRITON_INTERPRET" in os.environ:  # `make v2`: this one kernel cannot be interpreted
        import vllm.v1.sample.ops.topk_topp_sampler as sampler

        sampler.HAS_TRITON = False
    engines = {
        name: Engine(s.config, s.folder, s.kind, s.store, s.seed) for name, s in setups.items()
    }
    if "TRITON_INTERPRET" in os.environ:
        first: Any = next(iter(engines.values()))
        assert first._engine.vllm_config.use_v2_model_runner
    pipe.send(Result())
    while isinstance(call := pipe.recv(), Call):
        try:
            pipe.send(Result(call.function(engines[call.engine], *call.arguments)))
        except (StaleWeights, ValueError) as error:
            pipe.send(Result(error=error))


def steps(engine: Engine, count: int) -> list[Chunk]:
    """So many steps at most."""
    found: list[Chunk] = []
    for _ in range(count):
        if not engine.is_busy:
            break
        found += [chunk._replace(tokens=list(chunk.tokens)) for chunk in engine.step()]
    return found


def break_copies(engine: Engine, fault: str) -> None:
    """From now on copies go wrong: "all" loses every tensor, "torn" takes every other one from the
    slot of the version before, a name loses that tensor, and "" mends it."""

    def change(weights: Weights) -> Weights:
        if fault == "torn":
            other = dict(engine._store.views(1 - engine._store.latest % 2))
            return {n: other[n] if i % 2 else w for i, (n, w) in enumerate(weights.items())}
        return {n: w for n, w in weights.items() if fault not in ("all", n)}

    def patch(wrapper: Any) -> None:
        worker = wrapper.worker
        worker.copy = lambda weights: type(worker).copy(worker, change(weights))

    engine._engine.collective_rpc(patch)
