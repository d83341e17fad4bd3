"""Word problems with a calculator: the arithmetic task's, with larger numbers and a tool to ask.

    prompt   Tom has 118 apples. Tom on Monday buys 57 more. How many apples does Tom have? …
    model     Monday buys 57 more: <<118+57>>
    tool      = 175
    model    . #### 175

Takes what arithmetic.py takes. A call is an expression in << >>, and ends the model's turn; the
tool's answer stands right after it, with mask 0. It is computed exactly by countdown's parser,
never as code; what is no expression is answered with " = error". A turn without a call is the last.
"""

from fractions import Fraction

from minirl.records import Answer, Example, StopReason
from minirl.tasks.answers import HASHES, final_number
from minirl.tasks.arithmetic import Arithmetic, Problem, Stream, draw_problem
from minirl.tasks.countdown import evaluate

OPEN, CLOSE = "<<", ">>"
INSTRUCTION = (
    "You have a calculator: write a sum in << >>, such as <<12*3>>, and the result is put after "
    "it. Put your final answer after ####."
)
DIGITS = 6  # after the point


class Calculator(Arithmetic):
    """Its prompts are chat messages."""

    turn_stop = (CLOSE,)
    options = {  # noqa: RUF012
        **Arithmetic.options,
        "max_start": 200,
        "max_amount": 99,
        "max_total": 999,
        "instruction": INSTRUCTION,
    }

    def _drawn(self, stream: Stream, index: int) -> Example:
        problem = draw_problem(self.seed, stream, index, difficulty=self.difficulty)
        text = f"{problem.prompt}\n{self.options['instruction']}".rstrip()
        prompt = ({"role": "user", "content": text},)
        return Example(prompt, str(problem.result), worked(problem))

    def reply(self, example: Example, turns: tuple[str, ...]) -> str | None:
        before, call, _ = turns[-1].rpartition(CLOSE)
        if not call:
            return None
        return f" = {result_of(before.rpartition(OPEN)[2])}"

    def reward(self, example: Example, answer: Answer) -> float:
        """1 if the model ended its last turn and the number after its #### is right."""
        is_said = HASHES in answer.text and answer.stop is StopReason.STOP
        return float(is_said and final_number(answer.text) == Fraction(example.reference))


def result_of(expression: str) -> str:
    found = evaluate(expression.strip())
    if found is None:
        return "error"
    value = found[0]
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.{DIGITS}f}".rstrip("0").rstrip(".")


def worked(problem: Problem) -> str:
    """As the arithmetic task's, every sum a call with its result."""
    total, text = problem.start, ""
    for step in problem.steps:
        text += f" {step.clause}: {OPEN}{step.sum(total)}{CLOSE} = {step.apply(total)}."
        total = step.apply(total)
    return f"{text} {HASHES} {total}"
