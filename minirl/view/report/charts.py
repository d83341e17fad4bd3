"""Which curves a report has. Takes families of runs, gives charts: what is drawn, not how."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minirl.run_dir import Line, RunDir
from minirl.view.report.families import Family, Point, Points

BANDS = (
    "Bands: of one run's reward, ± 2 standard errors, counted by prompts; of its accuracy, the "
    "95 % interval; of its lengths, the middle 80 % of a step's answers. Of several seeds, the "
    "line is the mean and the band goes from the lowest to the highest."
)


@dataclass(frozen=True)
class Curve:
    label: str
    points: Points
    colour: int  # a number in the palette
    is_dashed: bool = False
    is_marked: bool = False  # few points: show each


@dataclass(frozen=True)
class Chart:
    name: str  # of its file
    title: str
    about: str
    curves: tuple[Curve, ...]
    is_share: bool = False  # from 0 to 1, shown in %
    is_log: bool = False
    bounds: tuple[tuple[str, float], ...] = ()  # lines that are not data
    x_label: str = "step"


@dataclass(frozen=True)
class Kind:
    """One chart of metrics: (metric, word in the legend), the first one drawn solid."""

    name: str
    title: str
    about: str
    metrics: tuple[tuple[str, str], ...]
    is_share: bool = False
    is_log: bool = False


KINDS = (
    Kind(
        "lengths",
        "Length of answers",
        "tokens that the model wrote",
        (("rollout/length_mean", "mean"),),
    ),
    Kind(
        "truncated",
        "Cut at the limit",
        "share of answers that ran into rollout.max_new_tokens",
        (("rollout/truncated_frac", ""),),
        is_share=True,
    ),
    Kind(
        "entropy",
        "Entropy",
        "of the policy at trained tokens, in nats; a fall to 0 ends exploration",
        (("train/entropy", ""),),
    ),
    Kind("kl", "KL to the first model", "by train.kl_kind, in nats", (("train/kl", ""),)),
    Kind(
        "clip",
        "Clipped and capped",
        "share of trained tokens whose ratio was clipped, and whose w = prox / behaviour was above "
        "train.behav_cap",
        (("train/clip_frac", "clipped"), ("train/capped_frac", "capped")),
        is_share=True,
    ),
    Kind(
        "gap",
        "Logprob gap",
        "mean |vLLM's logprob − the trainer's| at tokens of the same version: it should stay flat",
        (("train/logprob_gap", "all"), ("train/spliced_gap", "after tokens of an older version")),
        is_log=True,
    ),
    Kind("grad_norm", "Gradient norm", "before clipping", (("train/grad_norm", ""),)),
    Kind(
        "throughput",
        "Throughput",
        "tokens a second: sampled by all engines, trained while the ranks were at it",
        (("rollout/tokens_per_s", "sampled"), ("train/tokens_per_s", "trained")),
    ),
    Kind(
        "idle",
        "Idle",
        "share of each step in which engines had nothing to sample, and rank 0 no batch",
        (("rollout/idle_frac", "engines"), ("train/idle_frac", "trainers")),
        is_share=True,
    ),
)


def charts(families: Sequence[Family]) -> list[Chart]:
    """Those that have a point."""
    found = [
        _reward(families),
        _accuracy(families, by_time=False),
        _accuracy(families, by_time=True),
        _staleness(families),
        *(_of_kind(kind, families) for kind in KINDS),
    ]
    return [chart for chart in found if any(curve.points for curve in chart.curves)]


def _reward(families: Sequence[Family]) -> Chart:
    about = "mean of each step's answers"
    curves = _curves(families, [("", reward_points)])
    return Chart("reward", "Reward", about, curves)


def _accuracy(families: Sequence[Family], by_time: bool) -> Chart:
    """Over seconds only the means of single runs are comparable, so each run is a curve."""
    about = "mean reward on held-out prompts"
    if not by_time:
        curves = _curves(families, [("", accuracy_points)], is_marked=True)
        return Chart("accuracy", "Held-out accuracy", about, curves, x_label="version")
    lines = tuple(
        Curve(
            family.label if n == 0 else "",
            accuracy_by_second(run, has_band=len(family.runs) == 1),
            colour,
            is_marked=True,
        )
        for colour, family in enumerate(families)
        for n, run in enumerate(family.runs)
    )
    title = "Held-out accuracy by time"
    return Chart("accuracy_time", title, f"{about}, by wall time", lines, x_label="seconds")


def _staleness(families: Sequence[Family]) -> Chart:
    about = "of trained tokens; no token is ever above the bound η (buffer.max_staleness)"
    values = [
        ("mean", of_metric("buffer/staleness_mean")),
        ("max", of_metric("buffer/staleness_max")),
    ]
    etas = {run.recipe.get("buffer.max_staleness") for f in families for run in f.runs}
    bounds = tuple((f"η = {eta}", float(eta)) for eta in sorted(e for e in etas if e is not None))
    curves = _curves(families, values)
    return Chart("staleness", "Staleness and its bound", about, curves, bounds=bounds)


def _of_kind(kind: Kind, families: Sequence[Family]) -> Chart:
    values = [(word, of_metric(metric)) for metric, word in kind.metrics]
    if kind.name == "lengths":
        values = [("mean", length_points)]
    curves = _curves(families, values)
    return Chart(kind.name, kind.title, kind.about, curves, kind.is_share, kind.is_log)


def _curves(
    families: Sequence[Family],
    values: Sequence[tuple[str, Callable[[RunDir], Points]]],
    is_marked: bool = False,
) -> tuple[Curve, ...]:
    """Colour tells families apart, where there are several; else what is measured."""
    curves = []
    for number, family in enumerate(families):
        for place, (word, of) in enumerate(values):
            is_alone = len(families) == 1
            parts = [word] if is_alone and word else [family.label, word]
            curves.append(
                Curve(
                    " · ".join(part for part in parts if part),
                    family.points(of),
                    place if is_alone else number,
                    is_dashed=place > 0 and not is_alone,
                    is_marked=is_marked,
                )
            )
    return tuple(curves)


# -- points of one run


def of_metric(name: str) -> Callable[[RunDir], Points]:
    def points(run: RunDir) -> Points:
        pairs = ((line["step"], number(line, name)) for line in run.metrics)
        return tuple(Point(x, y, y, y) for x, y in pairs if y is not None)

    return points


def reward_points(run: RunDir) -> Points:
    num_prompts = run.recipe.get("train.batch_size") or 1
    points = []
    for line in run.metrics:
        mean, std = number(line, "reward/mean"), number(line, "reward/std") or 0.0
        if mean is not None:
            error = 2 * std / math.sqrt(num_prompts)
            points.append(Point(line["step"], mean, mean - error, mean + error))
    return tuple(points)


def accuracy_points(run: RunDir) -> Points:
    found = {point.x: point for _, point in _evaluations(run)}
    return tuple(found[x] for x in sorted(found))


def accuracy_by_second(run: RunDir, has_band: bool = True) -> Points:
    """Without a band where there are several runs: their curves show how far they differ."""
    found = _evaluations(run)
    if not has_band:
        return tuple(Point(seconds, p.y, p.y, p.y) for seconds, p in found)
    return tuple(Point(seconds, p.y, p.low, p.high) for seconds, p in found)


def _evaluations(run: RunDir) -> list[tuple[float, Point]]:
    """(seconds, point at a version)."""
    found = []
    for line in run.evals:
        values = [number(line, name) for name in ("version", "accuracy", "low", "high")]
        if None not in values:
            found.append((number(line, "seconds") or 0.0, Point(*values)))  # type: ignore[arg-type]
    return found


def length_points(run: RunDir) -> Points:
    written = {
        line["step"]: sorted(n for group in line.get("groups", []) for n in group["lengths"])
        for line in run.batches
    }
    points = []
    for line in run.metrics:
        mean, all_of_it = number(line, "rollout/length_mean"), written.get(line["step"], [])
        if mean is not None:
            low = all_of_it[len(all_of_it) // 10] if all_of_it else mean
            high = all_of_it[-1 - len(all_of_it) // 10] if all_of_it else mean
            points.append(Point(line["step"], mean, low, high))
    return tuple(points)


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share that was seen in `count` cases."""
    if not 0 <= share <= 1:  # a reward that is no share
        return share, share
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    spread = math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    half = z / (1 + z * z / count) * spread
    return middle - half, middle + half


def number(line: Line, name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
