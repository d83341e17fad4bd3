"""Every metric is defined once, docs/metrics.md is that table, and limits do what they say."""

from pathlib import Path

import pytest

from minirl.metrics import MAX_IDLE_STEPS, Guard, RateLimit, metrics_line
from tests.docs.metrics import document

GOOD = {"train/logprob_gap": 0.01, "train/entropy": 1.0, "train/skipped_updates": 0.0}
BAD = {**GOOD, "train/logprob_gap": float("nan"), "train/entropy": 1e-4}
SKIPPED = {"train/skipped_updates": 1.0}


def test_the_document_is_printed_from_the_tables() -> None:
    assert (Path(__file__).parent.parent / "docs" / "metrics.md").read_text() == document()


def test_a_line_has_what_the_step_has_in_the_order_of_the_table() -> None:
    nothing = {"train/loss": float("nan"), "train/grad_norm": float("inf"), "train/kl": None}
    line = metrics_line({**nothing, "reward/mean": 0.0, "step": 1})
    assert line == {"step": 1, "reward/mean": 0.0} and list(line) == ["step", "reward/mean"]
    with pytest.raises(AssertionError, match="reward/maen"):
        metrics_line({"step": 1, "reward/maen": 0.5})


def test_notes_of_a_kind_are_shown_at_powers_of_ten_with_their_count() -> None:
    notes: list[str] = []
    seldom = RateLimit(notes.append)
    for number in range(1, 1500):
        seldom.note("a", f"a {number}")
    seldom.note("b", "another")
    counted = [f"a {n} ({n:,} times so far)" for n in (10, 100, 1000)]
    assert notes == ["a 1", *counted, "another"]


def test_gap_and_entropy_warn_and_advise_what_helps() -> None:
    guard = Guard(num_minibatches=1)
    assert guard.judge(GOOD) == guard.judge({**GOOD, "train/logprob_gap": None}) == []
    gap, entropy = guard.judge(BAD)
    assert "float32" not in gap.text  # on a GPU its products may be less exact than bfloat16's
    assert gap.text.startswith("train/logprob_gap above 0.1: nan: ")
    assert entropy.text.startswith("train/entropy below 0.001: 0.0001: ")
    assert not gap.is_fatal and not entropy.is_fatal and gap.limit != entropy.limit


def test_steps_in_a_row_without_an_update_stop_the_run() -> None:
    guard = Guard(num_minibatches=1)
    steps = [SKIPPED] * (MAX_IDLE_STEPS - 1) + [GOOD] + [SKIPPED] * MAX_IDLE_STEPS
    *few, (breach,) = map(guard.judge, steps)
    assert not any(few) and breach.is_fatal and "no update in 3 steps in a row" in breach.text
    guard = Guard(num_minibatches=2)
    assert [guard.judge(SKIPPED) for _ in range(9)] == [[]] * 9  # each step had one update
