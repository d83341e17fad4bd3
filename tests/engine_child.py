"""The part of test_engine.py that runs beside vLLM, in a process of its own: it holds the engines
and calls what it is sent. vLLM needs its environment before torch is imported, hence a process.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from minirl import devices
from minirl.errors import StaleWeights
from minirl.rollout.engine import Chunk, Engine
from minirl.rollout.worker import RolloutSetup
from minirl.shm.board import BoardWriter


class Result(NamedTuple):
    value: Any = None
    error: Exception | None = None


def run(setups: dict[str, RolloutSetup], board: BoardWriter, pipe: Connection) -> None:
    """The body of the process. A call is an engine's name, a method of Engine, a function of this
    module, or getattr, and its arguments; anything else ends the process."""
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
