"""GSM8K: grade-school word problems (openai/gsm8k, MIT licence), from the hub or one's own data.

An answer is right when the model ended it and its number equals the reference's, exactly: 12, 12.0,
24/2 and $12.00 are one number, 12 and 12.01 are two. answers.py says which number an answer gives:
the one at the last mark ("####" or \\boxed{…}), or without a mark the last one. Units are not read.
"""

import re

from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task
from minirl.tasks.answers import HASHES, final_number
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
            rule = f'no number in its column "{self.reference_column}"'
            raise bad_row(row, rule, "end references with one, such as #### 12")
        worked = re.sub(r"<<.*?>>", "", asked.reference)  # the data's calculator annotations
        return Example(instructed(asked, self.options["instruction"]), str(number), worked)

    def reward(self, example: Example, answer: Answer) -> float:
        given = final_number(answer.text)
        is_right = given is not None and given == final_number(example.reference)
        return float(is_right and answer.stop is StopReason.STOP)

    def solution(self, example: Example) -> str:
        return f"{HASHES} {example.reference}"


def instructed(example: Example, instruction: str) -> tuple[dict[str, str], ...]:
    """The prompt as chat messages, with the instruction at the end of the last."""
    prompt = example.prompt
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    last = {**messages[-1], "content": f"{messages[-1]['content']}\n{instruction}".strip()}
    return (*messages[:-1], last)
