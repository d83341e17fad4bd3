"""What a run writes is read again as it was: torn lines, full disks, rollbacks. Resuming it: what
may change, which checkpoint is taken, and which are kept."""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fault_bodies import write_checkpoint
from processes import files_up_to
from run_dirs import Notes, evaluate, log_of, make_config, write_run

from minirl import launch, metrics, run_dir
from minirl.buffer import History
from minirl.config import Config
from minirl.errors import Interrupted, MinirlError, RecipeError
from minirl.messages import CheckpointState, Trained
from minirl.metrics import FILTERS, MAX_IDLE_STEPS, MIN_FAULTS, DropWatch, RateLimit
from minirl.recipe import build, load, to_toml
from minirl.records import Batch, Drop
from minirl.resume import Start, check_changes, check_steps
from minirl.run_dir import JsonLines, RunDir, hold, open_run, read_lines, write_text
from minirl.train import checkpoint
from minirl.train.checkpoint import read_whole

SMOKE = Path(__file__).parent.parent / "recipes" / "smoke.toml"
CONFIG = make_config(steps=4)


def steps_of(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path)]


def test_torn_and_foreign_lines_are_left_out_and_a_rollback_cancels(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert read_lines(path) == []
    path.write_bytes(b'{"step": 1}\n[2]\nnull\n{"step": "2"}\n\xff\xfe\n{"step": 2, "tex')
    file = JsonLines(path)
    file.write({"step": 3, "text": "ü"})
    assert read_lines(path) == [{"step": 1}, {"step": 3, "text": "ü"}], "at once"
    for line in (4, 5, -3, 4, -1, 2, 3):
        file.write({"step": line} if line > 0 else {"rolled_back_to": -line})
    file.close()
    assert steps_of(path) == [1, 2, 3]
    assert len(path.read_bytes().splitlines()) == 14, "the file only grows"


def test_lines_wait_for_a_full_disk_and_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, notes = [{"step": i, "text": "x" * 30} for i in range(40)], Notes()
    file = JsonLines(tmp_path / "a.jsonl", notes.append)
    with files_up_to(500):
        for line in lines[:-1]:
            file.write(line)
        with pytest.raises(OSError, match="too large"):
            write_text(tmp_path / "b.json", "x" * 1000)
    assert notes == ["a.jsonl cannot be written (File too large): its lines wait in memory"]
    assert read_lines(file.path) == lines[:9]  # one was cut in the middle
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    file.write(lines[-1])
    assert file.error == "" and read_lines(file.path) == lines
    monkeypatch.setattr(os, "fsync", lambda fd: os.close(-1))
    file.flush(sync=True)
    monkeypatch.undo()
    file.close()
    assert notes[1:] == ["a.jsonl cannot be written (Bad file descriptor): some lines may be lost"]
    assert file.error == "Bad file descriptor", "later lines do not bring them back"
    log = log_of(tmp_path, CONFIG)
    with files_up_to(100):
        evaluate(log, 4, right=2)
        log.summarise(True, {})
        log.close()
    assert log.problems == [
        "summary.json could not be written (File too large)",
        "evals.jsonl is not whole (File too large)",
    ]


def test_every_file_of_a_run(tmp_path: Path) -> None:
    run = RunDir(write_run(tmp_path, CONFIG))
    last = run.evals[-1]
    assert last["low"] <= last["accuracy"] == 0.75 <= last["high"]
    assert (last["count"], last["failures"], last["length_mean"]) == (4, 0, 3.0)
    group = {"id": 2, "prompt": 1, "prompt_tokens": 2, "rewards": [1.0, 0.0], "lengths": [3, 4]}
    group |= {"versions": [[0, 0], [0, 0]], "stops": ["stop", "length"]}
    assert run.batches[0]["groups"][0] == group
    assert run.metrics[0]["rollout/length_mean"] == 3.5 and run.metrics[0]["reward/mean"] == 0.5
    shown, plain = run.samples[:2]
    assert shown["token_gaps"] == [None, 1e-7, 0.02] and "tokens" not in plain
    expected = {"accuracies": [[0, 0.25], [2, 0.75], [4, 0.75]], "accuracy_after": 0.75}
    expected |= {"trained_tokens": 200, "multi_version_trajectories": 6, "accuracy_before": 0.25}
    expected |= {"version": 4, "versions_measured": "4 of 4"}
    assert expected.items() <= run.summary.items()


def test_resume_and_rollback_cancel_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    seconds = RunDir(write_run(tmp_path, CONFIG)).metrics[2]["seconds"]
    log = log_of(tmp_path, CONFIG, step=3)
    assert log.seconds >= seconds and log.workers_replaced == 2 and not RunDir(tmp_path).summary
    assert [line["step"] for line in log.metrics] == [1, 2, 3]
    evaluate(log, version=3, right=4)
    log.roll_back(2)
    assert log.accuracies == [(0, 0.25), (2, 0.75)]
    log.close()
    for name in ("metrics.jsonl", "batches.jsonl", "samples.jsonl"):
        assert set(steps_of(tmp_path / name)) == {1, 2}
    assert steps_of(tmp_path / "evals.jsonl") == [0, 2]
    again = log_of(tmp_path, CONFIG, step=2, evaluating=2)  # it had ended after the checkpoint
    assert again.wants_evaluation and steps_of(tmp_path / "evals.jsonl") == [0]
    assert len(again.metrics) == 2 == len(RunDir(tmp_path).batches)
    anew = log_of(tmp_path, CONFIG, 0, Start().state.evaluating)  # perhaps with another recipe
    assert anew.wants_evaluation and not anew.evals and not RunDir(tmp_path).evals


def test_a_directory_takes_one_run_at_a_time_and_every_state_differs(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"there is no recipe\.toml"):
        open_run(tmp_path)
    (tmp_path / "recipe.toml").touch()
    lock = hold(tmp_path)
    assert open_run(tmp_path).state == "running"
    with pytest.raises(RecipeError, match="a run is using it"):
        hold(tmp_path)
    lock.close()
    assert open_run(tmp_path).state == "failed"
    for finished, state in (("false", "stopped"), ("true", "finished")):
        write_text(tmp_path / "summary.json", f'{{"finished": {finished}}}')
        assert open_run(tmp_path).state == state


def test_a_second_train_leaves_the_save_of_the_first_alone(tmp_path: Path) -> None:
    write_run(tmp_path, CONFIG, is_whole=False)
    half = tmp_path / "checkpoints" / ".step-000003.tmp"
    half.mkdir(parents=True)
    job: Any = SimpleNamespace(config=CONFIG, run_dir=tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}')
    with hold(tmp_path), pytest.raises(RecipeError, match="a run is using it"):
        launch.Job.prepare(job, resume=True, is_plain=True)
    assert half.is_dir()


# Resuming ---------------------------------------------------------------------------------------


def save(run_dir: Path, step: int) -> Path:
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    write_checkpoint(folder, CheckpointState(step, History(version=step), 4, (6,)), updates=0)
    return folder


def test_changes_that_cannot_change_what_is_learned_are_accepted(tmp_path: Path) -> None:
    def changes(values: dict[str, Any]) -> list[str]:
        return check_changes(build(values), tmp_path)

    (tmp_path / "recipe.toml").write_text(to_toml(Config()))
    values = {"devices.train": 2, "devices.rollout": 3, "train.steps": 80}
    values |= {"train.shard": "optimizer", "buffer.max_faults": 9.0}
    assert changes({}) == [] and changes(values) == [
        "devices.rollout 1 → 3",
        "devices.train 1 → 2",
        "buffer.max_faults 3.0 → 9.0",
        "train.steps 40 → 80",
        "train.shard none → optimizer",
    ]
    with pytest.raises(RecipeError) as refused:  # all are named at once
        changes({"train.objective": "/a/my_loss.py:my_loss", "train.steps": 50, "seed": 3})
    assert str(refused.value) == (
        f'--resume = "{tmp_path}": the run was begun with another recipe: seed 0 → 3, '
        "train.objective decoupled → /a/my_loss.py:my_loss; set these back, or start a new run"
    )
    check_steps(Config(), 40)
    with pytest.raises(RecipeError, match=r"train\.steps = 40: the run is at step 41 already"):
        check_steps(Config(), 41)
    cosine = {"train.schedule": "cosine"}  # which ends with the steps
    (tmp_path / "recipe.toml").write_text(to_toml(build(cosine)))
    with pytest.raises(RecipeError, match=r"another recipe: train\.steps 40 → 50"):
        changes({**cosine, "train.steps": 50})


def test_a_refused_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(folder: Path, error: BaseException, *overrides: str) -> int:
        """`minirl train`, up to where workers start."""

        def run(*_: object) -> int:
            (folder / "logs" / "rollout-0.log").touch()
            raise error

        monkeypatch.setattr(launch.Job, "run", run)
        loaded, resume = load(SMOKE, overrides), run_dir.holds_run(folder)
        chosen = run_dir.choose_run_dir(SMOKE, folder, False)
        return launch.train(loaded, SMOKE, chosen, resume, True)

    refused, died = RecipeError("tasks.kind", "a", "b", "c"), MinirlError("rollout-0 died")
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new" / "run", tmp_path / "empty"):
        with pytest.raises(RecipeError):
            begin(folder, refused)
        assert not folder.exists()
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)  # a full disk left no more
    for error in (died, refused):
        with pytest.raises(type(error)):
            begin(folder, error)
        assert open_run(folder).state == "failed", "it was there before"
    assert begin(folder, Interrupted(), "train.lr=0.5", "seed=3") == launch.INTERRUPTED
    assert open_run(folder).state == "stopped" and open_run(folder).recipe["seed"] == 3
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RecipeError, match="begun with another recipe: seed 3 → 0"):
        begin(folder, died)


