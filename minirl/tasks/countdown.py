"""Countdown: reach a target with given numbers and + - * /.

    prompt   Using the numbers 3, 5 and 7, each exactly once, write an expression that equals 56. …
    answer   <answer>(3+5)*7</answer>

Takes a seed (or rows with the numbers and the target), gives examples that have a solution by
construction, and rewards. The expression is what stands in the last <answer>…</answer>, else in the
last box, else on the last line; what follows a "=" there is not read. It is parsed, and computed
exactly, never run as code. It is right when its value is the target and it uses the
numbers as asked: each exactly once, or with use = "some" each at most once.

Leaves out: powers, signs before a number, numbers made of digits put together.
"""

import ast
import json
import operator
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache

from minirl.config import TasksConfig
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task, need
from minirl.tasks.answers import final, last_box
from minirl.tasks.sources import Row, bad_row, is_held_out

MAX_CHARS = 200  # of an expression
MAX_NUMBERS = 6  # a solution is found by trying, and 7 would take minutes
HELDOUT_SHARE = 8
OPERATORS = "+-*/"
APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
SYMBOLS: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
Part = tuple[Fraction, str]  # a value and the expression that has it
_SPELLINGS = {"×": "*", "÷": "/", "−": "-", "–": "-", "\\times": "*", "\\cdot": "*", "\\div": "/"}


class Countdown(Task):
    prompt_column, reference_column = "nums", "target"
    options = {  # noqa: RUF012
        "min_numbers": 3,
        "max_numbers": 4,
        "max_number": 50,
        "max_target": 100,
        "use": "all",
    }

    def __init__(self, config: TasksConfig, seed: int = 0):
        super().__init__(config, seed)
        given = self.options
        low, high = given["min_numbers"], given["max_numbers"]
        need(self, "min_numbers", 2 <= low <= high, "must be between 2 and max_numbers")
        need(self, "max_numbers", high <= MAX_NUMBERS, f"must be at most {MAX_NUMBERS}")
        need(self, "max_number", 2 <= given["max_number"] <= 10**6, "must be between 2 and 1e6")
        need(self, "max_target", 2 <= given["max_target"] <= 10**6, "must be between 2 and 1e6")
        need(self, "use", given["use"] in ("all", "some"), 'must be "all" or "some"')

    @property
    def num_train(self) -> int:
        return super().num_train if self.config.data else 2**31

    def train(self, index: int) -> Example:
        return super().train(index) if self.config.data else self._drawn(index, is_test=False)

    def heldout(self, count: int) -> Sequence[Example]:
        if self.config.data:
            return super().heldout(count)
        found: dict[str, Example] = {}
        for index in range(20 * count + 100):  # few numbers allow few problems
            if len(found) == count:
                break
            example = self._drawn(index, is_test=True)
            found.setdefault(example.reference, example)
        return list(found.values())

    def example(self, row: Row) -> Example:
        numbers, target = row.get(self.prompt_column), row.get(self.reference_column)
        if isinstance(numbers, str):  # a cell of a CSV file
            numbers = [int(n) for n in re.findall(r"\d+", numbers)]
        listed = numbers if isinstance(numbers, list) else []
        if not 2 <= len(listed) <= MAX_NUMBERS or not all(type(n) is int for n in listed):
            rule = f'needs 2 to {MAX_NUMBERS} whole numbers in its column "{self.prompt_column}"'
            raise bad_row(row, rule, "or name another in tasks.prompt_column")
        if not str(target).isdigit():
            rule = f'needs a whole number in its column "{self.reference_column}"'
            raise bad_row(row, rule, "or name another in tasks.reference_column")
        return self._asked(tuple(listed), int(str(target)))

    def reward(self, example: Example, answer: Answer) -> float:
        known = json.loads(example.reference)
        parsed = evaluate(expression_of(answer.text))
        if answer.stop is not StopReason.STOP or parsed is None or parsed[0] != known["target"]:
            return 0.0
        used, given = Counter(parsed[1]), Counter(known["numbers"])
        return float(used == given if self.options["use"] == "all" else used <= given)

    def solution(self, example: Example) -> str:
        known = json.loads(example.reference)
        if "solution" in known:
            return f"<answer>{known['solution']}</answer>"
        found = solve(tuple(sorted(known["numbers"])), known["target"], self.options["use"])
        return f"<answer>{found}</answer>"

    def _asked(self, numbers: tuple[int, ...], target: int, solution: str = "") -> Example:
        listed = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
        often = "exactly once" if self.options["use"] == "all" else "at most once"
        text = (
            f"Using the numbers {listed}, each {often}, and + - * / and parentheses, write an "
            f"expression that equals {target}. Put it in <answer> </answer> tags, such as "
            "<answer>(1 + 2) / 3</answer>."
        )
        known = {"numbers": numbers, "target": target}
        reference = json.dumps({**known, "solution": solution} if solution else known)
        return Example(({"role": "user", "content": text},), reference)

    def _drawn(self, index: int, is_test: bool) -> Example:
        """The same at every call. Numbers are combined at random until a target comes out."""
        given = self.options
        rng = random.Random(f"countdown/{self.seed}/{is_test}/{index}")
        size = rng.randint(given["min_numbers"], given["max_numbers"])
        while True:
            numbers = tuple(rng.randint(1, given["max_number"]) for _ in range(size))
            target, solution = _combined(rng, [(Fraction(n), str(n)) for n in numbers])
            if target.denominator != 1 or not 1 <= target <= given["max_target"]:
                continue
            # By numbers and target, in no order: the same problem is never on both sides.
            if is_held_out(f"{sorted(numbers)}={target}", HELDOUT_SHARE) == is_test:
                return self._asked(numbers, int(target), solution)


