"""Where a task's rows come from: the hub, a folder, or one JSONL, CSV or parquet file.

Takes what `tasks.data` says, gives rows, which know their file and number (docs/tasks.md, "Data").
Without a test split, a hash of the prompt says what is held out: two rows with one prompt are on
one side, whatever the seed and the order.
Leaves out: types of cells. A CSV cell is text, as it is written.
"""

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, product
from pathlib import Path
from typing import Any

from minirl.config import TasksConfig
from minirl.errors import RecipeError, Unreachable, one_line
from minirl.recipe import is_path

KINDS = (".jsonl", ".csv", ".parquet")


class SourceRow(dict[str, Any]):
    def __init__(self, values: Mapping[str, Any], place: str = ""):
        super().__init__(values)
        self.place = place  # file and number

    def error(self, rule: str, remedy: str) -> RecipeError:
        return RecipeError("tasks.data", self.place, rule, remedy)

    def column(self, name: str) -> Any:
        if self.get(name) is not None:
            return self[name]
        rule = f'nothing in the column "{name}", it has {one_line(", ".join(map(str, self)), 100)}'
        remedy = "name yours in tasks.prompt_column and tasks.reference_column"
        raise self.error(rule, remedy)


def read(config: TasksConfig, data: str, prompt_column: str, split: str) -> Iterable[SourceRow]:
    """The rows of "train" or "test", by the names that the recipe has for these."""
    is_test = split == "test"
    if config.test_split and not Path(data).is_file():
        return _rows(data, config.test_split if is_test else config.train_split)
    hashed = []
    for row in _rows(data, config.train_split):
        prompt = json.dumps(row.column(prompt_column), sort_keys=True, default=str)
        hashed.append((hash_of(prompt) % 10, row))  # a tenth is held out
    lowest = min((rest for rest, _ in hashed), default=0)  # 0, but for a handful of rows
    return [row for rest, row in hashed if (rest == lowest) == is_test]


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def as_rows(values: Iterable[Mapping[str, Any]], split: str) -> Iterator[SourceRow]:
    for number, row in enumerate(values, start=1):
        yield row if isinstance(row, SourceRow) else SourceRow(row, f"row {number} of {split}")


def _rows(data: str, split: str) -> Iterator[SourceRow]:
    path, (name, _, config) = Path(data), data.partition(":")
    if data and (parts := _parts(path, split)):
        return chain.from_iterable(map(_file_rows, parts))
    try:
        if is_path(data) or path.is_dir() or data.endswith(KINDS):
            folder = f"a folder needs {split}.jsonl, {split}.csv or {split}.parquet"
            raise FileNotFoundError(folder if path.is_dir() else "there is no such path")
        from minirl.model import ask_hub  # a verifier reads no data, and needs none of it

        ask_hub()
        from datasets import load_dataset

        rows = load_dataset(name, config or None, split=split)
    except Exception as error:  # the hub library raises a dozen kinds of its own
        why = one_line(f"{type(error).__name__}: {error}".split("\n")[0], 120)
        rule = f"there is no split {split} in such a file, folder or hub set ({why})"
        remedy = 'check name, splits and network; a set with several configs takes "name:config"'
        found = Unreachable if isinstance(error, ConnectionError) else RecipeError
        raise found("tasks.data", data, rule, remedy) from None
    return as_rows(rows, f"{split} of {data}")


def _parts(path: Path, split: str) -> list[Path]:
    """The files of a split; none of a hub set."""
    if path.is_file():
        return [path]
    for folder, kind, end in product((path, path / "data"), KINDS, ("", "-*")):
        if found := sorted(folder.glob(f"{split}{end}{kind}")):
            return found
    return []


def _file_rows(path: Path) -> Iterator[SourceRow]:
    number = 0
    try:
        for number, values in enumerate(_values(path), start=1):
            yield SourceRow(values, f"{path}, row {number}")
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        rule = f"cannot be read at row {number + 1} ({one_line(str(error), 80)})"
        raise RecipeError("tasks.data", str(path), rule, "mend the file") from None


def _values(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        from pyarrow import parquet  # comes with datasets

        yield from parquet.read_table(path).to_pylist()
    elif path.suffix in KINDS:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = map(json.loads, filter(str.strip, file))
            for values in lines if path.suffix == ".jsonl" else csv.DictReader(file):
                if not isinstance(values, dict) or None in values:  # None: cells beyond the header
                    raise ValueError("it is no JSON object, or has more cells than columns")
                yield values
    else:
        raise ValueError("of another kind than .jsonl, .csv and .parquet")
