"""Whole runs: the real command, real vLLM, real trainer ranks, and what happens to them."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from processes import Run

pytestmark = pytest.mark.vllm

LOGGED_TIMES = ("seconds", "_per_s", "_s", "idle_frac")


def assert_accounted(lines: list[dict[str, Any]], max_staleness: int) -> None:
    """Rules 1 and 2, at every step."""
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    for line in lines:
        done = line["buffer/groups_trained"] + line["buffer/groups_dropped"]
        assert line["buffer/groups_submitted"] == done + line["buffer/groups_in_flight"]
        assert line["buffer/staleness_max"] <= max_staleness


def test_two_engines_and_two_ranks_train_and_leave_a_run_directory(
    tmp_path: Path, tied_folder: Path
) -> None:
    run = Run(
        tmp_path / "run",
        model__path=tied_folder,
        devices__rollout=2,
        devices__train=2,
        train__num_minibatches=2,
        rollout__temperature=0.8,
    )
    ended = run.end()
    assert ended.code == 0, ended
    assert_accounted(run.metrics(), max_staleness=2)
    assert all(line["train/logprob_gap"] < 1e-3 for line in run.metrics()[:1])
    assert run.summary()["finished"]
    assert {"recipe.toml", "metrics.jsonl", "samples.jsonl", "summary.json", "checkpoints"} <= set(
        os.listdir(run.dir)
    )
    assert "step 4/4" in ended.out and "run directory" in ended.out
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run.dir / "checkpoints" / "step-000004"
    AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).encode("Tom has 7 apples.")


def test_eta_0_is_synchronous_and_one_seed_gives_one_run(tmp_path: Path, tied_folder: Path) -> None:
    lines = []
    for name in ("a", "b"):
        run = Run(
            tmp_path / name,
            model__path=tied_folder,
            buffer__max_staleness=0,
            devices__train=2,
            train__steps=3,
            train__lr=1e-3,
            eval__every=1,
            tasks__kind=f'"{Path(__file__).parent / "noisy_task.py"}:EvenLength"',
            buffer__drop_equal_rewards="true",  # one group in eight: made up for in rounds
        )
        assert run.end().code == 0
        lines.append(run.metrics())
        assert_accounted(lines[-1], max_staleness=0)
        assert lines[-1][-1]["buffer/dropped_equal_rewards"] >= 1
    for a, b in zip(*lines, strict=True):
        assert a["buffer/staleness_max"] == b["buffer/staleness_max"] == 0
        timeless = {name for name in a if not name.endswith(LOGGED_TIMES)}
        assert {n: a[n] for n in timeless} == {n: b[n] for n in timeless}
    assert any(line["train/loss"] != 0 for line in lines[0]), "nothing was learned: no test at all"


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


def test_killed_trainer_ends_the_run_in_one_line_and_resume_goes_on(
    tmp_path: Path, tied_folder: Path
) -> None:
    changes = {"model__path": tied_folder, "checkpoint__every": 1, "train__steps": 5}
    run = Run(tmp_path / "run", devices__train=2, **changes)
    run.wait_for_step(2)
    run.wait_until(lambda: any((run.dir / "checkpoints").glob("step-*")))
    run.kill("train-1")
    ended = run.end()
    assert ended.code == 1, ended
    assert ended.err.startswith("minirl: train-1 was killed by SIGKILL")
    assert len(ended.err.splitlines()) == 1 and "Traceback" not in ended.out + ended.err

    again = Run(tmp_path / "run", "--resume", **changes)  # with one rank: devices may change
    ended = again.end()
    assert ended.code == 0, ended
    assert "going on from" in ended.out
    assert_accounted(again.metrics(), max_staleness=2)
    assert len(again.metrics()) == 5

    other = Run(tmp_path / "run", "--resume", **changes, train__lr=0.5).end()
    assert other.code == 2
    assert other.err.startswith("minirl: train.lr = 0.5: the run to resume was begun with 0.0003;")


def test_ctrl_c_finishes_the_step_and_saves_and_resume_completes(
    tmp_path: Path, tied_folder: Path
) -> None:
    changes = {"model__path": tied_folder, "train__steps": 200}
    run = Run(tmp_path / "run", **changes)
    run.wait_for_step(2)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to everybody
    ended = run.end()
    assert ended.code == 130, ended
    assert not run.summary()["finished"] and "--resume" in ended.out
    saved = len(run.metrics())
    assert (run.dir / "checkpoints" / f"step-{saved:06d}").is_dir()

    again = Run(run.dir, "--resume", **{**changes, "train__steps": saved + 2})
    assert again.end().code == 0
    assert_accounted(again.metrics(), max_staleness=2)
    assert len(again.metrics()) == saved + 2


def test_killed_controller_takes_all_its_workers_with_it(tmp_path: Path, tied_folder: Path) -> None:
    run = Run(tmp_path / "run", model__path=tied_folder, train__steps=200)
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGKILL)
    assert run.end().code == -signal.SIGKILL


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


def test_some_rewards_of_a_group_may_fail_and_every_filter_counts(
    tmp_path: Path, tied_folder: Path
) -> None:
    run = Run(
        tmp_path / "run",
        model__path=tied_folder,
        tasks__timeout_s=0.5,
        tasks__max_failures=2,
        tasks__overlong_tokens=20,
        buffer__mask_truncated="true",
        buffer__drop_equal_rewards="true",
        tasks__kind=f'"{Path(__file__).parent / "noisy_task.py"}:Unsure"',
    )
    ended = run.end()
    assert ended.code == 0, ended
    lines = run.metrics()
    assert_accounted(lines, max_staleness=2)
    assert lines[-1]["buffer/groups_trained"] == 4 * 4, "batches are full"
    assert all(0 <= line["reward/failures"] <= 2 * 4 for line in lines)
    assert sum(line["reward/failures"] for line in lines) > 0
    assert sum(line["buffer/truncated_masked"] for line in lines) > 0
    assert any(line["reward/penalty_mean"] > 0 for line in lines)
    reasons = {name for name in lines[-1] if name.startswith("buffer/dropped_")}
    assert sum(lines[-1][name] for name in reasons) == lines[-1]["buffer/groups_dropped"]


def test_stalled_worker_ends_the_run_with_stacks_and_exit_code_3(
    tmp_path: Path, tied_folder: Path
) -> None:
    run = Run(
        tmp_path / "run",
        model__path=tied_folder,
        train__steps=200,
        log__stall_s=4,
        tasks__timeout_s=3,
    )
    run.wait_for_step(1)
    run.kill("train-0", signal.SIGSTOP)
    ended = run.end()
    assert ended.code == 3, ended
    assert ended.err.startswith("minirl: train-0 has been ")
    report = (run.dir / "stall.txt").read_text()
    assert "--- rollout-0" in report and "worker.py" in report


def test_smoke_recipe_learns(tmp_path: Path) -> None:
    """The promise on the README's first screen, in full."""
    run = Run(tmp_path / "run", small=False)
    ended = run.end(limit_s=600)
    assert ended.code == 0, ended
    summary = run.summary()
    assert summary["accuracy_after"] >= 0.85, ended
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.40
    assert summary["multi_version_trajectories"] > 0
    assert summary["logprob_gap_max"] < 1e-3
    assert_accounted(run.metrics(), max_staleness=2)
    rewards = [line["reward/mean"] for line in run.metrics()]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3
