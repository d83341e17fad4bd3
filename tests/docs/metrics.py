"""docs/metrics.md, printed from the table of metrics.

python -m tests.docs.metrics > docs/metrics.md
"""

from minirl.metrics import TABLE

HEAD = """# Metrics

One line per step in `metrics.jsonl`. A value that a step does not have is left out of its line.
This page is printed by `python -m tests.docs.metrics`; a test keeps it true.

"This step" is the time between two publications. "Trained tokens" are those that the model wrote
and that are not too stale.

| metric | definition |
|---|---|
"""


def document() -> str:
    rows = [f"| `{m.name}` | {m.formula.replace('|', chr(92) + '|')} |\n" for m in TABLE]
    return HEAD + "".join(rows)


if __name__ == "__main__":
    print(document(), end="")
