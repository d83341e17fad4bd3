"""Countdown: reach a target with given numbers and + - * /.

    prompt   Using the numbers 3, 5 and 7, each exactly once, write an expression that equals 56. …
    answer   <answer>(3+5)*7</answer>

Takes a seed, gives examples that have a solution by construction, and rewards. The expression is
what stands in the last <answer>…</answer>, else in the last box, else on the last line; what
follows a "=" there is not read. It is parsed and computed exactly, never run as code. It is right
when its value is the target and it uses each number exactly once.

Leaves out: powers, signs before a number, numbers made of digits put together.
"""

import ast
import json
import operator
import random
import re
from fractions import Fraction

from minirl.config import TasksConfig
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Generated, need
from minirl.tasks.answers import final, last_box
from minirl.tasks.sources import is_held_out

QUESTION = (
    "Using the numbers {} and {}, each exactly once, and + - * / and parentheses, write an "
    "expression that equals {}. Put it in <answer> </answer> tags, such as "
    "<answer>(1 + 2) / 3</answer>."
)
MAX_CHARS = 200  # of an expression
MAX_NUMBER, MAX_TARGET = 50, 100
HELDOUT_SHARE = 8
APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
SYMBOLS: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
Part = tuple[Fraction, str]  # a value and the expression that has it
_SPELLINGS = {"×": "*", "÷": "/", "−": "-", "–": "-", "\\times": "*", "\\cdot": "*", "\\div": "/"}


class Countdown(Generated):
    options = {"min_numbers": 3, "max_numbers": 4}  # noqa: RUF012

    def __init__(self, config: TasksConfig, seed: int = 0):
        super().__init__(config, seed)
        low, high = self.options["min_numbers"], self.options["max_numbers"]
        need(self, "min_numbers", 2 <= low <= high, "must be between 2 and max_numbers")
        need(self, "max_numbers", high <= 10, "must be at most 10")

    def draw(self, index: int, is_test: bool) -> Example:
        """Numbers are combined at random until a target comes out."""
        rng = random.Random(f"countdown/{self.seed}/{is_test}/{index}")
        size = rng.randint(self.options["min_numbers"], self.options["max_numbers"])
        while True:
            numbers = [rng.randint(1, MAX_NUMBER) for _ in range(size)]
            target, solution = _combined(rng, [(Fraction(n), str(n)) for n in numbers])
            if target.denominator != 1 or not 1 <= target <= MAX_TARGET:
                continue
            # By numbers and target, in no order: the same problem is never on both sides.
            if is_held_out(f"{sorted(numbers)}={target}", HELDOUT_SHARE) == is_test:
                known = {"numbers": numbers, "target": int(target), "solution": solution}
                text = QUESTION.format(", ".join(map(str, numbers[:-1])), numbers[-1], target)
                return Example(({"role": "user", "content": text},), json.dumps(known))

    def reward(self, example: Example, answer: Answer) -> float:
        known, parsed = json.loads(example.reference), evaluate(expression_of(answer.text))
        if answer.stop is not StopReason.STOP or parsed is None:
            return 0.0
        is_used = sorted(parsed[1]) == sorted(known["numbers"])
        return float(is_used and parsed[0] == known["target"])

    def solution(self, example: Example) -> str:
        return f"<answer>{json.loads(example.reference)['solution']}</answer>"


def _combined(rng: random.Random, parts: list[Part]) -> Part:
    """All numbers joined, two at a time."""
    while len(parts) > 1:
        a, b = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        symbol = rng.choice("+-*/" if b[0] else "+-*")
        parts.append((APPLY[symbol](a[0], b[0]), f"({a[1]}{symbol}{b[1]})"))
    return parts[0]


def expression_of(text: str) -> str:
    """What an answer gives as its expression."""
    text = final(text)
    tagged = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
    box = last_box(text)
    given = tagged[-1] if tagged else box[1] if box else text.rstrip().rpartition("\n")[2]
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
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in SYMBOLS:
            return APPLY[SYMBOLS[type(kind)]](_value(left), _value(right))
    raise ValueError("neither a number nor one of the four operations")
