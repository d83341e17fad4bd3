"""The planner's simulator against the AReaL paper (arXiv 2505.24298): table 7 and figure 4.

    python -m tests.docs.plan        prints both, and draws docs/planning.svg

The paper gives tokens per second; what it does not give is taken as follows, the same for all rows:
R1-Distill-Qwen-1.5B on H800, three GPUs in four for rollout, 4 minibatches, answers lognormal with
a mean of 4,000 tokens where the context is 8k and 6,500 where it is 16k. Two constants of the
roofline (TRAIN, STEP_S) were fitted on table 7's first two rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path

from minirl.config import Config
from minirl.tools.plan import GPUS, Plan
from minirl.tools.simulate import with_mean
from tests.docs import save

PLOT = Path(__file__).parents[2] / "docs" / "planning.svg"
TABLE_7 = {0: 27_100, 1: 47_800, 4: 49_000, 16: 52_000}  # tokens/s by η
SCALING = (32, 64, 128, 256)  # GPUs of figure 4
PROMPT = 200
Rows = Iterator[tuple[str, ...]]


def recipe(eta: int, batch_size: int, context: int) -> Config:
    """As the paper admits: up to η at once, nothing held back."""
    base, prompt, size = Config(), 1024, batch_size
    return replace(
        base,
        model=replace(base.model, path="DeepSeek-R1-Distill-Qwen-1.5B", dtype="bfloat16"),
        tasks=replace(base.tasks, max_prompt_tokens=prompt),
        rollout=replace(base.rollout, group_size=16, max_new_tokens=context - prompt),
        buffer=replace(base.buffer, max_staleness=eta, target_staleness=float(eta)),
        train=replace(base.train, batch_size=size, num_minibatches=4, max_tokens=32_768),
    )


def tokens_per_s(config: Config, mean: float, rollout: int, train: int) -> float:
    lengths = with_mean(mean, config.rollout.max_new_tokens, PROMPT)
    return Plan(config, GPUS["H800"], lengths).simulate(rollout, train).tokens_per_s


@dataclass(frozen=True)
class Row:
    """Tokens/s at one η, and to those at η = 0."""

    eta: int
    paper: float
    simulated: float
    paper_ratio: float
    simulated_ratio: float

    @property
    def error(self) -> float:
        return self.simulated_ratio / self.paper_ratio - 1


def table_7(etas: Sequence[int] = tuple(TABLE_7)) -> list[Row]:
    found = {eta: tokens_per_s(recipe(eta, 64, 8192), 4000, 6, 2) for eta in etas}
    rows = [(eta, TABLE_7.get(eta, nan), simulated) for eta, simulated in found.items()]
    return [Row(*row, row[1] / TABLE_7[0], row[2] / found[0]) for row in rows]


@dataclass(frozen=True)
class Scale:
    """Tokens/s of a number of GPUs, 512 prompts × 16, 16k context."""

    num_gpus: int
    asynchronous: float  # η = 8
    synchronous: float  # the same split at η = 0: one pool waits while the other works
    colocated: float  # η = 0, every GPU generates, then every GPU trains; changing is free

    def over(self, first: "Scale") -> tuple[float, ...]:
        return tuple(own / other for own, other in zip(self.speeds, first.speeds, strict=True))

    @property
    def speeds(self) -> tuple[float, ...]:
        return self.asynchronous, self.synchronous, self.colocated


def figure_4() -> list[Scale]:
    """Strong scaling: near linear, but not when synchronous."""
    found = []
    for num in SCALING:
        cases = (8, num * 3 // 4, num // 4), (0, num * 3 // 4, num // 4), (0, num, num)
        speeds = (tokens_per_s(recipe(eta, 512, 16_384), 6500, *pools) for eta, *pools in cases)
        found.append(Scale(num, *speeds))
    return found


def paper_rows(rows: Sequence[Row], scales: Sequence[Scale]) -> Rows:
    yield "η", "paper, tokens/s", "simulated", "paper, to η = 0", "simulated", "error"
    for row in rows:
        speeds = f"{row.paper:,.0f}", f"{row.simulated:,.0f}"
        ratios = f"{row.paper_ratio:.2f}", f"{row.simulated_ratio:.2f}"
        yield str(row.eta), *speeds, *ratios, f"{row.error:+.1%}"
    yield "GPUs", "η = 8", "η = 0", "colocated", "η = 8 over η = 0", "over colocated"
    for scale in scales:
        gains = [f"× {gain:.2f}" for gain in scale.over(scales[0])]
        over = scale.asynchronous / scale.synchronous, scale.asynchronous / scale.colocated
        yield str(scale.num_gpus), *gains, *(f"{ratio:.2f}" for ratio in over)


def plot(rows: Sequence[Row], scales: Sequence[Scale], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure((9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    labels, gpus = [f"η = {row.eta}" for row in rows], [str(scale.num_gpus) for scale in scales]
    left.plot(labels, [row.paper / 1000 for row in rows], "o-", color="gray", label="paper")
    left.plot(labels, [row.simulated / 1000 for row in rows], "o-", label="simulated")
    left.set(title="thousand tokens/s by η: 1.5B, 8 GPUs, 8k", ylim=(0, 60))
    right.plot(gpus, [num / SCALING[0] for num in SCALING], "o-", color="gray", label="linear")
    gains = zip(*(scale.over(scales[0]) for scale in scales), strict=True)
    for name, speeds in zip(("η = 8", "η = 0", "colocated"), gains, strict=True):
        right.plot(gpus, speeds, "o-", label=f"{name}, simulated")
    right.set(title="speed-up by GPUs: 1.5B, 16k, 512 × 16", ylim=(0, 8.5))
    save(figure, path)


if __name__ == "__main__":
    table, scales = table_7(), figure_4()
    plot(table, scales, PLOT)
    for row in paper_rows(table, scales):
        print(f"| {' | '.join(row)} |")
