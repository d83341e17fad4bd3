"""kill -9 of the controller, at the moments that matter: every worker ends with it, nothing half
written is in the way, and the next controller goes on to the end. Real processes around scripted
workers; the controller is a fork of this process, so that a life takes a second.
"""

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crew import LIMIT_S, wait_until
from test_recovery import soon, stage, stage_config  # noqa: F401 (a fixture)

from minirl.run_dir import read_lines
from minirl.train.checkpoint import read_whole
from tests.soak.controller_process import living, orphaned_memory


def controller(folder: Path, **settings: Any) -> int:
    """A run in a session of its own, which goes on with what is in the folder. Its exit code is 0
    only if all that `run_and_check` asks for is true at the end."""
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


@pytest.fixture
def struck() -> Iterator[Callable[[int], None]]:
    """Kills a controller, and sees that nothing is left of it."""
    memory = orphaned_memory()

    def strike(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        wait_until(lambda: not living(pid))
        wait_until(lambda: not orphaned_memory() - memory)

    yield strike


def goes_on(folder: Path, **settings: Any) -> None:
    pid = controller(folder, **settings)
    assert os.waitpid(pid, 0)[1] == 0
    assert living(pid) == [] and list(folder.rglob("*.tmp")) == []


def test_while_workers_start(tmp_path: Path, struck: Callable[[int], None]) -> None:
    pid = controller(tmp_path, rollout={"start_s": LIMIT_S})
    wait_until(lambda: len(living(pid)) == 4)  # none of them has begun, one never will
    struck(pid)
    assert read_lines(tmp_path / "metrics.jsonl") == []
    goes_on(tmp_path)


def test_while_a_checkpoint_is_written(tmp_path: Path, struck: Callable[[int], None]) -> None:
    pid = controller(tmp_path, train={"bad": {"long_save": 6}})
    half = tmp_path / "checkpoints" / ".step-000006.tmp"
    wait_until(half.is_dir)
    struck(pid)
    assert half.is_dir() and not (half / "config.json").exists()
    assert read_whole(tmp_path / "checkpoints" / "step-000003").step == 3
    goes_on(tmp_path)
    assert not half.exists()


def test_while_it_evaluates(tmp_path: Path, struck: Callable[[int], None]) -> None:
    """No line of evals.jsonl tells of the evaluation that was under way: it is done again."""
    config = stage_config(every=2)
    pid = controller(tmp_path, config=config, rollout={"bad": {"long_evaluation": 2}})
    saved = tmp_path / "checkpoints" / "step-000002"
    wait_until(saved.is_dir)
    struck(pid)
    assert read_whole(saved).evaluating == 2
    assert 2 not in [line["version"] for line in read_lines(tmp_path / "evals.jsonl")]
    goes_on(tmp_path, config=config)
    versions = [line["version"] for line in read_lines(tmp_path / "evals.jsonl")]
    assert 2 in versions and versions == sorted(set(versions))
