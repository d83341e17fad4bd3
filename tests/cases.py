"""The tables under tests/data: one case per line, each a JSON object. And what most of them are of:
a refusal in one line."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from minirl.errors import RecipeError

DATA = Path(__file__).parent / "data"


def cases(table: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{table}.jsonl").read_text().splitlines()]


def each_case(table: str) -> pytest.MarkDecorator:
    """The test is run once per case, which it takes as `case`."""
    found = cases(table)
    return pytest.mark.parametrize("case", found, ids=range(len(found)))


@contextmanager
def refused(key: str, words: str) -> Iterator[pytest.ExceptionInfo[RecipeError]]:
    """The block is, for a value of this key, in one line with these words."""
    with pytest.raises(RecipeError) as caught:
        yield caught
    line = str(caught.value)
    assert words in line and "\n" not in line and caught.value.key == key
