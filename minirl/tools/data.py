"""What a model will see of a task: `minirl data`. Takes a task and a tokenizer, gives rows of text.

Training examples are looked at up to a limit (a generated task has billions), held-out ones as many
as an evaluation takes. A duplicate is a prompt that comes again, letter for letter but for case and
white space. Leaves out: rewards, but for the task's self-check.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from statistics import fmean
from typing import Any

from minirl.config import Config
from minirl.records import Example
from minirl.tasks import Task
from minirl.tasks.prompts import encode, has_template, render

MOST_LOOKED_AT = 10_000  # training examples


class Side:
    """The training or the held-out examples that were looked at."""

    def __init__(self, examples: Sequence[Example], tokenizer: Any):
        self.examples = examples
        self.lengths = [len(encode(example, tokenizer)) for example in examples]

    @cached_property
    def keys(self) -> list[str]:
        return [key_of(example) for example in self.examples]

    def rows(self, limit: int) -> Iterator[tuple[str, str]]:
        if not (num := len(self.examples)):
            return
        most, longer = max(self.lengths), sum(length > limit for length in self.lengths)
        mean = fmean(self.lengths)
        yield "  tokens of a prompt", f"{min(self.lengths)} to {most}, mean {mean:.0f}"
        remedy = f"; tasks.max_prompt_tokens = {most} keeps all" if longer else ""
        share = f"{longer} of {num} ({longer / num:.1%})"
        yield "  too long", f"{share} above tasks.max_prompt_tokens = {limit}{remedy}"
        yield "  duplicates", f"{num - len(set(self.keys))} prompts that came before"


class Survey:
    def __init__(self, config: Config, task: Task, tokenizer: Any, most: int = MOST_LOOKED_AT):
        self.config, self.task, self.tokenizer = config, task, tokenizer
        self.train = Side([task.train(i) for i in range(min(task.num_train, most))], tokenizer)
        self.test = Side(task.heldout(config.eval.num_prompts), tokenizer)

    def rows(self) -> Iterator[tuple[str, str]]:
        limit, num = self.config.tasks.max_prompt_tokens, len(self.train.examples)
        yield "train", f"{self.task.num_train:,} examples, of which {num:,} are looked at"
        yield from self.train.rows(limit)
        yield "held out", f"{len(self.test.examples):,} examples"
        yield from self.test.rows(limit)
        trained = set(self.train.keys)
        both = [key for key in self.test.keys if key in trained]
        shown = f"{len(both)} of {len(self.test.keys)} held-out prompts are trained on"
        yield "in both", shown + (f', such as "{both[0][:60]}"' if both else "")
        is_text = isinstance(self.train.examples[0].prompt, str)
        none = "the model has none: a single message is its text and a line break (docs/tasks.md)"
        template = "applied" if has_template(self.tokenizer) else none
        yield "chat template", "not used: prompts are text" if is_text else template

    def shown(self, count: int) -> Iterator[tuple[str, str, str]]:
        """A few rendered prompts: a heading, the text as the model sees it, the reference."""
        for number, example in enumerate(self.train.examples[:count], start=1):
            heading = f"prompt {number}, {self.train.lengths[number - 1]} tokens"
            yield heading, render(example, self.tokenizer), example.reference


def key_of(example: Example) -> str:
    prompt = example.prompt
    text = prompt if isinstance(prompt, str) else " ".join(m["content"] for m in prompt)
    return " ".join(text.casefold().split())
