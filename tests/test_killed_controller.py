"""kill -9 of the controller: every worker ends with it, nothing half written is in the way, and the
next controller resumes. Real processes around scripted workers; the controller is a fork of this
process, so that a run takes a second.
"""

import os
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crew import LIMIT_S, wait_until
from test_supervisor import soon, stage, stage_config  # noqa: F401 (a fixture)

from minirl.run_dir import read_lines
from minirl.train.checkpoint import read_whole
from tests.soak.controller_process import living, orphaned_memory


def controller(folder: Path, **settings: Any) -> int:
    """A run in a session of its own, which resumes what is in the folder. Its exit code is 0 only
    if all that `run_and_check` asks for is true at the end."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        with stage(folder, is_resumed=True, **settings) as run:
            run.run_and_check()
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def strike(pid: int) -> None:
    """Kills a controller, and sees that nothing is left of it."""
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    wait_until(lambda: not living(pid))


def resume(folder: Path, **settings: Any) -> None:
    pid = controller(folder, **settings)
    assert os.waitpid(pid, 0)[1] == 0
    assert living(pid) == [] and list(folder.rglob("*.tmp")) == []


@pytest.fixture(autouse=True)
def no_memory_is_left() -> Iterator[None]:
    before = orphaned_memory()
    yield
    wait_until(lambda: not orphaned_memory() - before)


def test_while_workers_start(tmp_path: Path) -> None:
    pid = controller(tmp_path, rollout={"start_s": LIMIT_S})
    wait_until(lambda: len(living(pid)) == 4)  # none of them has begun, one never will
    strike(pid)
    assert read_lines(tmp_path / "metrics.jsonl") == []
    resume(tmp_path)


def test_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    pid = controller(tmp_path, train={"bad": {"long_save": 6}})
    half = tmp_path / "checkpoints" / ".step-000006.tmp"
    wait_until(half.is_dir)
    strike(pid)
    assert half.is_dir() and not (half / "config.json").exists()
    assert read_whole(tmp_path / "checkpoints" / "step-000003").step == 3
    resume(tmp_path)
    assert not half.exists()


def test_while_it_evaluates(tmp_path: Path) -> None:
    """evals.jsonl has no line of the evaluation that was under way: it is done again."""
    config = stage_config(every=2)
    pid = controller(tmp_path, config=config, rollout={"bad": {"long_evaluation": 2}})
    saved = tmp_path / "checkpoints" / "step-000002"
    wait_until(saved.is_dir)
    strike(pid)
    assert read_whole(saved).evaluating == 2
    assert 2 not in [line["version"] for line in read_lines(tmp_path / "evals.jsonl")]
    resume(tmp_path, config=config)
    versions = [line["version"] for line in read_lines(tmp_path / "evals.jsonl")]
    assert 2 in versions and versions == sorted(set(versions))
