"""Numbers that go bad: each rule does what the table says; nothing bad is published or saved."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import CONFIG, FIRST_VERSION, FRESH, RECIPES, Data, LocalRank, are_equal, make_data
from typer.testing import CliRunner

from minirl import guard
from minirl.blackbox import BlackBox, Why
from minirl.cli import app
from minirl.config import Config, GuardConfig, ModelConfig
from minirl.errors import MinirlError
from minirl.guard import Action, Guard, GuardStop
from minirl.journal import Journal
from minirl.lines import Lines, read_lines
from minirl.metrics import MetricsLog
from minirl.records import Batch
from minirl.train.checkpoint import read_whole
from minirl.train.messages import Save
from minirl.train.replay import look_into, replay

GOOD = {"train/logprob_gap": 0.01, "train/entropy": 1.0, "train/skipped_updates": 0.0}
FAULTS = Path(__file__).parent.parent / "docs" / "faults.md"


def of(**limits: Any) -> Guard:
    return Guard(Config(guard=GuardConfig(**limits)))


def test_the_document_prints_the_table() -> None:
    assert guard.as_markdown() in FAULTS.read_text()


def test_a_good_step_breaks_no_rule_and_limits_of_0_are_off() -> None:
    assert of().judge(GOOD) == []
    off = of(max_logprob_gap=0.0, min_entropy=0.0)
    assert off.judge({**GOOD, "train/logprob_gap": 99.0, "train/entropy": 0.0}) == []
    assert of().judge({**GOOD, "train/logprob_gap": None}) == []  # no token at equal version


def test_gap_and_entropy_break_their_rules() -> None:
    judge = of(max_logprob_gap=0.5, min_entropy=0.2)
    gap, entropy = judge.judge({**GOOD, "train/logprob_gap": 0.6, "train/entropy": 0.1})
    assert (gap.rule.name, entropy.rule.name) == ("logprob_gap", "entropy")
    assert gap.action is entropy.action is Action.WARN
    line = gap.line(7)
    assert line.startswith("step 7: train/logprob_gap above guard.max_logprob_gap: 0.6, with ")
    assert "guard.max_logprob_gap = 0.5; " in line
    (nan,) = judge.judge({**GOOD, "train/logprob_gap": float("nan")})
    assert nan.rule.name == "logprob_gap"


def test_warnings_are_told_at_powers_of_ten() -> None:
    judge = of(min_entropy=2.0)
    told = [judge.judge(GOOD)[0].is_told for _ in range(100)]
    assert [i + 1 for i, is_told in enumerate(told) if is_told] == [1, 10, 100]


def test_steps_in_a_row_without_an_update_stop_the_run() -> None:
    judge = of()
    skipped = {"train/skipped_updates": 1.0}
    steps = [skipped, skipped, GOOD, skipped, skipped]
    assert [judge.judge(values) for values in steps] == [[]] * 5
    (breach,) = judge.judge(skipped)
    assert breach.rule is guard.NOT_FINITE and breach.action is Action.STOP
    halves = replace(Config(), train=replace(Config().train, num_minibatches=2))
    judge = Guard(halves)
    assert [judge.judge(skipped) for _ in range(9)] == [[]] * 9  # each step had one update


# In a trainer rank ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tied_folder: Path) -> Data:
    return make_data(tied_folder)


def fresh(data: Data, step: int = 1) -> Batch:
    return replace(data.batches[RECIPES.index(FRESH)], step=step)


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_a_logprob_of_vllm_that_is_not_finite_costs_the_update(
    value: float, data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    """Also where the cap on w would hide it from the loss."""
    rank = LocalRank(tied_folder, CONFIG, data.ring, run_dir=str(tmp_path))
    before, batch = rank.weights(), fresh(data)
    group = batch.groups[1]
    view = data.ring.read(group.trajectories[2].cell, group.id)
    kept = view.logprobs[-3]
    view.logprobs[-3] = value
    try:
        values = rank.train(batch)
    finally:
        view.logprobs[-3] = kept
    assert values["train/skipped_updates"] == 1
    assert are_equal(rank.weights(), before)
    (note,) = rank.trainer.notes
    assert note.startswith("step 1: vLLM's logprobs were not finite")
    (bad,) = replay(tmp_path / "nonfinite" / "step-000001-0").bad_trajectories
    assert bad.what == "log π_behav" and bad.token == len(view.tokens) - 3


def test_weights_that_are_not_finite_are_neither_published_nor_saved(
    data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    rank = LocalRank(tied_folder, CONFIG, data.ring, run_dir=str(tmp_path))
    rank.train(fresh(data))
    published = rank.weights()
    name, parameter = next(iter(rank.trainer.policy.model.named_parameters()))
    rank.trainer.learner.optimizer.state[parameter]["exp_avg"][0, 0] = float("nan")
    batch = replace(fresh(data, step=2), version=FIRST_VERSION + 1)
    with pytest.raises(MinirlError, match=f"step 2: .*{name} is not finite after the update"):
        rank.train(batch)
    assert rank.store.latest == FIRST_VERSION + 1 and are_equal(rank.weights(), published)
    with pytest.raises(MinirlError, match="is not finite, and was not saved"):
        rank.save(tmp_path / "checkpoints" / "step-000002")
    assert not (tmp_path / "checkpoints").exists()
    # The weights that the step began with are in the box, so that it can be looked into.
    found = replay(tmp_path / "nonfinite" / "step-000002-0")
    assert np.isfinite(found.loss) and not found.bad_gradients


# The black box --------------------------------------------------------------------------------


class Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def journal(tmp_path: Path, rank: LocalRank, data: Data, source: Path, config: Config) -> Journal:
    """With only what breaches need: no fleet is running."""
    found = Journal.__new__(Journal)
    found.config, found.run_dir, found.view = config, tmp_path, Notes()  # type: ignore[assignment]
    found._box = BlackBox(config, tmp_path, data.ring, rank.store, source)
    found.log = MetricsLog(tmp_path / "metrics.jsonl")
    found.log.write({"step": 1})
    return found


def test_a_breach_leaves_a_black_box_that_replays_and_stop_stops(
    data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    limits = GuardConfig(max_logprob_gap=1e-9, min_entropy=50.0)
    config = replace(CONFIG, guard=limits, model=ModelConfig(path=str(tied_folder)))
    rank = LocalRank(tied_folder, config, data.ring)
    batch = replace(fresh(data), version=FIRST_VERSION)
    for group in batch.groups:  # as if they were written by the version that the step starts from
        for trajectory in group.trajectories:
            view = data.ring.read(trajectory.cell, group.id)
            view.versions[view.mask == 1] = FIRST_VERSION
    values = rank.train(batch)
    held = journal(tmp_path, rank, data, tied_folder, config)
    gap, entropy = Guard(config).judge(values)
    breaches = [gap, replace(entropy, action=Action.STOP)]
    with pytest.raises(GuardStop, match=r"train/entropy below guard.min_entropy") as stop:
        held.breached(1, batch, values, breaches)
    box = tmp_path / "blackbox" / "step-000001-entropy"
    assert f"minirl replay {box}" in str(stop.value) and "no checkpoint yet" in str(stop.value)
    assert held.view.notes[0].startswith("warning: step 1: train/logprob_gap")  # type: ignore[attr-defined]
    why = json.loads((box / "why.json").read_text())
    assert why["metrics"] == [{"step": 1}] and why["version"] == FIRST_VERSION
    look = look_into(box)
    assert look.rule == "entropy"
    assert look.entropy == pytest.approx(values["train/entropy"], rel=1e-5)
    assert look.gap == pytest.approx(values["train/logprob_gap"], abs=1e-6)
    assert look.canary_gap == pytest.approx(0.0, abs=1e-5)
    assert len(look.worst) == 3
    done = CliRunner().invoke(app, ["replay", str(box)])
    assert done.exit_code == 0, done
    assert "entropy here" in done.stdout and done.stdout.startswith("step 1: train/entropy below")


def test_a_box_of_a_version_that_is_gone_has_no_weights(
    data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    rank = LocalRank(tied_folder, CONFIG, data.ring)
    box = BlackBox(CONFIG, tmp_path, data.ring, rank.store, tied_folder)
    told = box.write(Why("canary", 3, "off"), [], None, version=FIRST_VERSION + 9)
    assert told.endswith(f"minirl replay {tmp_path}/blackbox/step-000003-canary")
    look = look_into(tmp_path / "blackbox" / "step-000003-canary")
    assert (look.gap, look.canary_gap, look.message) == (None, None, "off")


# A full disk ----------------------------------------------------------------------------------


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """As near to a full disk as one gets without mounting one: writes fail half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_it(
    data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    rank = LocalRank(tied_folder, CONFIG, data.ring)
    rank.train(fresh(data))
    folders = [tmp_path / "checkpoints" / f"step-00000{step}" for step in (1, 2)]
    history = {"history": {}, "consumed_below": 0, "consumed_above": []}
    state: dict[str, Any] = {"step": 1, **history}
    assert rank.trainer.try_to_save(Save(str(folders[0]), state)).error == ""
    with files_up_to(300_000):
        saved = rank.trainer.try_to_save(Save(str(folders[1]), state))
    assert saved.error.startswith("it could not be written (") and "too large" in saved.error
    assert list((tmp_path / "checkpoints").iterdir()) == folders[:1]
    assert read_whole(folders[0]) == state
    assert rank.trainer.try_to_save(Save(str(folders[1]), state)).error == ""
    assert read_whole(folders[1]) == state


def test_a_batch_that_cannot_be_saved_is_told_of(
    data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    rank = LocalRank(tied_folder, CONFIG, data.ring, run_dir=str(tmp_path))
    batch = fresh(data)
    rewards = (float("inf"), *batch.groups[0].rewards[1:])
    bad = replace(batch, groups=(batch.groups[0]._replace(rewards=rewards), *batch.groups[1:]))
    with files_up_to(1000):
        assert rank.train(bad)["train/skipped_updates"] == 1
    assert "its batch could not be saved: " in rank.trainer.notes[0]


def test_lines_wait_for_a_full_disk_and_come_whole_and_in_order(tmp_path: Path) -> None:
    lines = [{"step": i, "text": "x" * 30} for i in range(40)]
    file = Lines(tmp_path / "a.jsonl")
    with files_up_to(500):
        for line in lines[:-1]:
            file.write(json.dumps(line))
        assert file.error == "File too large"
    assert read_lines(file.path) == lines[:9]  # one was cut in the middle
    file.write(json.dumps(lines[-1]))
    assert file.error == ""
    file.close()
    assert read_lines(file.path) == lines


def test_steps_are_taken_back_on_a_full_disk_too(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        log.write({"step": step, "train/loss": 1 / 3})
    with files_up_to(0):
        log.roll_back(3)
    log.write({"step": 4})
    log.close()
    found = [line["step"] for line in read_lines(log.path)]
    assert found == [1, 2, 3, 4] == [line["step"] for line in log.lines]
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_line_that_was_cut_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "tex')
    file = Lines(path)
    file.write('{"step": 3}')
    file.close()
    assert read_lines(path) == [{"step": 1}, {"step": 3}]


def test_torch_is_not_asked_for_a_pickle(tmp_path: Path, tied_folder: Path) -> None:
    """A model whose only weights are a pickle is refused."""
    import shutil

    from minirl.train.policy import load_policy

    shutil.copytree(tied_folder, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    torch.save({}, tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_policy(str(tmp_path / "m"))
