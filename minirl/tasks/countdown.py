"""Countdown: reach a target with given numbers and + - * /.

    prompt   Using the numbers 3, 5 and 7, each exactly once, write an expression that equals 56. …
    answer   <answer>(3+5)*7</answer>

Takes a seed, gives examples that have a solution by construction, and rewards. The expression in
the last tags is parsed and computed exactly, never run as code; what follows a "=" is not read.
Leaves out: powers, signs before a number, numbers made of digits put together.
"""

import ast
import json
import operator
import random
import re
from fractions import Fraction

from minirl.records import Answer, Example, StopReason
from minirl.tasks import Generated
from minirl.tasks.gsm8k import final
from minirl.tasks.sources import hash_of

QUESTION = (
    "Using the numbers {} and {}, each exactly once, and + - * / and parentheses, write an "
    "expression that equals {}. Put it in <answer> </answer> tags, such as "
    "<answer>(1 + 2) / 3</answer>."
)
APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
OPERATIONS = dict(zip((ast.Add, ast.Sub, ast.Mult, ast.Div), APPLY.values(), strict=True))


class Countdown(Generated):
    def draw(self, index: int, is_test: bool) -> Example:
        """Numbers are combined at random until a target comes out."""
        rng = random.Random(f"countdown/{self.seed}/{is_test}/{index}")
        size = rng.randint(3, 4)
        while True:
            numbers = [rng.randint(1, 50) for _ in range(size)]
            target, solution = _combined(rng, numbers)
            # By numbers and target, in no order: the same problem is never on both sides.
            is_held_out = hash_of(f"{sorted(numbers)}={target}") % 8 == 0
            if target.denominator == 1 and 1 <= target <= 100 and is_held_out == is_test:
                known = {"numbers": numbers, "target": int(target), "solution": solution}
                text = QUESTION.format(", ".join(map(str, numbers[:-1])), numbers[-1], target)
                return Example(({"role": "user", "content": text},), json.dumps(known))

    def reward(self, example: Example, answer: Answer) -> float:
        tagged = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", final(answer.text), re.S)
        said = tagged[-1].translate(str.maketrans("×÷−–", "*/--")) if tagged else ""
        known = json.loads(example.reference)
        found = evaluate(said.partition("=")[0])
        is_right = found == (known["target"], sorted(known["numbers"]))
        return float(is_right and answer.stop is StopReason.STOP)

    def solution(self, example: Example) -> str:
        return f"<answer>{json.loads(example.reference)['solution']}</answer>"


def _combined(rng: random.Random, numbers: list[int]) -> tuple[Fraction, str]:
    """All numbers joined, two at a time: a value and the expression that has it."""
    parts = [(Fraction(number), str(number)) for number in numbers]
    while len(parts) > 1:
        a, b = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        symbol = rng.choice("+-*/" if b[0] else "+-*")
        parts.append((APPLY[symbol](a[0], b[0]), f"({a[1]}{symbol}{b[1]})"))
    return parts[0]


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression and the numbers in it; None where it is none."""
    if len(text) > 200 or re.search(r"[^\d+\-*/() \t]|\*\*|//", text):
        return None
    text = re.sub(r"(?<!\d)0+(?=\d)", "", text.strip())  # 07 is 7 here, and no Python
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return value, sorted(map(int, re.findall(r"\d+", text)))


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp):
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    raise ValueError("neither a number nor an operation")
