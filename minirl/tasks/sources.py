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

Leaves out: types of cells. A CSV cell is text, as it is written.
"""

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirl.errors import RecipeError, one_line

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

    def rows(self, split: str) -> Iterable[Row]:
        """Of "train" or "test", by the names that the recipe has for these."""
        if not self.data:
            remedy = "name a hub name, a folder or a .jsonl, .csv or .parquet file"
            raise RecipeError("tasks.data", "", "this task has no data of its own", remedy)
        if Path(self.data).is_file():
            return self._side(file_rows(Path(self.data)), split)
        if not self.test_split:
            return self._side(self._named(self.train_split), split)
        return self._named(self.test_split if split == "test" else self.train_split)

    def _named(self, name: str) -> Iterator[Row]:
        if Path(self.data).is_dir():
            return _folder_rows(Path(self.data), name)
        if self.data.startswith((".", "/", "~")) or self.data.endswith(KINDS):
            remedy = "it is looked for beside the recipe, then in the working folder"
            raise RecipeError("tasks.data", self.data, "there is no such file or folder", remedy)
        return _hub_rows(self.data, name)

    def _side(self, rows: Iterable[Row], split: str) -> list[Row]:
        hashed = []
        for row in rows:
            prompt = json.dumps(column(row, self.prompt_column), sort_keys=True, default=str)
            hashed.append((_hash(prompt) % HELDOUT_SHARE, row))
        lowest = min((rest for rest, _ in hashed), default=0)  # 0, but for a handful of rows
        return [row for rest, row in hashed if (rest == lowest) == (split == "test")]


def is_held_out(prompt: str, one_in: int) -> bool:
    """By a hash of the prompt's text, which needs no list of what is held out."""
    return _hash(prompt) % one_in == 0


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def bad_row(row: Row, rule: str, remedy: str) -> RecipeError:
    return RecipeError("tasks.data", row.source, f"{row.place} {rule}", remedy)


def column(row: Row, name: str) -> Any:
    if name not in row:
        rule = f'has no column "{name}", it has {one_line(", ".join(map(str, row)), 100)}'
        remedy = "name yours in tasks.prompt_column and tasks.reference_column"
        raise bad_row(row, rule, remedy)
    if row[name] is None:
        raise bad_row(row, f'is empty in its column "{name}"', "mend it or take it out")
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
    readers = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
    if path.suffix not in readers:
        remedy = "write it as .jsonl, .csv or .parquet"
        raise RecipeError("tasks.data", str(path), "is a file of another kind", remedy)
    place = "its start"
    try:
        for place, values in readers[path.suffix](path):
            if not isinstance(values, dict) or None in values:  # None: cells beyond the header
                rule = "is no JSON object, or has more cells than there are columns"
                raise bad_row(Row({}, str(path), place), rule, "mend it there")
            yield Row(values, str(path), place)
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        why = one_line(str(error), 80)
        rule = f"cannot be read, after {place} ({type(error).__name__}: {why})"
        raise RecipeError("tasks.data", str(path), rule, "mend it there") from None


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"line {number}", json.loads(line)


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        for values in reader:
            yield f"line {reader.line_num}", values


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import parquet  # comes with datasets

    for number, values in enumerate(parquet.read_table(path).to_pylist(), start=1):
        yield f"row {number}", values


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
    return (Row(values, data, f"row {n} of {split}") for n, values in enumerate(rows, start=1))
