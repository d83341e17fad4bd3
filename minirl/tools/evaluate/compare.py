"""Two results on the same problems, side by side. Takes them, gives figures and what changed.

Problems are matched by prompt and reference. One answer to each, each right or wrong: McNemar's
exact test on the problems that changed. Otherwise: a paired permutation test on each problem's mean
reward. The difference's interval is a bootstrap over problems in both cases.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minirl.errors import RecipeError
from minirl.tools.evaluate.results import Attempt, Result
from minirl.tools.statistics import Interval, bootstrap_means, interval_of, mcnemar, sign_flips


@dataclass(frozen=True)
class Pair:
    """One problem, answered by both, with at least one reward on each side."""

    a: Result
    b: Result

    @property
    def difference(self) -> float:
        assert self.a.mean is not None and self.b.mean is not None
        return self.b.mean - self.a.mean

    def answers(self) -> tuple[Attempt, Attempt]:
        """Of several, those that show the change: A's best where B is worse, and so on."""
        best, worst = (self.a, self.b) if self.difference < 0 else (self.b, self.a)
        high = max(best.answers, key=lambda answer: _or(answer.reward, -math.inf))
        low = min(worst.answers, key=lambda answer: _or(answer.reward, math.inf))
        return (high, low) if best is self.a else (low, high)

    def shown(self) -> dict[str, Any]:
        a, b = self.answers()
        asked = {"question": self.a.question, "reference": self.a.reference}
        return {**asked, "a": a.text, "a_reward": a.reward, "b": b.text, "b_reward": b.reward}


def _or(reward: float | None, otherwise: float) -> float:
    return otherwise if reward is None else reward


@dataclass(frozen=True)
class Comparison:
    pairs: list[Pair]
    num_unmatched: int  # problems of only one side, or without a reward on one
    difference: Interval  # of mean rewards, b - a
    p: float
    test: str

    @property
    def intervals(self) -> list[Interval | None]:
        """Of a and of b, each alone."""
        sides = [pair.a for pair in self.pairs], [pair.b for pair in self.pairs]
        return [interval_of([result.rewards for result in side]) for side in sides]

    @property
    def gained(self) -> list[Pair]:
        """Better in b, by how much."""
        return sorted((p for p in self.pairs if p.difference > 0), key=lambda p: -p.difference)

    @property
    def lost(self) -> list[Pair]:
        return sorted((p for p in self.pairs if p.difference < 0), key=lambda p: p.difference)

    def as_json(self, num_shown: int = 3) -> dict[str, Any]:
        return {
            "problems": len(self.pairs),
            "accuracies": [[i.mean, i.low, i.high] if i else None for i in self.intervals],
            "unmatched": self.num_unmatched,
            "difference": self.difference.mean,
            "interval_95": [self.difference.low, self.difference.high],
            "p": self.p,
            "test": self.test,
            "gained": [pair.a.problem for pair in self.gained],
            "lost": [pair.a.problem for pair in self.lost],
            "shown": [pair.shown() for pair in self.gained[:num_shown] + self.lost[:num_shown]],
        }


def compare(a: Sequence[Result], b: Sequence[Result]) -> Comparison:
    left, right = _by_key(a), _by_key(b)
    common = [key for key in left if key in right]
    pairs = [Pair(left[key], right[key]) for key in common]
    pairs = [pair for pair in pairs if pair.a.mean is not None and pair.b.mean is not None]
    if not pairs:
        remedy = "compare results of the same task, data, seed and number of problems"
        raise RecipeError("--compare", "A B", "have no problem in common", remedy)
    differences = np.array([pair.difference for pair in pairs])
    drawn = np.quantile(bootstrap_means(differences), (0.025, 0.975))
    interval = Interval(float(differences.mean()), float(drawn[0]), float(drawn[1]))
    is_single = all(len(r.answers) == 1 for pair in pairs for r in (pair.a, pair.b))
    if is_single and {r.mean for pair in pairs for r in (pair.a, pair.b)} <= {0.0, 1.0}:
        p = mcnemar(int((differences > 0).sum()), int((differences < 0).sum()))
        test = "McNemar, exact"
    else:
        p, test = sign_flips(differences.tolist()), "paired permutation of means by problem"
    num_unmatched = len(left.keys() | right.keys()) - len(pairs)
    return Comparison(pairs, num_unmatched, interval, p, test)


def _by_key(results: Sequence[Result]) -> dict[tuple[str, str, int], Result]:
    """A task may ask the same twice: then the first is matched with the first."""
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for result in sorted(results, key=lambda result: result.problem):
        asked = (json.dumps(result.prompt), result.reference)
        found[(*asked, seen[asked])] = result
        seen[asked] += 1
    return found
