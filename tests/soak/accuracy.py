"""Is a run that everything happened to as good as one that nothing happened to? Takes the last
evaluation of both, gives a Finding.

Both are of the same steps, seed and held-out problems. Two runs at η > 0 are never the same run, so
there are two sources of noise: which answers were sampled (each evaluation's own 95 % interval) and
how the run went. The second is RUN_SD, the standard deviation of the last accuracy over undisturbed
runs of recipes/smoke.toml (docs/faults.md says how it was measured). Within noise is

    |difference| ≤ 1.96 · √(se_a² + se_b² + 2 · RUN_SD²)
"""

from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from minirl.run_dir import read_lines
from minirl.tools.statistics import Z95
from tests.soak.ledger import Finding

RUN_SD = 0.02


@dataclass(frozen=True)
class Evaluated:
    accuracy: float
    low: float
    high: float
    count: int
    steps: int

    @property
    def error(self) -> float:
        return (self.high - self.low) / (2 * Z95)

    def __str__(self) -> str:
        return f"{self.accuracy:.1%} ({self.low:.1%} to {self.high:.1%})"


def last_evaluation(run_dir: Path) -> Evaluated | None:
    """Of the last step; None where it was not evaluated."""
    lines, evals = (read_lines(run_dir / f"{name}.jsonl") for name in ("metrics", "evals"))
    if not lines or not evals or evals[-1]["step"] != lines[-1]["step"]:
        return None
    found = {name: evals[-1][name] for name in ("accuracy", "low", "high", "count")}
    return Evaluated(**found, steps=lines[-1]["step"])


def compare(ours: Evaluated | None, other: Evaluated | None) -> Finding:
    if ours is None or other is None:
        which = "the soak" if ours is None else "the undisturbed run"
        return Finding("accuracy", False, f"{which} has no evaluation of its last step")
    if ours.steps != other.steps:
        detail = f"{ours.steps} steps against {other.steps}: not to be compared"
        return Finding("accuracy", False, detail)
    noise = Z95 * sqrt(ours.error**2 + other.error**2 + 2 * RUN_SD**2)
    difference = ours.accuracy - other.accuracy
    detail = (
        f"{ours} against {other} undisturbed, {ours.steps} steps each, {ours.count} problems: "
        f"{100 * difference:+.1f} points, noise ±{100 * noise:.1f}"
    )
    return Finding("accuracy", abs(difference) <= noise, detail)
