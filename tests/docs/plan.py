"""The planner's simulator against the AReaL paper (arXiv 2505.24298), table 7.

    python -m tests.docs.plan

The paper gives tokens per second; what it does not give is taken as follows, the same for all rows:
R1-Distill-Qwen-1.5B on H800, three GPUs in four for rollout, 4 minibatches, answers lognormal with
a mean of 4,000 tokens in a context of 8k. Two constants of the roofline (TRAIN, STEP_S) were fitted
on the first two rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import NamedTuple

from minirl.config import Config
from minirl.tools.plan import GPUS, Plan
from minirl.tools.simulate import long_tailed

PAPER = {0: 27_100, 1: 47_800, 4: 49_000, 16: 52_000}  # tokens/s by η


def tokens_per_s(eta: int) -> float:
    """As the paper admits: up to η at once, nothing held back."""
    base, limit = Config(), 8192 - 1024
    config = replace(
        base,
        model=replace(base.model, path="DeepSeek-R1-Distill-Qwen-1.5B", dtype="bfloat16"),
        tasks=replace(base.tasks, max_prompt_tokens=1024),
        devices=replace(base.devices, rollout=6, train=2),
        rollout=replace(base.rollout, group_size=16, max_new_tokens=limit),
        buffer=replace(base.buffer, max_staleness=eta, target_staleness=float(eta)),
        train=replace(base.train, batch_size=64, num_minibatches=4, max_tokens=32_768),
    )
    return Plan(config, GPUS["H800"], long_tailed(4000, limit, 200)).outcome.tokens_per_s


class Row(NamedTuple):
    eta: int
    paper: float  # tokens/s
    simulated: float
    error: float  # of the ratio to η = 0


def table_7(etas: Sequence[int] = tuple(PAPER)) -> list[Row]:
    found = {eta: tokens_per_s(eta) for eta in etas}
    rows = []
    for eta, simulated in found.items():
        paper = PAPER.get(eta, nan)
        rows.append(Row(eta, paper, simulated, simulated / found[0] * PAPER[0] / paper - 1))
    return rows


if __name__ == "__main__":
    print(*table_7(), sep="\n")
