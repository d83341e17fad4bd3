"""What happens to whole runs with real workers: a killed rank, other devices, an early SIGTERM.

Dead and frozen workers, broken rewards, full disks and a killed controller are in
test_supervisor.py, test_killed_controller.py and the soak; broken reloads are in test_engine.py.
"""

import os
import signal
from pathlib import Path

import pytest
from processes import Run, assert_accounted

pytestmark = pytest.mark.vllm


@pytest.mark.slow
def test_killed_rank_is_rolled_back_to_its_checkpoint_and_other_devices_may_resume(
    tmp_path: Path, tied_folder: Path
) -> None:
    changes = {"model__path": tied_folder, "checkpoint__every": 2, "train__steps": 6}
    run = Run(tmp_path / "run", devices__train=2, train__shard='"optimizer"', **changes)
    run.wait_for_step(3)
    run.kill("train-1")
    ended = run.end()
    assert ended.code == 0, ended
    assert "train-1 was killed by SIGKILL: replaced" in ended.out
    assert "rollback from step" in ended.out and "Traceback" not in ended.out + ended.err
    lines = run.metrics()
    assert_accounted(lines, max_staleness=2)
    assert len(lines) == 6 and lines[-1]["buffer/groups_trained"] == 6 * 4
    assert lines[-1]["faults/workers_replaced"] == 2 and lines[-1]["faults/steps_redone"] >= 1
    assert run.summary()["logprob_gap_max"] < 1e-3, "engines run the weights they say they do"

    changes["train__steps"] = 7  # with one rank, in the same directory, without a word of --resume
    again = Run(tmp_path / "run", **changes)
    ended = again.end()
    assert ended.code == 0, ended
    assert "changed since it began: train.shard optimizer → none" in ended.out
    assert "going on from" in ended.out
    assert_accounted(again.metrics(), max_staleness=2)
    assert len(again.metrics()) == 7
    other = Run(tmp_path / "run", "--resume", **changes, train__lr=0.5).end()
    assert other.code == 2 and "refused: train.lr 0.0003 → 0.5; set these back" in other.err
    done = Run(tmp_path / "run", **changes).end()
    assert done.code == 0 and "all 7 steps are done; raise train.steps to go on" in done.out


def test_sigterm_while_workers_start_ends_at_once_and_leaves_a_run_to_resume(
    tmp_path: Path, tied_folder: Path
) -> None:
    run = Run(tmp_path / "run", model__path=tied_folder)
    run.wait_until(lambda: "rollout-0" in run.workers())
    os.killpg(run.process.pid, signal.SIGTERM)
    ended = run.end()
    assert ended.code == 130 and ended.err == "", ended
    assert ended.out == "stopped before anything was saved\n" or (
        "SIGTERM: ending, while workers start" in ended.out and "killed by" not in ended.out
    )
    assert (run.dir / "recipe.toml").is_file() and not (run.dir / "tmp").exists()
