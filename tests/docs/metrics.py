"""Prints docs/metrics.md from the tables of minirl/metrics.py:

python -m tests.docs.metrics > docs/metrics.md
"""

from minirl.metrics import EVALS, METRICS

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


def as_markdown(table: dict[str, str]) -> str:
    rows = [f"| `{name}` | {text.replace('|', chr(92) + '|')} |" for name, text in table.items()]
    return "\n".join(["| name | definition |", "|---|---|", *rows]) + "\n"


def document() -> str:
    return HEAD + as_markdown(METRICS) + MIDDLE + as_markdown(EVALS)


if __name__ == "__main__":
    print(document(), end="")
