"""Competition mathematics: the answer is an expression, compared by value (math-verify, sympy).

An answer is right when the model ended it and math-verify finds the expression in its last box
equal to the reference; without a box, the expression that math-verify itself finds in the text.
math-verify bounds its time by SIGALRM, in the main thread: a comparison that takes too long raises.
Leaves out: proofs, and answers with units: these are what the text says.
"""

import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException

from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task
from minirl.tasks.gsm8k import final, instructed, last_box
from minirl.tasks.sources import SourceRow

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
LIMIT_S = 5
MAX_CHARS = 1000  # a longer box is wrong: no reference comes near it, and to parse it costs
# sympy imports much of itself at the first comparison: do that outside of any time limit.
verify(*(parse(text, parsing_timeout=60) for text in ("$x+x$", "$2x$")), timeout_seconds=60)


class Mathematics(Task):
    data = "DigitalLearningGmbH/MATH-lighteval"
    prompt_column, reference_column = "problem", "solution"
    options = {"instruction": INSTRUCTION}  # noqa: RUF012
    solution_form = r"\boxed{{{}}}"

    def example(self, row: SourceRow) -> Example:
        asked = super().example(row)
        prompt, box = instructed(asked, self.options["instruction"]), last_box(asked.reference)
        return Example(prompt, box[1], asked.reference) if box else Example(prompt, asked.reference)

    def reward(self, example: Example, answer: Answer) -> float:
        return float(answer.stop is StopReason.STOP and is_equal(example.reference, answer.text))


def is_equal(reference: str, answer: str) -> bool:
    """Raises where the reference cannot be read, or where the comparison took too long."""
    text = final(answer)
    box = last_box(text)
    if box and (len(box[1]) > MAX_CHARS or _base(box[1]) not in ("", _base(reference))):
        return False
    # x ≤ 3 is right for (-∞, 3], but a point is not for 1 < x < 2.
    is_interval = any(mark in reference for mark in ("[", "]", r"\infty", r"\cup"))
    try:
        wanted = _parsed(reference)
        given = _parsed(box[1]) if box else _parsed(text[-MAX_CHARS:], is_text=True)
        if not wanted:
            raise ValueError(f"the reference {reference!r} cannot be read as mathematics")
        options = {"allow_set_relation_comp": is_interval, "timeout_seconds": LIMIT_S}
        return bool(given) and verify(list(wanted), list(given), raise_on_error=True, **options)
    except TimeoutException:  # not an Exception by its class: it would take the verifier down
        raise TimeoutError(f"math-verify took longer than {LIMIT_S} s") from None


@lru_cache(maxsize=1024)
def _parsed(latex: str, is_text: bool = False) -> tuple[Any, ...]:
    """What math-verify makes of it. Empty: nothing that it can read."""
    text = latex if is_text else rf"\boxed{{{plain(latex)}}}"
    return tuple(parse(text, parsing_timeout=LIMIT_S, raise_on_error=True))


def plain(latex: str) -> str:
    """What math-verify would stumble over, in words that it knows."""
    latex = re.sub(r"(?:\\ |[\s.])+$", "", latex)
    latex = re.sub(r"\\text\{\s*(-?\d[\d.,/]*)([^{}]*)\}", r"\1\\text{\2}", latex)
    latex = re.sub(r"(?<![\d.}])(\d+) (\d+)/(\d+)(?!\d)", r"\1\\frac{\2}{\3}", latex)
    return re.sub(r"(\d*)\.(\d*)\\overline\{(\d+)\}", _recurring, latex)


def _recurring(match: re.Match[str]) -> str:
    """0.1\\overline{6} as 15/90."""
    once, again = match[1] + match[2], match[3]
    top = int(once + again) - int(once or "0")
    return rf"\frac{{{top}}}{{{(10 ** len(again) - 1) * 10 ** len(match[2])}}}"


def _base(latex: str) -> str:
    """17_8 is written to base 8; "" where no base is written."""
    match = re.fullmatch(r"\s*[\dA-F]+_\{?(\d{1,2})\}?\s*", latex)
    return match[1] if match else ""