def test_what_a_killed_save_left_is_swept_and_a_replaced_one_comes_back(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    torn = folder.with_name(".step-000006.tmp")
    torn.mkdir()
    folder.rename(folder.with_name(".step-000005.old"))  # killed between two renames
    checkpoint.sweep(tmp_path)
    assert checkpoint.found(tmp_path) == [folder] and not torn.exists()
    assert read_whole(folder).step == 5


@pytest.mark.parametrize(
    ("accuracies", "kept"),
    [
        ([], [5, 6]),
        ([(2, 0.5), (3, 0.5)], [3, 5, 6]),  # of equals the later
        ([(99, 1.0), (1, 0.1)], [1, 5, 6]),  # 99 was evaluated but not saved
    ],
)
def test_the_last_and_the_best_stay(
    accuracies: list[tuple[int, float]], kept: list[int], tmp_path: Path
) -> None:
    folders = [save(tmp_path, step) for step in range(1, 7)]
    checkpoint.prune(tmp_path, 2, accuracies)
    assert checkpoint.found(tmp_path) == [folders[step - 1] for step in kept]


# Metrics and their limits. Faults in a row stop a run; filters that keep hardly anything warn -----

GOOD = {"train/logprob_gap": 0.01, "train/entropy": 1.0, "train/skipped_updates": 0.0}
BAD = {**GOOD, "train/logprob_gap": float("nan"), "train/entropy": 1e-4}
SKIPPED = {"train/skipped_updates": 1.0}


def test_a_line_has_what_the_step_has_in_the_order_of_the_table() -> None:
    nothing = {"train/loss": float("nan"), "train/grad_norm": float("inf"), "train/kl": None}
    line = metrics.metrics_line({**nothing, "reward/mean": 0.0, "step": 1})
    assert line == {"step": 1, "reward/mean": 0.0} and list(line) == ["step", "reward/mean"]
    with pytest.raises(AssertionError, match="reward/maen"):
        metrics.metrics_line({"step": 1, "reward/maen": 0.5})


def test_notes_of_a_kind_are_shown_at_powers_of_ten_with_their_count() -> None:
    notes: list[str] = []
    seldom = RateLimit(notes.append)
    for number in range(1, 1500):
        seldom.note("a", f"a {number}")
    seldom.note("b", "another")
    counted = [f"a {n} ({n:,} times so far)" for n in (10, 100, 1000)]
    assert notes == ["a 1", *counted, "another"]


def test_a_limit_that_is_broken_warns_and_advises_what_helps(tmp_path: Path) -> None:
    for fine in (GOOD, {**GOOD, "train/logprob_gap": None}):
        assert not metrics.broken_limits(fine)
    (gap, gap_text), (entropy, entropy_text) = metrics.broken_limits(BAD).items()
    assert "float32" not in gap_text  # on a GPU its products may be less exact than bfloat16's
    assert (gap, gap_text[:5]) == ("train/logprob_gap above 0.1", "nan: ")
    log, batch = log_of(tmp_path, CONFIG), Batch(7, 6, ())
    for _ in range(2):
        log.check(batch, Trained(7, {"train/entropy": 1e-4}))
    log.check(batch, Trained(7, {}, problem="the loss was not finite"))
    warning, unchanged = log.view
    assert warning == f"warning: step 7: {entropy}: {entropy_text}"
    assert (entropy, entropy_text[:8]) == ("train/entropy below 0.001", "0.0001: ")
    assert unchanged == "step 7: the loss was not finite: the weights stay as they were"


def test_steps_in_a_row_without_an_update_stop_the_run(tmp_path: Path) -> None:
    lines = [SKIPPED] * (MAX_IDLE_STEPS - 1) + [GOOD] + [SKIPPED] * MAX_IDLE_STEPS
    *few, fault = (metrics.idle_fault(lines[:num], 1) for num in range(len(lines) + 1))
    assert not any(few) and "no update in 3 steps in a row" in fault
    assert metrics.idle_fault([SKIPPED] * 9, 2) == "", "each step had one update"
    log = log_of(tmp_path, CONFIG)
    log.metrics += lines
    with pytest.raises(MinirlError, match=r"step 7: no update .*; there is no checkpoint yet"):
        log.check(Batch(7, 6, ()), Trained(7, {}))


# Drops ---------------------------------------------------------------------------------------

B = 10
LIMIT = 3 * B
ERROR, EQUAL = Drop.REWARD_ERROR, Drop.EQUAL_REWARDS


def after(ends: list[Drop | str], batch_size: int = B) -> tuple[DropWatch, list[str]]:
    """What watches, and its notes."""
    notes, config = list[str](), build({"train.batch_size": batch_size})
    watch = DropWatch(config, RateLimit(notes.append))
    for number, end in enumerate(ends):
        if isinstance(end, Drop):
            watch.dropped(end, f"error {number} (task.py, line 3, in reward)")
        else:
            getattr(watch, end).clear()
    return watch, notes


@pytest.mark.parametrize(
    ("ends", "stops"),
    [
        ([ERROR] * (LIMIT - 1), False),
        ([ERROR] * LIMIT, True),
        ([reason for reason in Drop if reason not in FILTERS] * LIMIT, True),
        ([Drop.WORKER_DIED] * 99, False),  # it has a limit of its own
        ([EQUAL] * 99, False),
        ([*[ERROR] * (LIMIT - 1), "faults"] * 3, False),
        ([*[ERROR] * (LIMIT - 1), Drop.WORKER_DIED, Drop.TOO_LONG, "filtered", ERROR], True),
    ],
)
def test_so_many_faults_in_a_row_stop_the_run(ends: list[Drop | str], stops: bool) -> None:
    assert bool(after(ends)[0].fault) is stops


def test_the_line_has_the_commonest_reason_its_count_and_an_example() -> None:
    assert after([*[Drop.REFUSED] * 9, *[ERROR] * 30])[0].fault == (
        "no reward for 39 groups in a row: reward error 30 times, such as error 38 (task.py, "
        "line 3, in reward); mend that, or raise buffer.max_faults = 3"
    )
    for size, limit in ((1, MIN_FAULTS), (8, MIN_FAULTS), (9, 27)):  # there is a floor
        assert not after([ERROR] * (limit - 1), size)[0].fault
        assert after([ERROR] * limit, size)[0].fault


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([EQUAL] * (LIMIT - 1), ""),
        ([*[EQUAL] * (LIMIT - 1), "filtered", EQUAL], ""),
        ([*[EQUAL, "faults"] * LIMIT], "30 groups .* 100% of them equal rewards: set buffer.drop"),
        ([*[Drop.TRUNCATED] * 24, *[EQUAL] * 6], "80% of them truncated: raise rollout.max_new"),
        ([Drop.TOO_LONG] * LIMIT, "too long: raise tasks.max_prompt_tokens"),
        ([EQUAL] * LIMIT * 20, r"\(10 times so far\)"),
    ],
)
def test_a_filter_that_keeps_hardly_anything_warns(ends: list[Drop | str], said: str) -> None:
    watch, notes = after(ends)
    assert bool(notes) is bool(said) and not watch.fault
    assert not said or (notes[0].startswith("warning: ") and re.search(said, notes[-1])), notes
    assert len(notes) <= 2
