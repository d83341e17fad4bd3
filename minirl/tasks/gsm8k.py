"""GSM8K: grade-school word problems (openai/gsm8k, MIT licence), from the hub or a local folder.

A local folder holds `train.jsonl` and `test.jsonl`, one object a line with `question` and `answer`.
An answer is right when its number equals the reference's. The number is, in this order: what stands
after the last "####", what stands in the last \\boxed{…}, the last number of the text.
"""

import json
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path

from minirl.config import TasksConfig
from minirl.errors import RecipeError
from minirl.records import Answer, Example, StopReason

HUB_NAME = "openai/gsm8k"
INSTRUCTION = "Please reason step by step, and put your final answer after ####."
# A dash after a digit or a word is no sign ("5-10"), and commas join only groups of three digits.
SIGN = r"(?:(?<![\w)])[-−]\\?\$?)?"
WHOLE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
NUMBER = re.compile(rf"{SIGN}(?:{WHOLE}(?:\.\d+)?|(?<![\w.])\.\d+)")


class Gsm8k:
    def __init__(self, config: TasksConfig, seed: int = 0):
        self._train = _load(config.data, "train")
        self._test = _load(config.data, "test")
        self.num_train = len(self._train)

    def train(self, index: int) -> Example:
        return _example(self._train[index])

    def heldout(self, count: int) -> Sequence[Example]:
        return [_example(row) for row in self._test[:count]]

    def reward(self, example: Example, answer: Answer) -> float:
        if answer.stop is not StopReason.STOP:
            return 0.0
        given = final_number(answer.text)
        return float(given is not None and given == Decimal(example.reference))

    def solution(self, example: Example) -> str:
        return f"#### {example.reference}"


def _example(row: dict[str, str]) -> Example:
    reference = final_number(row["answer"])
    assert reference is not None, row
    message = {"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}
    worked = re.sub(r"<<.*?>>", "", row["answer"])  # what a calculator would be asked
    return Example((message,), str(reference), worked)


def final_number(text: str) -> Decimal | None:
    """The number that an answer gives, or None."""
    text = text.replace("{,}", ",")  # LaTeX's comma without a space
    if "####" in text:
        numbers = NUMBER.findall(text.rpartition("####")[2])
        return _decimal(numbers[0]) if numbers else None
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    numbers = NUMBER.findall(boxed[-1] if boxed else text)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(re.sub(r"[,$\\]", "", text).replace("−", "-"))
    except InvalidOperation:
        return None


def _load(source: str, split: str) -> list[dict[str, str]]:
    folder = Path(source)
    if source and folder.is_dir():
        path = folder / f"{split}.jsonl"
        if not path.is_file():
            raise RecipeError("tasks.data", source, f"has no {path.name}", "see tasks/gsm8k.py")
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    try:
        from datasets import load_dataset

        return list(load_dataset(source or HUB_NAME, "main", split=split))
    except Exception as error:  # the hub library raises a dozen kinds of its own
        raise RecipeError(
            "tasks.data",
            source or HUB_NAME,
            f"is no local folder and cannot be had from the hub ({type(error).__name__})",
            "give a folder with train.jsonl and test.jsonl",
        ) from None
