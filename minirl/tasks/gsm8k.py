"""GSM8K: grade-school word problems (openai/gsm8k, MIT licence), from the hub or one's own data.

An answer is right when the model ended it and its number equals the reference's, exactly: 12, 12.0,
24/2 and $12.00 are one number, 12 and 12.01 are two. Which number an answer gives, answers.py says:
that at the last mark ("####" or \\boxed{…}), or without a mark the last one. An answer that gives
none is wrong. Units are not read: "50 %", "50 apples" and "50" are one answer, and so is "$50".
"""

import re

from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task
from minirl.tasks.answers import HASHES, final_number, written
from minirl.tasks.sources import Row, bad_row

INSTRUCTION = "Please reason step by step, and put your final answer after ####."


class Gsm8k(Task):
    data = "openai/gsm8k:main"
    prompt_column, reference_column = "question", "answer"
    options = {"instruction": INSTRUCTION}  # noqa: RUF012

    def example(self, row: Row) -> Example:
        asked = super().example(row)
        number = final_number(asked.reference)
        if number is None:
            rule = f'has no number in its column "{self.reference_column}"'
            raise bad_row(row, rule, "end references with one, such as #### 12")
        worked = re.sub(r"<<.*?>>", "", asked.reference)  # what a calculator would be asked
        return Example(instructed(asked, self.options["instruction"]), written(number), worked)

    def reward(self, example: Example, answer: Answer) -> float:
        if answer.stop is not StopReason.STOP:
            return 0.0
        given = final_number(answer.text)
        return float(given is not None and given == final_number(example.reference))

    def solution(self, example: Example) -> str:
        return f"{HASHES} {example.reference}"


def instructed(example: Example, instruction: str) -> tuple[dict[str, str], ...]:
    """The prompt as chat messages, the instruction at the end of the last."""
    prompt = example.prompt
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    if not instruction:
        return messages
    last = {**messages[-1], "content": f"{messages[-1]['content']}\n{instruction}"}
    return (*messages[:-1], last)
