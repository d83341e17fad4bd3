"""The planner's simulator against the AReaL paper (arXiv 2505.24298): table 7 and figure 4.

    python -m tests.docs.plan

The paper gives tokens per second; what it does not give is taken as follows, the same for all rows:
R1-Distill-Qwen-1.5B on H800, three GPUs in four for rollout, 4 minibatches, answers lognormal with
a mean of 4,000 tokens where the context is 8k and 6,500 where it is 16k. Two constants of the
roofline (TRAIN, STEP_S) were fitted on table 7's first two rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import NamedTuple

from minirl.config import Config
from minirl.tools.plan import GPUS, Plan
from minirl.tools.simulate import with_mean

TABLE_7 = {0: 27_100, 1: 47_800, 4: 49_000, 16: 52_000}  # tokens/s by η
SCALING = (32, 64, 128, 256)  # GPUs of figure 4


def recipe(eta: int, batch_size: int, context: int) -> Config:
    """As the paper admits: up to η at once, nothing held back."""
    base, prompt = Config(), 1024
    return replace(
        base,
        model=replace(base.model, path="DeepSeek-R1-Distill-Qwen-1.5B", dtype="bfloat16"),
        tasks=replace(base.tasks, max_prompt_tokens=prompt),
        rollout=replace(base.rollout, group_size=16, max_new_tokens=context - prompt),
        buffer=replace(base.buffer, max_staleness=eta, target_staleness=float(eta)),
        train=replace(base.train, batch_size=batch_size, num_minibatches=4, max_tokens=32_768),
    )


def tokens_per_s(config: Config, mean: float, rollout: int, train: int) -> float:
    lengths = with_mean(mean, config.rollout.max_new_tokens, 200)
    return Plan(config, GPUS["H800"], lengths).simulate(rollout, train).tokens_per_s


class Row(NamedTuple):
    eta: int
    paper: float  # tokens/s
    simulated: float
    error: float  # of the ratio to η = 0


def table_7(etas: Sequence[int] = tuple(TABLE_7)) -> list[Row]:
    found = {eta: tokens_per_s(recipe(eta, 64, 8192), 4000, 6, 2) for eta in etas}
    rows = []
    for eta, simulated in found.items():
        paper = TABLE_7.get(eta, nan)
        rows.append(Row(eta, paper, simulated, simulated / found[0] * TABLE_7[0] / paper - 1))
    return rows


class Scale(NamedTuple):
    """Tokens/s of a number of GPUs, 512 prompts × 16, 16k context."""

    num_gpus: int
    asynchronous: float  # η = 8
    synchronous: float  # the same split at η = 0: one pool waits while the other works
    colocated: float  # η = 0, every GPU generates, then every GPU trains; changing is free

    def over(self, first: "Scale") -> tuple[float, ...]:
        return tuple(own / other for own, other in zip(self[1:], first[1:], strict=True))


def figure_4() -> list[Scale]:
    """Strong scaling: near linear, but not when synchronous."""
    found = []
    for num in SCALING:
        cases = (8, num * 3 // 4, num // 4), (0, num * 3 // 4, num // 4), (0, num, num)
        speeds = (tokens_per_s(recipe(eta, 512, 16_384), 6500, *pools) for eta, *pools in cases)
        found.append(Scale(num, *speeds))
    return found


if __name__ == "__main__":
    print(*table_7(), *figure_4(), sep="\n")
