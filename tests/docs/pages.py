"""Writes docs/recipe.md from the config classes (every key, its values, default and help), and
docs/metrics.md from the table of minirl/metrics.py: `python -m tests.docs.pages`.
"""

from dataclasses import astuple
from pathlib import Path
from typing import Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from minirl.config import KEYS, SECTIONS, Config, get
from minirl.errors import toml_value
from minirl.metrics import DROPPED, METRICS

RECIPE = """# Recipe

A recipe is a TOML file. `extends = "base.toml"` fills in what it leaves out, then the defaults do.
`--set section.key=value` changes a value; `minirl config RECIPE` prints all with their origin.
Each key below has its default and, in brackets, its range or other choices.
[Algorithms](algorithms.md) has presets and formulas. `python -m tests.docs.pages` writes this page.

"""
METRICS_HEAD = """# Metrics

`metrics.jsonl` has one line per step; values that a step lacks are left out. A step lasts from one
publication to the next. "Trained tokens" are those that the model wrote and that are fresh enough.
`python -m tests.docs.pages` writes this page.

"""
EVALS_HEAD = """
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


def recipe() -> str:
    return RECIPE + "\n".join(section(name) for name in ["", *SECTIONS])


def section(name: str) -> str:
    rows = [row(key, info) for key, info in KEYS.items() if key.rpartition(".")[0] == name]
    return "\n".join([f"## `[{name}]`" if name else "## Top level", "", *rows, ""])


def row(key: str, info: FieldInfo) -> str:
    meaning, default = (info.description or "").split(), toml_value(get(Config(), key))
    values = other_values(info, default)
    shown = f"`{default}`" + (f" ({values})" if values else "")
    return f"- **`{key}`** {shown}: {' '.join(meaning)}"


def other_values(field: FieldInfo, default: str) -> str:
    """What else a field may be, where its default does not say it: other choices, or a range."""
    kind, args = get_origin(field.annotation), get_args(field.annotation)
    if kind is Literal:
        return ", ".join(f"`{x}`" for x in map(toml_value, args) if x != default)
    if kind is tuple:
        return "integers" if int in get_args(args[0]) else "strings"
    signs = {Ge: "", Gt: ">", Le: "", Lt: "<"}  # of an end that is excluded
    limits = [f"{signs[type(x)]}{astuple(x)[0]:,.10g}" for x in field.metadata if type(x) in signs]
    return "…".join(limits)


def as_markdown(table: dict[str, str]) -> str:
    return "".join(f"- `{name}`: {text}\n" for name, text in table.items())


def metrics() -> str:
    """With one row for all reasons of a drop."""
    reasons = ", ".join(f"`{reason}`" for reason in DROPPED)
    row = f"groups dropped since the run began, for one of: {reasons}"
    dropped = {name: ("buffer/dropped_REASON", row) for name in DROPPED.values()}
    rows = dict(dropped.get(name, (name, text)) for name, text in METRICS.items())
    return METRICS_HEAD + as_markdown(rows) + EVALS_HEAD + as_markdown(EVALS)


PAGES = {"recipe.md": recipe, "metrics.md": metrics}

if __name__ == "__main__":
    for name, document in PAGES.items():
        (Path(__file__).parents[2] / "docs" / name).write_text(document())
