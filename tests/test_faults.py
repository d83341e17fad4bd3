"""What happens to whole runs: killed processes, Ctrl-C, broken rewards and reloads, stalls."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Run, assert_accounted

from minirl.train.checkpoint import read_whole

pytestmark = pytest.mark.vllm


@pytest.mark.slow  # test_chaos.py kills engine, rank and controller of a real run too
def test_killed_engine_and_verifier_are_replaced_and_every_group_is_accounted_for(
    tmp_path: Path, tied_folder: Path
) -> None:
    run = Run(tmp_path / "run", model__path=tied_folder, train__steps=6)
    run.wait_for_step(1)
    first = run.workers()
    run.kill("rollout-0")
    run.kill("verify-0")
    ended = run.end()
    assert ended.code == 0, ended
    assert "rollout-0 was killed by SIGKILL: replaced" in ended.out
    assert "verify-0 was killed by SIGKILL: replaced" in ended.out
    assert first.keys() == {"rollout-0", "train-0", "verify-0"}
    lines = run.metrics()
    assert_accounted(lines, max_staleness=2)
    assert len(lines) == 6 and lines[-1]["buffer/groups_trained"] == 6 * 4
    assert run.summary()["drops"]["worker_died"] >= 1


@pytest.mark.slow
def test_killed_trainer_goes_back_to_its_checkpoint_and_other_devices_may_go_on(
    tmp_path: Path, tied_folder: Path
) -> None:
    changes = {"model__path": tied_folder, "checkpoint__every": 2, "train__steps": 6}
    run = Run(tmp_path / "run", devices__train=2, train__shard_optimizer="true", **changes)
    run.wait_for_step(3)
    run.kill("train-1")
    ended = run.end()
    assert ended.code == 0, ended
    assert "train-1 was killed by SIGKILL: replaced" in ended.out
    assert "going back from step" in ended.out and "Traceback" not in ended.out + ended.err
    lines = run.metrics()
    assert_accounted(lines, max_staleness=2)
    assert len(lines) == 6 and lines[-1]["buffer/groups_trained"] == 6 * 4
    assert lines[-1]["faults/workers_replaced"] == 2 and lines[-1]["faults/steps_redone"] >= 1
    assert run.summary()["drops"]["worker_died"] >= 4
    assert run.summary()["logprob_gap_max"] < 1e-3, "engines run the weights they say they do"

    changes["train__steps"] = 7  # with one rank, in the same directory, without a word of --resume
    again = Run(tmp_path / "run", **changes)
    ended = again.end()
    assert ended.code == 0, ended
    assert "changed since it began: train.shard_optimizer true → false" in ended.out
    assert "going on from" in ended.out
    assert_accounted(again.metrics(), max_staleness=2)
    assert len(again.metrics()) == 7

    other = Run(tmp_path / "run", "--resume", **changes, train__lr=0.5, eval__every=3).end()
    assert other.code == 2 and other.err == (
        f'minirl: --resume = "{tmp_path / "run"}": the run was begun with another recipe, refused: '
        "train.lr 0.0003 → 0.5 (accepted: eval.every 0 → 3); set these back, or start a new run\n"
    )
    done = Run(tmp_path / "run", **changes).end()
    assert done.code == 0 and "all 7 steps are done; raise train.steps to go on" in done.out


@pytest.mark.slow  # test_signals.py does it with scripted workers
def test_ctrl_c_finishes_the_step_and_saves(tmp_path: Path, tied_folder: Path) -> None:
    changes = {"model__path": tied_folder, "train__steps": 200}
    run = Run(tmp_path / "run", **changes)
    run.wait_for_step(2)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to everybody
    ended = run.end()
    assert ended.code == 130, ended
    assert not run.summary()["finished"] and "--resume" in ended.out
    saved = len(run.metrics())
    assert (run.dir / "checkpoints" / f"step-{saved:06d}").is_dir()


def test_sigterm_while_workers_start_ends_at_once_and_leaves_a_run_to_go_on_with(
    tmp_path: Path, tied_folder: Path
) -> None:
    run = Run(tmp_path / "run", model__path=tied_folder)
    run.wait_until(lambda: "rollout-0" in run.workers())
    os.killpg(run.process.pid, signal.SIGTERM)
    ended = run.end(limit_s=30)
    assert ended.code == 130 and ended.err == "", ended
    assert ended.out == "stopped before anything was saved\n" or (
        "SIGTERM: ending, while workers start" in ended.out and "killed by" not in ended.out
    )
    assert (run.dir / "recipe.toml").is_file() and not (run.dir / "tmp").exists()


@pytest.mark.slow
def test_killed_controller_takes_all_its_workers_with_it(tmp_path: Path, tied_folder: Path) -> None:
    run = Run(tmp_path / "run", model__path=tied_folder, train__steps=200)
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGKILL)
    assert run.end().code == -signal.SIGKILL


@pytest.mark.slow  # the soak of test_chaos.py breaks rewards too
def test_reward_that_fails_or_hangs_is_a_dropped_group_never_a_zero(
    tmp_path: Path, tied_folder: Path
) -> None:
    run = Run(
        tmp_path / "run",
        model__path=tied_folder,
        tasks__timeout_s=0.5,
        tasks__kind=f'"{Path(__file__).parent / "noisy_task.py"}:Broken"',
        train__steps=3,
    )
    ended = run.end()
    assert ended.code == 0, ended
    assert_accounted(run.metrics(), max_staleness=2)
    assert all(line["reward/mean"] == 1.0 for line in run.metrics())
    drops = run.summary()["drops"]
    assert drops["reward_error"] >= 1 and drops["reward_timeout"] >= 1


@pytest.mark.slow
def test_stalled_worker_ends_the_run_with_stacks_and_exit_code_3(
    tmp_path: Path, tied_folder: Path
) -> None:
    run = Run(
        tmp_path / "run",
        model__path=tied_folder,
        train__steps=200,
        log__stall_s=15,
    )
    run.wait_for_step(1)
    run.kill("train-0", signal.SIGSTOP)
    ended = run.end()
    assert ended.code == 3, ended
    assert ended.err.startswith("minirl: train-0 has been ")
    report = (run.dir / "stall.txt").read_text()
    assert "--- rollout-0" in report and "worker.py" in report


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("not_applied", marks=pytest.mark.slow),
        pytest.param("one_missing", marks=pytest.mark.slow),  # test_engine.py has these too
        pytest.param("torn", marks=pytest.mark.slow),
    ],
)
def test_broken_reload_stops_the_run_and_names_the_tensor(
    how: str, tmp_path: Path, tied_folder: Path
) -> None:
    run = Run(
        tmp_path / "run",
        program=(str(Path(__file__).parent / "broken_run.py"), how),
        model__path=tied_folder,
        tasks__kind=f'"{Path(__file__).parent / "noisy_task.py"}:EvenLength"',
        train__lr=1e-2,
    )
    ended = run.end()
    assert ended.code == 1, ended
    names = {
        "not_applied": "model.embed_tokens.weight",
        "one_missing": "model.layers.1.mlp.up_proj.weight (and 0 more)",
        "torn": "model.layers.",
    }
    start = "minirl: rollout-0: version "
    assert ended.err.startswith(start) and "did not reach the engine" in ended.err, ended
    assert f"tensor {names[how]}" in ended.err
    assert len(ended.err.splitlines()) == 1
    (box,) = (run.dir / "blackbox").iterdir()
    assert f"minirl replay {box}" in ended.err
    why = json.loads((box / "why.json").read_text())
    assert why["rule"] == "canary" and why["metrics"] == run.metrics() and why["canary"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """12 MB that are really full when they are."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_full_disk_costs_checkpoints_but_neither_the_run_nor_the_last_good_one(
    small_disk: Path, tied_folder: Path
) -> None:
    changes = {"model__path": tied_folder, "checkpoint__every": 2, "train__steps": 6}
    changes["model__trust_remote_code"] = "true"
    run = Run(small_disk / "run", **changes)
    run.wait_until(lambda: (run.dir / "checkpoints" / "step-000002").is_dir())
    free = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize))
    ended = run.end()
    assert ended.code == 1, ended
    assert f"warning: model.trust_remote_code: code of {tied_folder} is run here" in ended.out
    assert "no checkpoint of step 4: it could not be written (" in ended.out
    assert "metrics.jsonl cannot be written (No space left on device)" in ended.out
    last = f"the last good checkpoint is {run.dir / 'checkpoints' / 'step-000002'}"
    assert ended.err.startswith("minirl: not all could be written: ") and last in ended.err
    assert "metrics.jsonl is not whole" in ended.err and len(ended.err.splitlines()) == 1
    assert os.listdir(run.dir / "checkpoints") == ["step-000002"]
    assert read_whole(run.dir / "checkpoints" / "step-000002")["step"] == 2

    (small_disk / "filler").unlink()
    again = Run(run.dir, "--resume", **changes)
    assert again.end().code == 0
    assert_accounted(again.metrics(), max_staleness=2)
