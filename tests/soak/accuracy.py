"""Is a run with faults as good as one without? Takes the last evaluation of both, gives a Finding.

Both have the same steps, seed and held-out problems. Two runs at η > 0 are never the same run, so
there are two sources of noise: which answers were sampled (each evaluation's own 95 % interval) and
how the run went. The second is RUN_SD, the standard deviation of the last accuracy over undisturbed
runs of recipes/smoke.toml. Within noise is

    |difference| ≤ 1.96 · √(se_a² + se_b² + 2 · RUN_SD²)
"""

from math import sqrt

from tests.soak.ledger import Finding
from tests.soak.run_files import Z95, Evaluated

RUN_SD = 0.02


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
