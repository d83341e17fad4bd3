"""Programming problems, graded by unit tests that run in the sandbox (docs/sandbox.md).

An answer's code is its last ```python block; it is right if all tests pass: if the program prints
the same lines, or if its function returns an equal value. Only inputs go into the sandbox; outputs
are compared here, as text or plain JSON. A sandbox that fails raises: it is never a 0.
Leaves out: how code is run (sandbox.py, jail.py), packages beside the standard library.
"""

import json
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minirl.config import TasksConfig
from minirl.errors import RecipeError
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task
from minirl.tasks.sandbox import Call, Limits, Outcome, run, why_not
from minirl.tasks.sources import SourceRow, as_rows

BLOCK = re.compile(r"^[ \t]*```(?:python|py|Python|python3)[ \t]*\r?\n(.*?)^[ \t]*```", re.M | re.S)
INSTRUCTION = "Write the solution in Python, in one ```python block."


class Test(NamedTuple):
    stdin: str
    call: Call | None
    expected: Any  # the text of stdout, or the value that the call returns


class Code(Task):
    data = str(Path(__file__).with_name("code_problems"))
    options = {"test_s": 2.0}  # noqa: RUF012
    solution_form = "```python\n{}\n```"

    def __init__(self, config: TasksConfig, seed: int = 0):
        super().__init__(config, seed)
        test_s = self.options["test_s"]
        self.check_option("test_s", 0 < test_s <= 3600, "must be above 0 and at most 3600 seconds")
        if why := why_not():
            rule = f"code cannot be sandboxed here ({why})"
            raise RecipeError("tasks.kind", "code", rule, "see docs/sandbox.md")
        # More wall time than CPU time: a busy machine is not the answer's fault.
        self.limits = Limits(cpu_s=math.ceil(test_s), wall_s=4 * test_s)
        # Not in the examples: tests may be large, and each verifier reads them itself.
        rows = (row for split in ("train", "test") for row in as_rows(self.load(split), split))
        self.tests = {repr(self.example(row)): _tests(row) for row in rows}

    def example(self, row: SourceRow) -> Example:
        call = _tests(row)[0].call
        how = f"Write a function `{call.function}`." if call else "Read stdin and print to stdout."
        message = {"role": "user", "content": f"{row['prompt']}\n{how} {INSTRUCTION}"}
        return Example((message,), row["solution"])

    def reward(self, example: Example, answer: Answer) -> float:
        blocks = BLOCK.findall(answer.text)
        if answer.stop is not StopReason.STOP or not blocks:
            return 0.0
        # A slow answer is wrong before tasks.timeout_s costs its verifier. Where it is slow only in
        # all its tests together, nothing is known of the later ones, and the reward fails (rule 7).
        left_s = 0.8 * self.config.timeout_s
        test_s = min(self.limits.wall_s, left_s)
        for test in self.tests[repr(example)]:
            start, limits = time.monotonic(), self.limits._replace(wall_s=min(test_s, left_s))
            outcome = run(blocks[-1], test.stdin, test.call, limits)
            if outcome.status == "wall time" and left_s < test_s:
                raise TimeoutError("all tests together take too long; raise tasks.timeout_s")
            if not passes(test, outcome):
                return 0.0
            left_s -= time.monotonic() - start
        return 1.0


def passes(test: Test, outcome: Outcome) -> bool:
    if outcome.status:
        return False
    if test.call is None:
        texts = outcome.output.decode(errors="replace"), test.expected
        printed, wanted = ([line.rstrip() for line in t.rstrip().split("\n")] for t in texts)
        return printed == wanted
    try:
        return equal(json.loads(outcome.output), test.expected)
    except (ValueError, RecursionError):  # no JSON, or not the JSON of a value that is expected
        return False


def equal(given: Any, expected: Any) -> bool:
    """As Python has it, but a float need only be near. Both are plain JSON values."""
    if isinstance(expected, list) and isinstance(given, list):
        return len(given) == len(expected) and all(map(equal, given, expected))
    if isinstance(expected, dict) and isinstance(given, dict):
        return given.keys() == expected.keys() and all(equal(given[k], expected[k]) for k in given)
    if isinstance(expected, float) and isinstance(given, (int, float)):
        near = 1e-6 * max(1.0, abs(expected))  # not isclose: an int may be beyond all floats
        return given == expected or expected - near <= given <= expected + near
    return bool(given == expected)


def _tests(row: SourceRow) -> tuple[Test, ...]:
    try:
        tests = tuple(_test(test) for test in row["tests"])
        forms = {test.call.function if test.call else "" for test in tests}
        if len(forms) != 1 or not {"prompt", "solution"} <= row.keys():
            raise ValueError('"prompt", "solution" and tests of one form are needed')
        return tests
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is no problem ({type(error).__name__}: {error})"
        raise row.error(rule, "see docs/sandbox.md for the form of a row") from None


def _test(row: Mapping[str, Any]) -> Test:
    if row.get("call") is None:  # a table of parquet has every column in every row
        return Test(str(row["stdin"]), None, str(row["stdout"]))
    if not str(row["call"]).isidentifier() or not isinstance(row["args"], list):
        raise ValueError('"call" must be a name, and "args" a list')
    return Test("", Call(row["call"], tuple(row["args"])), row["returns"])
