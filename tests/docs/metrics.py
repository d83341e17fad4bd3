"""Prints docs/metrics.md from the table of minirl/metrics.py:

python -m tests.docs.metrics > docs/metrics.md
"""

from minirl.metrics import METRICS

HEAD = """# Metrics

One line per step in `metrics.jsonl`. A value that a step does not have is left out of
its line. This page is printed by `python -m tests.docs.metrics`; a test keeps it so.

"This step" is the time between two publications. "Trained tokens" are those that the
model wrote and that are not too stale.

"""
MIDDLE = """
## Evaluations

One line per evaluation of the held-out prompts in `evals.jsonl`.

"""


EVALS = {  # of a line of evals.jsonl: Evaluation.result, and what RunLog.evaluated adds
    "step": "training steps done when the evaluation began",
    "version": "the version that answered, on every engine",
    "seconds": "wall time since training began, when the evaluation ended",
    "accuracy": "mean reward of the answers; null where none could be graded",
    "low": "lower end of its 95 % interval (docs/evaluation.md)",
    "high": "upper end of the same",
    "count": "answers that were graded",
    "failures": "answers that could not be graded; left out of the mean",
    "length_mean": "mean number of written tokens of the answers",
    "truncated_frac": "share of the answers that was cut at rollout.max_new_tokens",
    "answers": "log.samples of them: prompt, reference, answer, reward",
}


def as_markdown(table: dict[str, str]) -> str:
    rows = [f"| `{name}` | {text.replace('|', chr(92) + '|')} |" for name, text in table.items()]
    return "\n".join(["| name | definition |", "|---|---|", *rows]) + "\n"


def document() -> str:
    return HEAD + as_markdown(METRICS) + MIDDLE + as_markdown(EVALS)


if __name__ == "__main__":
    print(document(), end="")