def _combined(rng: random.Random, parts: list[Part]) -> Part:
    """All numbers joined, two at a time."""
    while len(parts) > 1:
        a, b = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        symbol = rng.choice(OPERATORS if b[0] else "+-*")
        parts.append((APPLY[symbol](a[0], b[0]), f"({a[1]}{symbol}{b[1]})"))
    return parts[0]


def expression_of(text: str) -> str:
    """What an answer gives as its expression."""
    text = final(text)
    tagged = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
    lines = [line for line in text.splitlines() if line.strip()]
    box = last_box(text)
    given = tagged[-1] if tagged else box if box is not None else lines[-1] if lines else ""
    for spelling, symbol in _SPELLINGS.items():
        given = given.replace(spelling, symbol)
    return given.partition("=")[0].strip()


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression and the numbers in it; None where it is none."""
    if len(text) > MAX_CHARS or re.search(r"[^\d+\-*/() \t]|\*\*|//", text):
        return None
    text = re.sub(r"(?<!\d)0+(?=\d)", "", text.strip())  # 07 is 7 here, and no Python
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return value, [int(number) for number in re.findall(r"\d+", text)]


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp(left=left, op=kind, right=right):
            return APPLY[SYMBOLS[type(kind)]](_value(left), _value(right))
        case _:
            raise ValueError("neither a number nor one of the four operations")


@lru_cache(maxsize=256)
def solve(numbers: tuple[int, ...], target: int, use: str = "all") -> str | None:
    """An expression that reaches the target, by trying them all; None if there is none."""
    return _search([(Fraction(n), str(n)) for n in numbers], Fraction(target), use, set())


def _search(
    parts: list[Part], target: Fraction, use: str, seen: set[tuple[Fraction, ...]]
) -> str | None:
    for value, text in parts if use == "some" or len(parts) == 1 else ():
        if value == target:
            return text
    key = tuple(sorted(value for value, _ in parts))
    if key in seen:
        return None
    seen.add(key)
    for i, a in enumerate(parts):
        for j, b in enumerate(parts):
            if i != j:
                others = [part for k, part in enumerate(parts) if k not in (i, j)]
                for joined in _joined(a, b, is_first=i < j):
                    if found := _search([*others, joined], target, use, seen):
                        return found
    return None


def _joined(a: Part, b: Part, is_first: bool) -> Iterator[Part]:
    for symbol in OPERATORS:
        if (symbol in "+*" and not is_first) or (symbol == "/" and not b[0]):
            continue
        yield APPLY[symbol](a[0], b[0]), f"({a[1]}{symbol}{b[1]})"
