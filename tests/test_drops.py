"""Faults in a row stop a run and name the commonest; filters that keep hardly anything warn."""

import re
from dataclasses import replace

import pytest

from minirl.config import Config
from minirl.drops import FILTERS, MIN_FAULTS, DropWatch
from minirl.metrics import RateLimit
from minirl.records import Drop

B = 10
LIMIT = 3 * B
ERROR, EQUAL, LONG = Drop.REWARD_ERROR, Drop.EQUAL_REWARDS, Drop.TOO_LONG


def watch_of(batch_size: int = B, max_faults: float = 3.0) -> tuple[DropWatch, list[str]]:
    notes, base = list[str](), Config()
    train = replace(base.train, batch_size=batch_size)
    buffer = replace(base.buffer, max_faults=max_faults)
    config = replace(base, train=train, buffer=buffer)
    return DropWatch(config, RateLimit(notes.append)), notes


def tell(watch: DropWatch, ends: list[Drop | str]) -> None:
    for number, end in enumerate(ends):
        if isinstance(end, Drop):
            watch.dropped(end, f"error {number} (task.py, line 3, in reward)")
        elif end in ("graded", "kept"):
            watch.graded(is_kept=end == "kept")
        else:
            getattr(watch, end)()


@pytest.mark.parametrize(
    ("ends", "stops"),
    [
        ([ERROR] * (LIMIT - 1), False),
        ([ERROR] * LIMIT, True),
        ([reason for reason in Drop if reason not in FILTERS] * LIMIT, True),
        ([Drop.WORKER_DIED] * 99, False),  # it has a limit of its own
        ([EQUAL] * 99, False),
        ([*[ERROR] * (LIMIT - 1), "kept"] * 3, False),
        ([*[ERROR] * (LIMIT - 1), "graded"] * 3, False),  # a held-out answer
        ([*[ERROR] * (LIMIT - 1), EQUAL] * 3, False),  # it was graded too
        ([*[ERROR] * (LIMIT - 1), Drop.WORKER_DIED, "stepped", ERROR], True),
        ([LONG] * (10 * LIMIT - 1), False),  # where most are, so many in a row are no wonder
        ([LONG] * 10 * LIMIT, True),
        ([*[LONG] * (10 * LIMIT - 1), "begun"] * 3, False),  # short prompts still run
        ([*[ERROR] * (LIMIT - 1), "begun", ERROR], True),
    ],
)
def test_so_many_faults_in_a_row_stop_the_run(ends: list[Drop | str], stops: bool) -> None:
    watch, _ = watch_of()
    tell(watch, ends)
    assert bool(watch.fault) is stops


def test_the_line_has_the_commonest_reason_its_count_and_an_example() -> None:
    watch, _ = watch_of()
    tell(watch, [*[LONG] * 9, *[ERROR] * 30])
    assert watch.fault == (
        "no reward for 39 groups in a row: reward error 30 times, such as error 38 (task.py, "
        "line 3, in reward); mend that, or raise buffer.max_faults = 3"
    )


@pytest.mark.parametrize(("batch_size", "limit"), [(1, MIN_FAULTS), (8, MIN_FAULTS), (9, 27)])
def test_small_batches_have_a_floor(batch_size: int, limit: int) -> None:
    watch, _ = watch_of(batch_size)
    tell(watch, [ERROR] * (limit - 1))
    assert not watch.fault
    tell(watch, [ERROR])
    assert watch.fault


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([EQUAL] * (LIMIT - 1), ""),
        ([*[EQUAL] * (LIMIT - 1), "kept", EQUAL], ""),
        (
            [EQUAL] * LIMIT,
            "warning: 100% of 30 groups in a row were dropped, equal rewards: set buffer.",
        ),
        ([*[Drop.TRUNCATED] * 24, *[EQUAL] * 6], "80% of 30 .*, truncated: raise rollout.max_new"),
        ([*[EQUAL, "kept"] * 30, "stepped"], ""),  # 30 of 40
        ([*[EQUAL, "kept"] * 31, "stepped"], "76% of 41 groups since the last step were dropped, "),
        ([*[EQUAL, "kept"] * 20, "stepped", *[EQUAL, "kept"] * 20, "stepped"], ""),
        ([*[Drop.STALE, "kept"] * 31, "stepped"], "stale: raise buffer.max_staleness"),
        ([EQUAL] * LIMIT * 20, r"\(10 times so far\)"),
    ],
)
def test_a_filter_that_keeps_hardly_anything_warns(ends: list[Drop | str], said: str) -> None:
    watch, notes = watch_of()
    tell(watch, ends)
    assert bool(notes) is bool(said) and not watch.fault
    assert not said or (notes[0].startswith("warning: ") and re.search(said, notes[-1])), notes
    assert len(notes) <= 2
