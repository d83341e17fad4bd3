"""Where a task's rows come from: the hub, a folder, or one JSONL, CSV or parquet file.

Takes what `tasks.data` says, gives rows; a row knows its file and its place there, so that a bad
one is one line a person can act on. What is on this machine comes before the hub.

    name/of-a-set         from the hub; "name/of-a-set:config" where it has several
    folder                train.jsonl and test.jsonl (or .csv, .parquet; train-*.parquet for parts),
                          in the folder or in its data/; the split's name is the file's
    rows.jsonl            one file; it has no splits

Held out is what tasks.test_split names. Where there is no such thing (one file, or test_split = "")
a tenth of the training rows is held out, by a hash of the prompt: the same rows whatever the seed
and the order, and two rows with one prompt are always on one side.
"""

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirl.errors import RecipeError, one_line
from minirl.records import Example

KINDS = (".jsonl", ".csv", ".parquet")
HELDOUT_SHARE = 10  # one row in so many, where nothing else is held out


class Row(dict[str, Any]):
    """A row and where it stands."""

    def __init__(self, values: Mapping[str, Any], source: str = "", place: str = ""):
        super().__init__(values)
        self.source, self.place = source, place


@dataclass(frozen=True)
class Source:
    data: str
    train_split: str
    test_split: str
    prompt_column: str  # what the hash is of, where the rows are split by one

    def rows(self, split: str) -> Iterator[Row]:
        """Of "train" or "test", by the names that the recipe has for these."""
        if not self.data:
            remedy = "name a hub name, a folder or a .jsonl, .csv or .parquet file"
            raise RecipeError("tasks.data", "", "this task has no data of its own", remedy)
        is_test = split == "test"
        if Path(self.data).is_file():
            return self._side(_file_rows(Path(self.data)), is_test)
        if not self.test_split:
            return self._side(self._named(self.train_split), is_test)
        return self._named(self.test_split if is_test else self.train_split)

    def _named(self, name: str) -> Iterator[Row]:
        if Path(self.data).is_dir():
            return _folder_rows(Path(self.data), name)
        if self.data.startswith((".", "/", "~")) or self.data.endswith(KINDS):
            remedy = "it is looked for beside the recipe, then in the working folder"
            raise RecipeError("tasks.data", self.data, "there is no such file or folder", remedy)
        return _hub_rows(self.data, name)

    def _side(self, rows: Iterable[Row], is_test: bool) -> Iterator[Row]:
        hashed = []
        for row in rows:
            prompt = json.dumps(_column(row, self.prompt_column), sort_keys=True, default=str)
            hashed.append((_hash(prompt) % HELDOUT_SHARE, row))
        lowest = min((rest for rest, _ in hashed), default=0)  # 0, but for a handful of rows
        return (row for rest, row in hashed if (rest == lowest) == is_test)


def is_held_out(prompt: str, one_in: int) -> bool:
    """By a hash of the prompt's text, which needs no list of what is held out."""
    return _hash(prompt) % one_in == 0


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def bad_row(row: Row, rule: str, remedy: str) -> RecipeError:
    return RecipeError("tasks.data", row.source, f"{row.place} {rule}", remedy)


def example_of(row: Row, prompt_column: str, reference_column: str) -> Example:
    """The two columns of a row: text or chat messages, and what its reward knows."""
    prompt = _column(row, prompt_column)
    reference = _column(row, reference_column)
    if not isinstance(reference, str):
        reference = json.dumps(reference, ensure_ascii=False, default=str)
    if isinstance(prompt, (list, tuple)) and prompt and all(map(_is_message, prompt)):
        messages = [{"role": m["role"], "content": m["content"]} for m in prompt]
        return Example(tuple(messages), reference)
    if not isinstance(prompt, str) or not prompt.strip():
        rule = f'has no prompt in its column "{prompt_column}": {one_line(repr(prompt), 40)}'
        raise bad_row(row, rule, 'text, or messages like {"role": "user", "content": "…"}')
    return Example(prompt, reference)


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and all(
        isinstance(item.get(name), str) for name in ("role", "content")
    )


def _column(row: Row, name: str) -> Any:
    if row.get(name) is None:
        there = one_line(", ".join(map(str, row)), 100)
        if name in row:
            raise bad_row(row, f'is empty in its column "{name}"', "mend it or take it out")
        rule = f'has no column "{name}", it has {there}'
        remedy = "name yours in tasks.prompt_column and tasks.reference_column"
        raise bad_row(row, rule, remedy)
    return row[name]


def _folder_rows(folder: Path, split: str) -> Iterator[Row]:
    for place in (folder, folder / "data"):
        for kind in KINDS:
            whole, parts = place / f"{split}{kind}", sorted(place.glob(f"{split}-*{kind}"))
            for path in [whole] if whole.is_file() else parts:
                yield from _file_rows(path)
            if whole.is_file() or parts:
                return
    rule = f"the folder has no {split}.jsonl, {split}.csv or {split}.parquet"
    remedy = "name the files so, or set tasks.train_split and tasks.test_split"
    raise RecipeError("tasks.data", str(folder), rule, remedy)


def _file_rows(path: Path) -> Iterator[Row]:
    readers = {".jsonl": _jsonl_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        remedy = "write it as .jsonl, .csv or .parquet"
        raise RecipeError("tasks.data", str(path), "is a file of another kind", remedy)
    try:
        yield from readers[path.suffix](path)
    except UnicodeDecodeError:
        remedy = "write it as UTF-8"
        raise RecipeError("tasks.data", str(path), "is not UTF-8 text", remedy) from None
    except OSError as error:
        rule = f"cannot be read ({one_line(error.strerror or str(error), 80)})"
        raise RecipeError("tasks.data", str(path), rule, "check the file") from None


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = Row({}, str(path), f"line {number}")
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                rule = f"is not JSON ({one_line(str(error), 60)})"
                raise bad_row(row, rule, "write one object a line") from None
            if not isinstance(values, dict):
                raise bad_row(row, "is no JSON object", "write one object a line")
            row.update(values)
            yield row


def _csv_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        try:
            for values in reader:
                row = Row(values, str(path), f"line {reader.line_num}")
                if None in values:
                    rule = f"has more cells than the {len(values) - 1} columns"
                    raise bad_row(row, rule, "put cells with commas in quotes")
                yield row
        except csv.Error as error:
            row = Row({}, str(path), f"line {reader.line_num}")
            raise bad_row(row, f"is not CSV ({error})", "mend it there") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        rule = "pyarrow, which reads parquet, is not installed"
        raise RecipeError("tasks.data", str(path), rule, "pip install datasets") from None
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for values in batch.to_pylist():
                number += 1
                yield Row(values, str(path), f"row {number}")
    except ArrowException as error:
        rule = f"is not parquet ({one_line(str(error), 80)})"
        raise RecipeError("tasks.data", str(path), rule, "write the file again") from None


def _hub_rows(data: str, split: str) -> Iterator[Row]:
    name, _, config = data.partition(":")
    try:
        from datasets import load_dataset

        rows = load_dataset(name, config or None, split=split)
    except Exception as error:  # the hub library raises a dozen kinds of its own
        why = one_line(f"{type(error).__name__}: {error}".split("\n")[0], 120)
        rule = f"is no local file or folder and cannot be had from the hub, split {split} ({why})"
        remedy = 'check name and network; a set with several configs takes "name:config"'
        raise RecipeError("tasks.data", data, rule, remedy) from None
    for number, values in enumerate(rows, start=1):
        yield Row(values, data, f"row {number} of {split}")
