"""The simulator against the AReaL paper (arXiv 2505.24298): table 7, figure 5c, figure 4.

The paper gives tokens a second; what it does not give is taken as follows, the same for all rows:
R1-Distill-Qwen-1.5B on H800, three GPUs in four for rollout, 4 minibatches, answers lognormal with
a mean of 4,000 tokens where the context is 8k and 6,500 where it is 16k. Two constants of
roofline.py (TRAIN, STEP_S) were fitted on table 7's first two rows.
"""

from dataclasses import dataclass, replace

from minirl.config import Config
from minirl.plan.gpus import GPUS
from minirl.plan.shapes import shape_of
from minirl.plan.split import simulate
from minirl.simulate.lengths import with_mean
from minirl.simulate.simulation import Outcome

TABLE_7 = {0: 27_100, 1: 47_800, 4: 49_000, 16: 52_000}
WITHIN = 0.10
SCALING = (32, 64, 128, 256)
PROMPT = 200


@dataclass(frozen=True)
class Row:
    eta: int
    paper: float  # tokens/s
    simulated: float
    paper_ratio: float  # to η = 0
    simulated_ratio: float

    @property
    def error(self) -> float:
        return self.simulated_ratio / self.paper_ratio - 1


@dataclass(frozen=True)
class Scale:
    num_gpus: int
    asynchronous: float  # speed-up over the first row
    synchronous: float
    ratio: float  # asynchronous over synchronous throughput


def recipe(eta: int, batch_size: int, context: int) -> Config:
    """As the paper admits: up to η at once, nothing held back."""
    base = Config()
    prompt = 1024
    return replace(
        base,
        model=replace(base.model, path="DeepSeek-R1-Distill-Qwen-1.5B", dtype="bfloat16"),
        tasks=replace(base.tasks, max_prompt_tokens=prompt),
        rollout=replace(base.rollout, group_size=16, max_new_tokens=context - prompt),
        buffer=replace(base.buffer, max_staleness=eta, target_staleness=float(eta)),
        train=replace(base.train, batch_size=batch_size, num_minibatches=4, max_tokens=32_768),
    )


def run(eta: int, batch_size: int, context: int, mean: float, num_gpus: int) -> Outcome:
    config = recipe(eta, batch_size, context)
    lengths = with_mean(mean, config.rollout.max_new_tokens, PROMPT)
    rollout = num_gpus * 3 // 4
    shape = shape_of(config)
    return simulate(config, GPUS["H800"], shape, lengths, rollout, num_gpus - rollout)


def table_7() -> list[Row]:
    found = {eta: run(eta, 64, 8192, 4000, 8).tokens_per_s for eta in TABLE_7}
    return [
        Row(eta, paper, found[eta], paper / TABLE_7[0], found[eta] / found[0])
        for eta, paper in TABLE_7.items()
    ]


def figure_5c() -> list[tuple[int, float]]:
    """Throughput by η: it rises steeply, then is level."""
    return [(eta, run(eta, 64, 8192, 4000, 8).tokens_per_s) for eta in (0, 1, 2, 4, 8, 16)]


def figure_4() -> list[Scale]:
    """Strong scaling, 512 prompts × 16, 16k context: near linear, but not when synchronous."""
    found = {
        (eta, num): run(eta, 512, 16_384, 6500, num).tokens_per_s
        for eta in (0, 8)
        for num in SCALING
    }
    first = SCALING[0]
    return [
        Scale(
            num,
            found[8, num] / found[8, first],
            found[0, num] / found[0, first],
            found[8, num] / found[0, num],
        )
        for num in SCALING
    ]
