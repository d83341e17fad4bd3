"""Word problems with a calculator: the arithmetic task's, with larger numbers and a tool.

    prompt   Tom has 118 apples. Tom on Monday buys 57 more. How many apples does Tom have? …
    model     Monday buys 57 more: <<118+57>>
    tool      = 175
    model    . #### 175

A call is an expression in << >>, and ends the model's turn; the tool's answer stands right after
it, with mask 0. Countdown's parser computes it exactly, never as code; anything else than an
expression is answered with " = error". A turn without a call is the last.
"""

from fractions import Fraction

from minirl.records import Answer, Example, StopReason
from minirl.tasks.answers import HASHES, final_number
from minirl.tasks.arithmetic import Arithmetic, Limits, Problem
from minirl.tasks.countdown import evaluate

OPEN, CLOSE = "<<", ">>"
INSTRUCTION = (
    "You have a calculator: write a sum in << >>, such as <<12*3>>, and the result is put after "
    "it. Put your final answer after ####."
)


class Calculator(Arithmetic):
    """Its prompts are chat messages."""

    turn_stop = (CLOSE,)
    limits = Limits(max_start=200, max_amount=99, max_total=999)

    def asked(self, problem: Problem) -> Example:
        total, worked = problem.start, ""
        for step in problem.steps:
            left, total = step.equation(total)
            worked += f" {step.clause}: {OPEN}{left}{CLOSE} = {total}."
        message = {"role": "user", "content": f"{problem.prompt}\n{INSTRUCTION}"}
        return Example((message,), str(total), f"{worked} {HASHES} {total}")

    def reply(self, example: Example, turns: tuple[str, ...]) -> str | None:
        before, call, _ = turns[-1].rpartition(CLOSE)
        return f" = {result_of(before.rpartition(OPEN)[2])}" if call else None

    def reward(self, example: Example, answer: Answer) -> float:
        """1 if the model ended its last turn and the number after its #### is right."""
        is_said = HASHES in answer.text and answer.stop is StopReason.STOP
        return float(is_said and final_number(answer.text) == Fraction(example.reference))


def result_of(expression: str) -> str:
    found = evaluate(expression.strip())
    if found is None:
        return "error"
    value = found[0]
    return str(value) if value.denominator == 1 else f"{float(value):.6f}".rstrip("0").rstrip(".")
