"""Where a task's rows come from: the hub, a folder, or one JSONL, CSV or parquet file.

Takes what `tasks.data` says, gives rows; a row knows its file and number, so that a bad one is one
line that a person can act on. A local path wins over a hub name.

    name/of-a-set         from the hub; "name/of-a-set:config" where it has several
    folder                train.jsonl and test.jsonl (or .csv, .parquet; train-*.parquet for parts),
                          in the folder or in its data/; the split's name is the file's
    rows.jsonl            one file; it has no splits

Held out is what tasks.test_split names. Without one (one file, or test_split = "") a tenth of the
training rows is held out, by a hash of the prompt: independent of seed and order, and two rows with
one prompt are always on one side.

Leaves out: types of cells. A CSV cell is text, as it is written.
"""

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minirl.config import TasksConfig
from minirl.errors import RecipeError, one_line

KINDS = (".jsonl", ".csv", ".parquet")
HELDOUT_SHARE = 10  # one row in so many, where nothing else is held out


class Row(dict[str, Any]):
    """A row and where it stands: its file and number."""

    def __init__(self, values: Mapping[str, Any], place: str = ""):
        super().__init__(values)
        self.place = place


def read(config: TasksConfig, data: str, prompt_column: str, split: str) -> Iterable[Row]:
    """The rows of "train" or "test", by the names that the recipe has for these."""
    is_test, is_file = split == "test", Path(data).is_file()
    if not is_file and config.test_split:
        return _named(data, config.test_split if is_test else config.train_split)
    hashed = []
    for row in file_rows(Path(data)) if is_file else _named(data, config.train_split):
        prompt = json.dumps(column(row, prompt_column), sort_keys=True, default=str)
        hashed.append((_hash(prompt) % HELDOUT_SHARE, row))
    lowest = min((rest for rest, _ in hashed), default=0)  # 0, but for a handful of rows
    return [row for rest, row in hashed if (rest == lowest) == is_test]


def as_rows(values: Iterable[Mapping[str, Any]], split: str) -> Iterator[Row]:
    for number, value in enumerate(values, start=1):
        yield value if isinstance(value, Row) else Row(value, f"row {number} of {split}")


def _named(data: str, split: str) -> Iterator[Row]:
    if data and Path(data).is_dir():
        return _folder_rows(Path(data), split)
    if not data or data.startswith((".", "/", "~")) or data.endswith(KINDS):
        remedy = "name a hub set, or a path beside the recipe or in the working folder"
        raise RecipeError("tasks.data", data, "there is no such file or folder", remedy)
    return as_rows(_hub_rows(data, split), f"{split} of {data}")


def is_held_out(prompt: str, one_in: int) -> bool:
    """By a hash of the prompt's text, which needs no list of what is held out."""
    return _hash(prompt) % one_in == 0


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def bad_row(row: Row, rule: str, remedy: str) -> RecipeError:
    return RecipeError("tasks.data", row.place, rule, remedy)


def column(row: Row, name: str) -> Any:
    if row.get(name) is None:
        rule = f'nothing in the column "{name}", it has {one_line(", ".join(map(str, row)), 100)}'
        remedy = "name yours in tasks.prompt_column and tasks.reference_column"
        raise bad_row(row, rule, remedy)
    return row[name]


def _folder_rows(folder: Path, split: str) -> Iterator[Row]:
    for place in (folder, folder / "data"):
        for kind in KINDS:
            whole = place / f"{split}{kind}"
            paths = [whole] if whole.is_file() else sorted(place.glob(f"{split}-*{kind}"))
            if paths:
                return (row for path in paths for row in file_rows(path))
    rule = f"the folder has no {split}.jsonl, {split}.csv or {split}.parquet"
    remedy = "name the files so, or set tasks.train_split and tasks.test_split"
    raise RecipeError("tasks.data", str(folder), rule, remedy)


def file_rows(path: Path) -> Iterator[Row]:
    number = 0
    try:
        for number, values in enumerate(_values(path), start=1):
            if not isinstance(values, dict) or None in values:  # None: cells beyond the header
                rule, remedy = "no JSON object, or more cells than columns", "mend the row"
                raise RecipeError("tasks.data", f"{path}, row {number}", rule, remedy)
            yield Row(values, f"{path}, row {number}")
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        rule = f"cannot be read after row {number} ({one_line(str(error), 80)})"
        raise RecipeError("tasks.data", str(path), rule, "mend the file") from None


def _values(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        from pyarrow import parquet  # comes with datasets

        yield from parquet.read_table(path).to_pylist()
        return
    if path.suffix not in KINDS:
        raise ValueError("of another kind than .jsonl, .csv and .parquet")
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = (json.loads(line) for line in file if line.strip())
        yield from lines if path.suffix == ".jsonl" else csv.DictReader(file)


def _hub_rows(data: str, split: str) -> Iterable[dict[str, Any]]:
    name, _, config = data.partition(":")
    try:
        from datasets import load_dataset

        return load_dataset(name, config or None, split=split)
    except Exception as error:  # the hub library raises a dozen kinds of its own
        why = one_line(f"{type(error).__name__}: {error}".split("\n")[0], 120)
        rule = f"is no local file or folder and cannot be had from the hub, split {split} ({why})"
        remedy = 'check name and network; a set with several configs takes "name:config"'
        raise RecipeError("tasks.data", data, rule, remedy) from None
