"""What an exam leaves behind: one line a problem, and the figures of all of them.

    results.jsonl   problem, prompt, reference and each answer: text, reward, length, stop
    summary.json    accuracy with its interval, pass@k, lengths, truncation, failures

A reward that failed is null with its reason: it counts nowhere, and is counted. An answer is
*right* where its reward is 1 or more; accuracy is the mean reward, which is the same where rewards
are 0 or 1.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from minirl.errors import RecipeError
from minirl.run_dir import write_text
from minirl.tools.statistics import interval_of, pass_at, usual_ks

RESULTS, SUMMARY = "results.jsonl", "summary.json"


@dataclass(frozen=True)
class Attempt:
    text: str
    reward: float | None  # None: it failed, as `error` says
    length: int  # written tokens
    stop: str
    error: str = ""

    @property
    def is_right(self) -> bool:
        return self.reward is not None and self.reward >= 1.0


@dataclass(frozen=True)
class Result:
    """One problem and its answers."""

    problem: int  # its place among the task's held-out examples
    prompt: Any  # text, or chat messages
    reference: str
    answers: tuple[Attempt, ...]

    @property
    def rewards(self) -> list[float]:
        return [a.reward for a in self.answers if a.reward is not None]

    @property
    def mean(self) -> float | None:
        return fmean(self.rewards) if self.rewards else None

    def pass_at(self, k: int) -> float | None:
        """None: fewer than k of its answers could be graded."""
        num_graded = len(self.rewards)
        if num_graded < k:
            return None
        return pass_at(k, num_graded, sum(a.is_right for a in self.answers))

    @property
    def question(self) -> str:
        """The prompt as a person reads it: of a chat, what was said last."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """The same whatever order the problems were done in: draws and sums depend on it."""
    results = sorted(results, key=lambda result: result.problem)
    answers = [answer for result in results for answer in result.answers]
    found = interval_of([result.rewards for result in results])
    most = max((len(result.answers) for result in results), default=0)
    errors = sorted({a.error for a in answers if a.reward is None})
    return {
        "problems": len(results),
        "answers_each": most,
        "answers_graded": sum(a.reward is not None for a in answers),
        "answers_failed": sum(a.reward is None for a in answers),
        "failures": errors[:5],
        "accuracy": found.mean if found else None,
        "interval_95": [found.low, found.high] if found else None,
        "pass_at": {str(k): _mean([r.pass_at(k) for r in results]) for k in usual_ks(most)},
        "length_mean": _mean([a.length for a in answers]),
        "truncated_frac": _mean([float(a.stop == "length") for a in answers]),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def line_of(result: Result) -> str:
    return json.dumps(asdict(result), ensure_ascii=False) + "\n"


def write(folder: Path, results: Sequence[Result], summary: dict[str, Any]) -> None:
    """In the problems' order."""
    in_order = sorted(results, key=lambda result: result.problem)
    texts = {
        RESULTS: "".join(map(line_of, in_order)),
        SUMMARY: json.dumps(summary, indent=2, ensure_ascii=False) + "\n",
    }
    for name, text in texts.items():
        write_text(folder / name, text)


def read(path: Path) -> list[Result]:
    """A results.jsonl, or the folder that holds one."""
    file = path / RESULTS if path.is_dir() else path
    try:
        return list(_parse(file.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot be read ({type(error).__name__})"
        raise RecipeError("results", str(path), why, f"name a {RESULTS} of `minirl eval`") from None
    except (ValueError, KeyError, TypeError):
        remedy = "it must be as `minirl eval` wrote it"
        raise RecipeError("results", str(path), "is no results of an eval", remedy) from None


def _parse(lines: Sequence[str]) -> Iterator[Result]:
    for line in lines:
        if line.strip():
            row = json.loads(line)
            answers = tuple(Attempt(**answer) for answer in row["answers"])
            yield Result(int(row["problem"]), row["prompt"], str(row["reference"]), answers)
