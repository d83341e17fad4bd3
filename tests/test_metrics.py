"""Every metric is defined once, and limits do what they say. Faults in a row stop a run and name
the commonest; filters that keep hardly anything warn."""

import re

import pytest

from minirl import metrics
from minirl.metrics import FILTERS, MAX_IDLE_STEPS, MIN_FAULTS, DropWatch, RateLimit
from minirl.recipe import build
from minirl.records import Drop

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


def test_gap_and_entropy_warn_and_advise_what_helps() -> None:
    for fine in (GOOD, {**GOOD, "train/logprob_gap": None}):
        assert not metrics.broken_limits(fine)
    (gap, gap_text), (entropy, entropy_text) = metrics.broken_limits(BAD).items()
    assert "float32" not in gap_text  # on a GPU its products may be less exact than bfloat16's
    assert (gap, gap_text[:5]) == ("train/logprob_gap above 0.1", "nan: ")
    assert (entropy, entropy_text[:8]) == ("train/entropy below 0.001", "0.0001: ")


def test_steps_in_a_row_without_an_update_stop_the_run() -> None:
    lines = [SKIPPED] * (MAX_IDLE_STEPS - 1) + [GOOD] + [SKIPPED] * MAX_IDLE_STEPS
    *few, fault = (metrics.idle_fault(lines[:num], 1) for num in range(len(lines) + 1))
    assert not any(few) and "no update in 3 steps in a row" in fault
    assert metrics.idle_fault([SKIPPED] * 9, 2) == "", "each step had one update"


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
            getattr(watch, end)()
    return watch, notes


@pytest.mark.parametrize(
    ("ends", "stops"),
    [
        ([ERROR] * (LIMIT - 1), False),
        ([ERROR] * LIMIT, True),
        ([reason for reason in Drop if reason not in FILTERS] * LIMIT, True),
        ([Drop.WORKER_DIED] * 99, False),  # it has a limit of its own
        ([EQUAL] * 99, False),
        ([*[ERROR] * (LIMIT - 1), "graded"] * 3, False),
        ([*[ERROR] * (LIMIT - 1), Drop.WORKER_DIED, Drop.TOO_LONG, "stepped", ERROR], True),
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
        ([*[EQUAL] * (LIMIT - 1), "stepped", EQUAL], ""),
        ([*[EQUAL, "graded"] * LIMIT], "30 groups .* 100% of them equal rewards: set buffer.drop"),
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
