"""Prints docs/metrics.md from the tables of minirl/metrics.py:

python -m tests.docs.metrics > docs/metrics.md
"""

from minirl.metrics import EVALS, TABLE, Metric


def as_markdown(table: tuple[Metric, ...]) -> str:
    rows = [
        f"| `{metric.name}` | {metric.formula.replace('|', chr(92) + '|')} |" for metric in table
    ]
    return "\n".join(["| name | definition |", "|---|---|", *rows]) + "\n"


def document() -> str:
    """The whole of `docs/metrics.md`."""
    return (
        "# Metrics\n\n"
        "One line per step in `metrics.jsonl`. A value that a step does not have is left out of\n"
        "its line. This page is printed by `python -m tests.docs.metrics`; a test keeps it so.\n\n"
        '"This step" is the time between two publications. "Trained tokens" are those that the\n'
        "model wrote and that are not too stale.\n\n"
        f"{as_markdown(TABLE)}\n"
        "## Evaluations\n\n"
        "One line per evaluation of the held-out prompts in `evals.jsonl`.\n\n"
        f"{as_markdown(EVALS)}"
    )


if __name__ == "__main__":
    print(document(), end="")
