"""Every metric is defined once, docs/metrics.md is that table, and limits do what they say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minirl import metrics
from minirl.config import Config, GuardConfig
from minirl.metrics import MAX_IDLE_STEPS, Guard, metrics_line
from tests.docs.metrics import as_markdown, document

DOCUMENT = Path(__file__).parent.parent / "docs" / "metrics.md"
GOOD = {"train/logprob_gap": 0.01, "train/entropy": 1.0, "train/skipped_updates": 0.0}


def test_the_document_is_printed_from_the_tables() -> None:
    assert DOCUMENT.read_text() == document()
    for table in (metrics.TABLE, metrics.EVALS):
        names = [metric.name for metric in table]
        assert len(set(names)) == len(names)
        rows = as_markdown(table).splitlines()[2:]
        assert [row.split("`")[1] for row in rows] == names
        assert all(row.replace(r"\|", "").count("|") == 3 for row in rows)  # two columns


def test_a_line_has_what_the_step_has_in_the_order_of_the_table() -> None:
    nothing = {"train/loss": float("nan"), "train/grad_norm": float("inf"), "train/kl": None}
    line = metrics_line({**nothing, "reward/mean": 0.0, "step": 1})
    assert line == {"step": 1, "reward/mean": 0.0} and list(line) == ["step", "reward/mean"]
    with pytest.raises(AssertionError, match="reward/maen"):
        metrics_line({"step": 1, "reward/maen": 0.5})


def of(**limits: Any) -> Guard:
    return Guard(Config(guard=GuardConfig(**limits)))


def test_a_good_step_breaks_no_limit_and_0_is_off() -> None:
    assert of().judge(GOOD) == []
    off = of(max_logprob_gap=0.0, min_entropy=0.0)
    assert off.judge({**GOOD, "train/logprob_gap": 99.0, "train/entropy": 0.0}) == []
    assert of().judge({**GOOD, "train/logprob_gap": None}) == []  # no token at equal version


def test_gap_and_entropy_warn_at_powers_of_ten() -> None:
    judge = of(max_logprob_gap=0.5, min_entropy=0.2)
    gap, entropy = judge.judge({**GOOD, "train/logprob_gap": 0.6, "train/entropy": 0.1})
    assert gap.text.startswith("train/logprob_gap is 0.6, above guard.max_logprob_gap = 0.5: ")
    assert entropy.text.startswith("train/entropy is 0.1, below guard.min_entropy = 0.2: ")
    assert not gap.is_fatal and not entropy.is_fatal
    (nan,) = judge.judge({**GOOD, "train/logprob_gap": float("nan")})
    assert nan.text.endswith("(the 2th time)") and not nan.is_told
    judge = of(min_entropy=2.0)
    told = [judge.judge(GOOD)[0].is_told for _ in range(100)]
    assert [i + 1 for i, is_told in enumerate(told) if is_told] == [1, 10, 100]


def test_steps_in_a_row_without_an_update_stop_the_run() -> None:
    judge, skipped = of(), {"train/skipped_updates": 1.0}
    few = [judge.judge(skipped) for _ in range(MAX_IDLE_STEPS - 1)]
    assert not any(few) and judge.judge(GOOD) == []
    *few, (breach,) = [judge.judge(skipped) for _ in range(MAX_IDLE_STEPS)]
    assert not any(few) and breach.is_fatal
    assert f"no update in {MAX_IDLE_STEPS} steps in a row" in breach.text
    judge = Guard(replace(Config(), train=replace(Config().train, num_minibatches=2)))
    assert [judge.judge(skipped) for _ in range(9)] == [[]] * 9  # each step had one update
