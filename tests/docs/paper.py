"""The simulator against the AReaL paper (arXiv 2505.24298): table 7, figure 5c, figure 4.

The paper gives tokens a second; what it does not give is taken as follows, the same for all rows:
R1-Distill-Qwen-1.5B on H800, three GPUs in four for rollout, 4 minibatches, answers lognormal with
a mean of 4,000 tokens where the context is 8k and 6,500 where it is 16k. Two constants of
minirl/tools/plan.py (TRAIN, STEP_S) were fitted on table 7's first two rows.
"""

from dataclasses import dataclass, replace

from minirl.config import Config
from minirl.tools.plan import GPUS, Plan
from minirl.tools.simulate import Outcome, with_mean

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
    asynchronous: float  # speed-up over the first row, as are the next two
    synchronous: float  # the same split at η = 0: one pool waits while the other works
    colocated: float  # every GPU generates, then every GPU trains
    over_synchronous: float  # asynchronous throughput over theirs
    over_colocated: float


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


def run(
    eta: int, batch_size: int, context: int, mean: float, num_gpus: int, colocated: bool = False
) -> Outcome:
    """Colocated makes sense at η = 0 only, where the pools take turns; changing them is free."""
    config = recipe(eta, batch_size, context)
    lengths = with_mean(mean, config.rollout.max_new_tokens, PROMPT)
    rollout = num_gpus if colocated else num_gpus * 3 // 4
    train = num_gpus if colocated else num_gpus - rollout
    return Plan(config, GPUS["H800"], lengths).simulate(rollout, train)


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
    rows = []
    for num in SCALING:
        asynchronous = run(8, 512, 16_384, 6500, num).tokens_per_s
        synchronous = run(0, 512, 16_384, 6500, num).tokens_per_s
        colocated = run(0, 512, 16_384, 6500, num, colocated=True).tokens_per_s
        rows.append((asynchronous, synchronous, colocated))
    first = rows[0]
    return [
        Scale(
            num,
            row[0] / first[0],
            row[1] / first[1],
            row[2] / first[2],
            over_synchronous=row[0] / row[1],
            over_colocated=row[0] / row[2],
        )
        for num, row in zip(SCALING, rows, strict=True)
    ]


if __name__ == "__main__":
    print("table 7  paper tokens/s  simulated  paper ratio  simulated   error")
    for row in table_7():
        ratios = f"{row.paper_ratio:11.2f}{row.simulated_ratio:11.2f}"
        print(f"η = {row.eta:<3}{row.paper:15,.0f}{row.simulated:12,.0f}{ratios}{row.error:+9.1%}")
    print("figure 4   η = 8   η = 0  colocated  over η = 0  over colocated")
    for scale in figure_4():
        rates = f"{scale.asynchronous:8.2f}{scale.synchronous:8.2f}{scale.colocated:11.2f}"
        print(
            f"{scale.num_gpus:4} GPUs{rates}"
            f"{scale.over_synchronous:12.2f}{scale.over_colocated:16.2f}"
        )
