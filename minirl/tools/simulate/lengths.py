"""How long prompts and answers are. Takes a distribution or a run directory, gives lengths.

Answers of reasoning models are long-tailed: a lognormal, cut at the limit. A run leaves the lengths
of what it trained in batches.jsonl, and those can be drawn instead.
"""

import math
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from minirl.errors import RecipeError
from minirl.run_dir import read_lines

SIGMA = 0.7  # of the logarithm: the longest tenth is about six times as long as the shortest


@dataclass(frozen=True)
class Lengths:
    """Answers are drawn from `answers`, a sample of the distribution, with replacement."""

    answers: tuple[int, ...]
    prompt: int

    def draw(self, dice: random.Random) -> int:
        return self.answers[int(dice.random() * len(self.answers))]

    @cached_property
    def mean(self) -> float:
        return sum(self.answers) / len(self.answers)

    @cached_property
    def longest(self) -> int:
        return max(self.answers)


def long_tailed(
    median: float, limit: int, prompt: int, sigma: float = SIGMA, num: int = 4096
) -> Lengths:
    """The quantiles of a lognormal in equal steps: the same sample every time."""
    answers = []
    for i in range(num):
        z = _normal_quantile((i + 0.5) / num)
        answers.append(max(1, min(limit, round(median * math.exp(sigma * z)))))
    return Lengths(tuple(answers), prompt)


def with_mean(mean: float, limit: int, prompt: int, sigma: float = SIGMA) -> Lengths:
    """The same, by its mean after the cut."""
    low, high = 1.0, float(limit) * 4
    for _ in range(30):
        middle = (low + high) / 2
        if long_tailed(middle, limit, prompt, sigma, num=512).mean < mean:
            low = middle
        else:
            high = middle
    return long_tailed(low, limit, prompt, sigma)


def of_run(run_dir: Path) -> Lengths:
    """What a run trained, all steps together."""
    groups = [g for line in read_lines(run_dir / "batches.jsonl") for g in line["groups"]]
    answers = [length for group in groups for length in group["lengths"]]
    prompts = [group["prompt_tokens"] for group in groups]
    if not answers:
        rule, remedy = "has no batches.jsonl with a step", "name the directory of a run with steps"
        raise RecipeError("--run", str(run_dir), rule, remedy)
    return Lengths(tuple(answers), round(sum(prompts) / len(prompts)))


def _normal_quantile(p: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(p)
