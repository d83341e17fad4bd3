"""Writes docs/recipe.md from the config classes (every key, its values, default and help), and
docs/metrics.md from the table of minirl/metrics.py: `python -m tests.docs.pages`. What else these
pages say stands beside this file.
"""

from dataclasses import astuple
from pathlib import Path
from typing import Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from minirl.config import KEYS, SECTIONS, Config, get
from minirl.errors import toml_value
from minirl.metrics import DROPPED, METRICS

HERE = Path(__file__).parent


def recipe() -> str:
    rows = "\n".join(section(name) for name in ["", *SECTIONS])
    return (HERE / "recipe.md").read_text().replace("{rows}", rows)


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


def metrics() -> str:
    """With one row for all reasons of a drop."""
    reasons = ", ".join(f"`{reason}`" for reason in DROPPED)
    row = f"groups dropped since the run began, for one of: {reasons}"
    dropped = {name: ("buffer/dropped_REASON", row) for name in DROPPED.values()}
    rows = dict(dropped.get(name, (name, text)) for name, text in METRICS.items())
    listed = "".join(f"- `{name}`: {text}\n" for name, text in rows.items())
    return (HERE / "metrics.md").read_text().replace("{rows}", listed)


PAGES = {"recipe.md": recipe, "metrics.md": metrics}

if __name__ == "__main__":
    for name, document in PAGES.items():
        (HERE.parents[1] / "docs" / name).write_text(document())
