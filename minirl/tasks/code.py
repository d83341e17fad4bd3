"""Programming problems, graded by unit tests that run in the sandbox.

The data (`tasks.data`: a folder with `train.jsonl` and `test.jsonl`, or any other source) has one
problem a row:

    {"prompt": "Read two numbers and print their sum.",
     "tests": [{"stdin": "1 2\\n", "stdout": "3\\n"}],
     "solution": "a, b = map(int, input().split())\\nprint(a + b)"}
    {"prompt": "Write add(a, b).",
     "tests": [{"call": "add", "args": [1, 2], "returns": 3}], "solution": "def add(a, b): …"}

Without one, a few built-in problems. An answer's code is its last ```python block. A test in stdin
form passes if the program ends without an error and prints the same lines, but for spaces at line
ends and empty lines at the end. One in function form passes if what the function returns equals the
expected value as JSON (a tuple is a list, a key is a text), floats to 1e-6. The reward is by
the option `reward`: 1 for "all" tests passed, or the "share" of them.

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
from minirl.tasks import TEST, TRAIN, Task, need
from minirl.tasks.sandbox import Call, Limits, Outcome, run, why_not
from minirl.tasks.sources import Row, bad_row, file_rows

BUILT_IN = Path(__file__).with_name("code_problems.jsonl")

BLOCK = re.compile(r"^[ \t]*```(?:python|py|Python|python3)[ \t]*\r?\n(.*?)^[ \t]*```", re.M | re.S)
INSTRUCTION = "Write the solution in Python, in one ```python block."
TOLERANCE = 1e-6
WALL_OVER_CPU = 4.0  # a machine that is busy with other things is not the answer's fault
SHARE_OF_TIMEOUT = 0.8  # of tasks.timeout_s: a slow answer is wrong, and its verifier stays
MAX_TESTS = 1000


@dataclass(frozen=True)
class Test:
    stdin: str
    call: Call | None
    expected: Any  # the text of stdout, or the value that the call returns


@dataclass(frozen=True)
class Problem:
    example: Example  # its reference is the solution
    tests: tuple[Test, ...]


class Code(Task):
    options = {"reward": "all", "test_s": 2.0, "unsafe": False}  # noqa: RUF012

    def __init__(self, config: TasksConfig, seed: int = 0):
        super().__init__(config, seed)
        kind, test_s = self.options["reward"], self.options["test_s"]
        need(self, "reward", kind in ("all", "share"), "must be all or share")
        need(self, "test_s", 0 < test_s <= 3600, "must be above 0 and at most 3600 seconds")
        why = why_not()
        if why and not self.options["unsafe"]:
            rule = f"code cannot be sandboxed here ({why})"
            remedy = "see docs/sandbox.md; true runs code that can use every file that you can"
            raise RecipeError("tasks.options.unsafe", False, rule, remedy)
        limits = Limits(cpu_s=math.ceil(test_s), wall_s=WALL_OVER_CPU * test_s)
        self._limits = replace(limits, max_abi=0) if why else limits
        self._total_s = SHARE_OF_TIMEOUT * config.timeout_s
        problems = [_problem(row) for split in (TRAIN, TEST) for row in self.load(split)]
        self._tests = {_key(problem.example): problem.tests for problem in problems}

    def load(self, split: str) -> Iterable[Row]:
        if self.config.data:
            return self.source.rows(split)
        return [row for row in file_rows(BUILT_IN) if row["split"] == split]

    def example(self, row: Row) -> Example:
        """Without the tests: they may be large, and each verifier has read them."""
        return _problem(row).example

    def reward(self, example: Example, answer: Answer) -> float:
        code = extract(answer.text)
        if answer.stop is not StopReason.STOP or code is None:
            return 0.0
        tests, end = self._tests[_key(example)], time.monotonic() + self._total_s
        num_passed = 0
        for test in tests:
            is_passed = self._passes(test, code, end - time.monotonic())
            num_passed += is_passed
            if not is_passed and self.options["reward"] == "all":
                return 0.0
        return num_passed / len(tests)

    def _passes(self, test: Test, code: str, left_s: float) -> bool:
        if left_s <= 0:
            return False
        limits = replace(self._limits, wall_s=min(self._limits.wall_s, left_s))
        return passes(test, run(code, test.stdin, test.call, limits))

    def solution(self, example: Example) -> str:
        return f"```python\n{example.reference}\n```"


def extract(text: str) -> str | None:
    """The last ```python block that is closed, or None."""
    blocks = BLOCK.findall(text)
    return blocks[-1] if blocks else None


def passes(test: Test, outcome: Outcome) -> bool:
    if outcome.status:
        return False
    if test.call is None:
        return _lines(outcome.output.decode(errors="replace")) == _lines(test.expected)
    try:
        returned = json.loads(outcome.output)
        return equal(returned, test.expected)
    except (ValueError, RecursionError):  # no JSON, or not the JSON of a value that is expected
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def equal(given: Any, expected: Any) -> bool:
    """As Python has it, but that a float need only be near. Both are plain JSON values."""
    if isinstance(expected, list):
        is_like = isinstance(given, list) and len(given) == len(expected)
        return is_like and all(map(equal, given, expected))
    if isinstance(expected, dict):
        is_like = isinstance(given, dict) and given.keys() == expected.keys()
        return is_like and all(equal(given[key], value) for key, value in expected.items())
    if isinstance(expected, float) and isinstance(given, (int, float)):
        try:
            return math.isclose(given, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        except OverflowError:  # an integer beyond all floats
            return False
    return bool(given == expected)


# -- data


def _problem(row: Row) -> Problem:
    try:
        tests = tuple(_test(test) for test in row["tests"])
        if not 1 <= len(tests) <= MAX_TESTS:
            raise ValueError(f"{len(tests)} tests, where 1 to {MAX_TESTS} are allowed")
        forms = {test.call.function if test.call else "" for test in tests}
        if len(forms) != 1:
            raise ValueError("tests of several forms or functions")
        function = forms.pop()
        how = f"Write a function `{function}`." if function else "Read stdin and print to stdout."
        message = {"role": "user", "content": f"{row['prompt']}\n{how} {INSTRUCTION}"}
        return Problem(Example((message,), row["solution"]), tests)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is no problem ({type(error).__name__}: {error})"
        remedy = '"prompt", "tests" and "solution" are needed; see docs/sandbox.md'
        raise bad_row(row, rule, remedy) from None


def _key(example: Example) -> str:
    """Two rows may share a prompt, and differ in what is right."""
    return repr((example.prompt, example.reference))


def _test(row: Mapping[str, Any]) -> Test:
    if row.get("call") is None:  # a table of parquet has every column in every row
        return Test(str(row["stdin"]), None, str(row["stdout"]))
    if not str(row["call"]).isidentifier() or not isinstance(row["args"], list):
        raise ValueError('"call" must be a name, and "args" a list')
    return Test("", Call(row["call"], tuple(row["args"])), row["returns"])
