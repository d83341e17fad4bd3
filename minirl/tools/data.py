"""What a model will see of a task: `minirl data`. Takes a task and a tokenizer, gives rows of text.

Training examples are looked at up to a limit (a generated task has billions), held-out ones as many
as an evaluation takes. A duplicate is a prompt that comes again, letter for letter but for case and
white space.

Leaves out: rewards, but for the task's self-check.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from statistics import fmean
from typing import Any

from minirl.config import Config
from minirl.records import Example
from minirl.tasks import Task
from minirl.tasks.prompts import encode, has_template, render

MOST_LOOKED_AT = 10_000  # training examples


@dataclass(frozen=True)
class Side:
    """The training or the held-out examples that were looked at."""

    name: str
    examples: Sequence[Example]
    lengths: Sequence[int]
    total: int  # how many there are

    @cached_property
    def keys(self) -> list[str]:
        return [key_of(example) for example in self.examples]

    def rows(self, limit: int) -> Iterator[tuple[str, str]]:
        num, most = len(self.examples), max(self.lengths, default=0)
        yield self.name, f"{self.total:,} examples, of which {num:,} are looked at"
        if num:
            shown = f"{min(self.lengths)} to {most}, mean {fmean(self.lengths):.0f}"
            yield "  tokens of a prompt", shown
            longer = sum(length > limit for length in self.lengths)
            remedy = f"; tasks.max_prompt_tokens = {most} keeps all" if longer else ""
            share = f"{longer} of {num} ({longer / num:.1%})"
            yield "  too long", f"{share} above tasks.max_prompt_tokens = {limit}{remedy}"
            yield "  duplicates", f"{num - len(set(self.keys))} prompts that came before"


@dataclass(frozen=True)
class Survey:
    config: Config
    tokenizer: Any
    train: Side
    test: Side

    def rows(self) -> Iterator[tuple[str, str]]:
        for side in (self.train, self.test):
            yield from side.rows(self.config.tasks.max_prompt_tokens)
        trained = set(self.train.keys)
        both = [key for key in self.test.keys if key in trained]
        shown = f"{len(both)} of {len(self.test.keys)} held-out prompts are trained on"
        yield "in both", shown + (f', such as "{both[0][:60]}"' if both else "")
        yield "chat template", self._template()

    def _template(self) -> str:
        if isinstance(self.train.examples[0].prompt, str):
            return "not used: prompts are text"
        if has_template(self.tokenizer):
            return "applied"
        return "the model has none: a single message is its text and a line break (docs/tasks.md)"

    def shown(self, count: int) -> Iterator[tuple[str, str, str]]:
        """A few rendered prompts: a heading, the text as the model sees it, the reference."""
        pairs = zip(self.train.examples, self.train.lengths, strict=True)
        for number, (example, length) in enumerate(islice(pairs, count), start=1):
            heading = f"prompt {number}, {length} tokens"
            yield heading, render(example, self.tokenizer), example.reference


def survey(config: Config, task: Task, tokenizer: Any, limit: int) -> Survey:
    """Looks at up to `limit` training examples."""

    def side(name: str, examples: Sequence[Example], total: int) -> Side:
        return Side(name, examples, [len(encode(e, tokenizer)) for e in examples], total)

    train = [task.train(index) for index in range(min(task.num_train, limit))]
    test = task.heldout(config.eval.num_prompts)
    sides = side("train", train, task.num_train), side("held out", test, len(test))
    return Survey(config, tokenizer, *sides)


def key_of(example: Example) -> str:
    prompt = example.prompt
    text = prompt if isinstance(prompt, str) else " ".join(m["content"] for m in prompt)
    return " ".join(text.casefold().split())
