"""Whole runs that must learn: `make learn`, about two minutes each on 2 cores.

Each takes the smoke recipe with one thing changed, from sampled accuracy near 20 % to 80 % or more.
"""

from pathlib import Path

import pytest
from processes import Run, assert_accounted

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHANGES = {
    "smoke": {},
    "lora": {"train__lora_rank": 16, "train__lr": 3e-3},
    "ppo with a critic": {"train__algorithm": "ppo"},
    "gspo": {"train__algorithm": "gspo"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_learns(name: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", small=False, eval__every=30, **CHANGES[name])
    ended = run.end(limit_s=1800)
    assert ended.code == 0, ended
    summary = run.summary()
    goal = 0.85 if name == "smoke" else 0.80  # the first is the README's promise
    assert summary["accuracy_after"] >= goal, ended
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.40
    assert summary["logprob_gap_max"] < 1e-3
    assert_accounted(run.metrics(), max_staleness=2)
