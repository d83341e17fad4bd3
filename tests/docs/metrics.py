"""Prints docs/metrics.md from the table of minirl/metrics.py:

python -m tests.docs.metrics > docs/metrics.md
"""

from minirl.metrics import DROPPED, METRICS

HEAD = """# Metrics

`metrics.jsonl` has one line per step; values that a step lacks are left out. A step lasts from one
publication to the next. "Trained tokens" are those that the model wrote and that are fresh enough.
`python -m tests.docs.metrics` prints this page.

"""
MIDDLE = """
## Evaluations

`evals.jsonl` has one line per evaluation of the held-out prompts.

"""
EVALS = {  # of a line of evals.jsonl: Evaluation.line, and what RunLog.evaluated adds
    "step": "training steps done at its start",
    "version": "the version that answered, on every engine",
    "seconds": "wall time since training began, at its end",
    "accuracy": "mean reward of the answers; null where none could be graded",
    "low": "lower end of its 95 % interval ([rules](evaluation.md))",
    "high": "upper end",
    "count": "answers that were graded",
    "failures": "answers not graded; left out of the mean",
    "length_mean": "mean number of written tokens",
    "truncated_frac": "share truncated at rollout.max_new_tokens",
    "answers": "log.samples of them: prompt, reference, answer, reward",
}


def as_markdown(table: dict[str, str]) -> str:
    return "".join(f"- `{name}`: {text}\n" for name, text in table.items())


def document() -> str:
    """With one row for all reasons of a drop."""
    reasons = ", ".join(f"`{reason}`" for reason in DROPPED)
    row = f"groups dropped since the run began, for one of: {reasons}"
    dropped = {name: ("buffer/dropped_REASON", row) for name in DROPPED.values()}
    rows = dict(dropped.get(name, (name, text)) for name, text in METRICS.items())
    return HEAD + as_markdown(rows) + MIDDLE + as_markdown(EVALS)


if __name__ == "__main__":
    print(document(), end="")
