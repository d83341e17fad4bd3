"""Programming problems, graded by unit tests that run in the sandbox.

The data (`tasks.data`; without it, a few built-in problems) has one problem per row:

    {"prompt": "Read two numbers and print their sum.",
     "tests": [{"stdin": "1 2\\n", "stdout": "3\\n"}],
     "solution": "a, b = map(int, input().split())\\nprint(a + b)"}
    {"prompt": "Write add(a, b).",
     "tests": [{"call": "add", "args": [1, 2], "returns": 3}], "solution": "def add(a, b): …"}

An answer's code is its last ```python block; it is right if all tests pass: if the program prints
the same lines, or if what the function returns equals the expected value as JSON, floats to 1e-6.
Only inputs go into the sandbox; what comes out is compared here, as bytes or as plain JSON. A
sandbox that fails raises, and the group is dropped: it is never a 0.

Leaves out: how code is run (sandbox.py, jail.py), packages beside the standard library.
"""

import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minirl.config import TasksConfig
from minirl.errors import RecipeError
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task, need
from minirl.tasks.sandbox import Call, Limits, Outcome, run, why_not
from minirl.tasks.sources import Row, as_rows, bad_row, file_rows

BUILT_IN = Path(__file__).with_name("code_problems.jsonl")
BLOCK = re.compile(r"^[ \t]*```(?:python|py|Python|python3)[ \t]*\r?\n(.*?)^[ \t]*```", re.M | re.S)
INSTRUCTION = "Write the solution in Python, in one ```python block."
TOLERANCE = 1e-6
WALL_OVER_CPU = 4.0  # a machine that is busy with other things is not the answer's fault
SHARE_OF_TIMEOUT = 0.8  # of tasks.timeout_s: a slow answer is wrong, and its verifier stays


@dataclass(frozen=True)
class Test:
    stdin: str
    call: Call | None
    expected: Any  # the text of stdout, or the value that the call returns


class Code(Task):
    options = {"test_s": 2.0, "unsafe": False}  # noqa: RUF012

    def __init__(self, config: TasksConfig, seed: int = 0):
        super().__init__(config, seed)
        test_s = self.options["test_s"]
        need(self, "test_s", 0 < test_s <= 3600, "must be above 0 and at most 3600 seconds")
        why = why_not()
        if why and not self.options["unsafe"]:
            rule = f"code cannot be sandboxed here ({why})"
            remedy = "see docs/sandbox.md; true runs code that can use every file that you can"
            raise RecipeError("tasks.options.unsafe", False, rule, remedy)
        limits = Limits(cpu_s=math.ceil(test_s), wall_s=WALL_OVER_CPU * test_s)
        self.limits = replace(limits, max_abi=0) if why else limits
        # Not in the examples: tests may be large, and each verifier reads them itself.
        rows = (row for split in ("train", "test") for row in self.load(split))
        self.tests = {_key(self.example(row)): _tests(row) for row in rows}

    def load(self, split: str) -> Iterable[Row]:
        if self.config.data:
            return as_rows(super().load(split), split)
        return [row for row in file_rows(BUILT_IN) if row["split"] == split]

    def example(self, row: Row) -> Example:
        call = _tests(row)[0].call
        how = f"Write a function `{call.function}`." if call else "Read stdin and print to stdout."
        message = {"role": "user", "content": f"{row['prompt']}\n{how} {INSTRUCTION}"}
        return Example((message,), row["solution"])

    def reward(self, example: Example, answer: Answer) -> float:
        code = extract(answer.text)
        if answer.stop is not StopReason.STOP or code is None:
            return 0.0
        deadline = time.monotonic() + SHARE_OF_TIMEOUT * self.config.timeout_s
        for test in self.tests[_key(example)]:
            left_s = deadline - time.monotonic()
            limits = replace(self.limits, wall_s=min(self.limits.wall_s, left_s))
            if left_s <= 0 or not passes(test, run(code, test.stdin, test.call, limits)):
                return 0.0
        return 1.0

    def solution(self, example: Example) -> str:
        return f"```python\n{example.reference}\n```"


def extract(text: str) -> str | None:
    """The last ```python block that is closed, or None."""
    return (BLOCK.findall(text) or [None])[-1]


def passes(test: Test, outcome: Outcome) -> bool:
    if outcome.status:
        return False
    if test.call is None:
        return _lines(outcome.output.decode(errors="replace")) == _lines(test.expected)
    try:
        return equal(json.loads(outcome.output), test.expected)
    except (ValueError, RecursionError):  # no JSON, or not the JSON of a value that is expected
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def equal(given: Any, expected: Any) -> bool:
    """As Python has it, but a float need only be near. Both are plain JSON values."""
    if isinstance(expected, list) and isinstance(given, list):
        return len(given) == len(expected) and all(map(equal, given, expected))
    if isinstance(expected, dict) and isinstance(given, dict):
        is_like = given.keys() == expected.keys()
        return is_like and all(equal(given[key], value) for key, value in expected.items())
    if isinstance(expected, float) and isinstance(given, (int, float)):
        near = TOLERANCE * max(1.0, abs(expected))
        is_near = expected - near <= given <= expected + near  # an int may be beyond all floats
        return is_near or given == expected
    return bool(given == expected)


def _key(example: Example) -> str:
    """Two rows may share a prompt, and differ in what is right."""
    return repr((example.prompt, example.reference))


def _tests(row: Row) -> tuple[Test, ...]:
    try:
        tests = tuple(_test(test) for test in row["tests"])
        forms = {test.call.function if test.call else "" for test in tests}
        if len(forms) != 1 or not {"prompt", "solution"} <= row.keys():
            raise ValueError('"prompt", "solution" and tests of one form are needed')
        return tests
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is no problem ({type(error).__name__}: {error})"
        raise bad_row(row, rule, "see docs/sandbox.md for the form of a row") from None


def _test(row: Mapping[str, Any]) -> Test:
    if row.get("call") is None:  # a table of parquet has every column in every row
        return Test(str(row["stdin"]), None, str(row["stdout"]))
    if not str(row["call"]).isidentifier() or not isinstance(row["args"], list):
        raise ValueError('"call" must be a name, and "args" a list')
    return Test("", Call(row["call"], tuple(row["args"])), row["returns"])
