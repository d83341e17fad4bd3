"""GSM8K: grade-school word problems (openai/gsm8k, MIT licence), from the hub or one's own data.

An answer is right when the model ended it and its number equals the reference's, exactly. That is
the number at the last mark, "####" or \\boxed{…}; without a mark the last one (docs/tasks.md).
Leaves out: units, currencies and per cent signs, which are not read; symbols (math.py).
"""

import re
from fractions import Fraction

from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task
from minirl.tasks.sources import SourceRow

INSTRUCTION = "Please reason step by step, and put your final answer after ####."
HASHES = "####"
SPELLINGS = (  # other ways to write a number, and how it is read
    (r"\\!|\\?[$€£](?=\.?\d)", ""),
    (r"(?<=\d)(?:\{,\}|\\,|[\u2009\u202f\u00a0])(?=\d{3}(?!\d))", ","),
    (r"[−–]", "-"),
    (r"(?<=\d)\s*(?=\\[dt]?frac)|(?<=\d)\s+and\s+(?=\d+/\d)", " "),
    (r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}", r"\1/\2 "),
    (r"(?<=\d)\s*(?:\\times|\\cdot|[×x*])\s*10\s*\^\s*\{?(-?\d{1,3})\}?", r"e\1 "),
)
# A dash after a digit or a word is no sign ("5-10"), and commas join only groups of three digits.
NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])-)?(?<!\d:)"
    r"(?P<first>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?!:\d)"
    r"(?:(?P<power>[eE][-+]?\d{1,3})(?!\w)"
    r"| (?P<over>\d+)/(?P<part>\d+)(?![\d/])|\s?/\s?(?P<under>\d+)(?![\d/]|\.\d))?"
)


class Gsm8k(Task):
    data = "openai/gsm8k:main"
    prompt_column, reference_column = "question", "answer"
    options = {"instruction": INSTRUCTION}  # noqa: RUF012
    solution_form = HASHES + " {}"

    def example(self, row: SourceRow) -> Example:
        asked = super().example(row)
        number = final_number(asked.reference)
        if number is None:
            rule = f'no number in its column "{self.reference_column}"'
            raise row.error(rule, "end references with one, such as #### 12")
        worked = re.sub(r"<<.*?>>", "", asked.reference)  # the data's calculator annotations
        return Example(instructed(asked, self.options["instruction"]), str(number), worked)

    def reward(self, example: Example, answer: Answer) -> float:
        is_right = final_number(answer.text) == final_number(example.reference)
        return float(is_right and answer.stop is StopReason.STOP)


def instructed(example: Example, instruction: str) -> tuple[dict[str, str], ...]:
    """The prompt as chat messages, with the instruction at the end of the last."""
    prompt = example.prompt
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    last = {**messages[-1], "content": f"{messages[-1]['content']}\n{instruction}".strip()}
    return (*messages[:-1], last)


def final(text: str) -> str:
    """Without the thinking, where the model marks it."""
    return text.rpartition("</think>")[2]


def last_box(text: str) -> tuple[int, str] | None:
    """Of the closed \\boxed{…} or \\fbox{…} that begins last: where it ends, and what is in it."""
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth = 1
        for brace in re.finditer(r"\\.|[{}]", text[match.end() :], re.DOTALL):  # \{ is no group's
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if not depth:
                end = match.end() + brace.start()
                return end, text[match.end() : end]
    return None


def final_number(text: str) -> Fraction | None:
    """The number that an answer gives; None: it gives none."""
    text = final(text)
    box, place = last_box(text), text.rfind(HASHES)
    if not box and place < 0:
        return next(reversed(numbers(text)), None)
    marked = box[1] if box and box[0] > place else text[place + len(HASHES) :]
    line = next((line for line in marked.splitlines() if line.strip()), "")
    return next(iter(numbers(line.rpartition("=")[2])), None)


def numbers(text: str) -> list[Fraction]:
    for spelling, plain in SPELLINGS:
        text = re.sub(spelling, plain, text)
    return [value for match in NUMBER.finditer(text) if (value := _value(match)) is not None]


def _value(match: re.Match[str]) -> Fraction | None:
    part = match.groupdict(default="")
    try:
        value = Fraction(part["first"].replace(",", "") + part["power"]) / int(part["under"] or 1)
        value += Fraction(int(part["over"] or 0), int(part["part"] or 1))
    except (ZeroDivisionError, ValueError):  # ValueError: of more digits than Python converts
        return None
    return -value if part["sign"] else value
