"""Engine and trainer on the same GPU or cores: their placements, their memory, and at η = 0 their
turns. On a CPU vLLM's sleep keeps the weights: the stand-in below drops them, as on CUDA."""

import json
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import Run, assert_accounted
from test_rollout_worker import CONFIG, OFTEN, started

from minirl import devices, recipe
from minirl.config import BufferConfig, Config, DevicesConfig, RolloutConfig
from minirl.rollout import worker
from minirl.rollout.engine import Engine
from minirl.rollout.worker import RolloutSetup
from minirl.shm.board import BoardWriter, State, Total
from minirl.supervisor import memory_hint

SHARED = DevicesConfig(share=True)
IN_TURNS = Config(devices=SHARED, buffer=BufferConfig(max_staleness=0))
AT_ONCE = Config(devices=SHARED, rollout=RolloutConfig(kv_cache_gib=3.0))


def test_both_have_all_cores_or_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda pid: {4, 5, 6})
    for place in [*place_all("cpu", 3)]:
        assert place.cores == (4, 5, 6) and place.env["OMP_NUM_THREADS"] == "3"
        assert place.env["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,2")
    assert [place.env["CUDA_VISIBLE_DEVICES"] for place in place_all("cuda", 2)] == ["7", "7"]


def place_all(kind: str, available: int) -> Iterator[devices.Placement]:
    for pool in devices.place(AT_ONCE, kind, available):
        yield from pool


def test_only_the_only_gpu_is_shared_by_itself() -> None:
    for kind, available, is_shared in (("cuda", 1, True), ("cuda", 2, False), ("cpu", 1, False)):
        assert recipe.check_devices(Config(), kind, available).devices.share == is_shared


def test_each_stays_within_its_bill(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = devices.engine_arguments(AT_ONCE, "cuda")
    assert arguments["kv_cache_memory_bytes"] == 3 * 2**30
    assert arguments["gpu_memory_utilization"] == 0.01 and not arguments["enable_sleep_mode"]
    assert devices.engine_arguments(IN_TURNS, "cuda")["enable_sleep_mode"]
    assert devices.engine_arguments(Config(), "cuda")["kv_cache_memory_bytes"] is None
    gpu, limits = SimpleNamespace(total_memory=24 * 2**30), list[float]()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    for config in (AT_ONCE, IN_TURNS):
        devices.leave_room_for_engine(config, weights_bytes=6 * 2**30)
    assert limits == [12 / 24, 21 / 24]


def test_an_engine_without_memory_on_a_shared_gpu_names_its_kv_cache() -> None:
    for said, advice in ("CUDA out of memory", "3.0 to 1.5"), ("6 GiB KV cache is needed", "6.0"):
        assert advice in memory_hint("rollout", said, AT_ONCE, "cuda")


def run_forgetful(setup: RolloutSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of a worker whose engine loses its weights when it sleeps."""

    def zero(wrapper: Any) -> None:
        for parameter in wrapper.worker.model_runner.model.parameters():
            parameter.data.zero_()

    def sleep(engine: Engine) -> None:
        keeps(engine)
        engine._engine.collective_rpc(zero)

    keeps, Engine.sleep = Engine.sleep, sleep  # type: ignore[method-assign]
    worker.run(setup, board, pipe)


@pytest.mark.vllm
def test_an_engine_sleeps_after_its_work_and_wakes_with_whole_weights(
    tied_folder: Path, tmp_path: Path
) -> None:
    """For a newer version, and for prompts without one; every logprob is exact."""
    config = replace(CONFIG, devices=SHARED, buffer=BufferConfig(max_staleness=0))
    with started(tied_folder, tmp_path, config, "test_share:run_forgetful") as station:
        versions, board, row = station.versions, station.inbox.workers.board, station.worker.row

        def sleeps() -> bool:
            return board.row(row).state is State.SLEEPING

        for wakes_by in ("start", "prompts", "version"):
            if wakes_by == "version":
                versions.publish_next(OFTEN)
                station.wait_until(lambda: not sleeps())
            group = station.submit_new()
            station.wait_done(group)
            station.wait_until(sleeps)
            assert {view.versions[-1] for view in station.views(group)} == {versions.store.latest}
        assert board.total(row, Total.RELOADS) == 2  # beside the first, before it started
        versions.publish_next()  # and no prompts: as after a rollback, with a batch ready
        station.wait_until(lambda: board.row(row).version == versions.store.latest and sleeps())


@pytest.mark.vllm
@pytest.mark.parametrize("eta", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_shares_its_cores_and_trains_only_while_the_engine_sleeps(
    eta: int, tmp_path: Path, tied_folder: Path
) -> None:
    shared = {"devices__share": "true", "buffer__max_staleness": eta, "log__trace": "true"}
    run = Run(tmp_path / "run", model__path=tied_folder, eval__every=2, **shared)
    ended = run.end()
    assert ended.code == 0, ended
    assert "both on the same cores: engines idle" in ended.out
    assert_accounted(run.metrics(), max_staleness=eta)
    assert run.summary()["logprob_gap_max"] < 1e-3
    events = json.loads((run.dir / "trace.json").read_text().rstrip(",\n") + "]")
    pids = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}

    def spans(name: str, start: str) -> list[tuple[float, float]]:
        own = [e for e in events if e["ph"] == "X" and e["pid"] == pids[name]]
        return [(e["ts"], e["ts"] + e["dur"]) for e in own if e["name"].startswith(start)]

    asleep, training = spans("rollout-0", "sleeping"), spans("train-0", "training")
    assert bool(asleep) == (eta == 0) and len(training) >= 4
    if eta == 0:
        assert all(any(a <= x and y <= b for a, b in asleep) for x, y in training)
