"""The tables under tests/data: one case per line, each a JSON object."""

import json
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"


def cases(table: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{table}.jsonl").read_text().splitlines()]


def each_case(table: str) -> pytest.MarkDecorator:
    """The test is run once per case, which it takes as `case`."""
    found = cases(table)
    return pytest.mark.parametrize("case", found, ids=range(len(found)))
