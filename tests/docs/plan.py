"""The planner's simulator against the AReaL paper (arXiv 2505.24298), table 7.

    python -m tests.docs.plan

The paper gives tokens per second; what it does not give is taken as follows, the same for all rows:
R1-Distill-Qwen-1.5B on H800, three GPUs in four for rollout, 4 minibatches, answers lognormal with
a mean of 4,000 tokens in a context of 8k. Two constants of the roofline (TRAIN, STEP_S) were fitted
on the first two rows.
"""

from collections.abc import Sequence
from math import nan
from typing import NamedTuple

from minirl.recipe import build
from minirl.tools.plan import GPUS, Plan
from minirl.tools.simulate import long_tailed

PAPER = {0: 27_100, 1: 47_800, 4: 49_000, 16: 52_000}  # tokens/s by η


def tokens_per_s(eta: int) -> float:
    """As the paper admits: up to η at once, nothing held back."""
    limit = 8192 - 1024
    model = {"model.path": "DeepSeek-R1-Distill-Qwen-1.5B", "model.dtype": "bfloat16"}
    lengths = {"tasks.max_prompt_tokens": 1024, "rollout.max_new_tokens": limit}
    batch = {"train.batch_size": 64, "rollout.group_size": 16, "train.num_minibatches": 4}
    devices = {"devices.rollout": 6, "devices.train": 2, "train.max_tokens": 32_768}
    staleness = {"buffer.max_staleness": eta, "buffer.target_staleness": float(eta)}
    config = build(model | lengths | batch | devices | staleness)
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
