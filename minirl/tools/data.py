"""What a model will see of a task: `minirl data`. Takes a task and a tokenizer, gives rows of text.

Training examples are looked at up to a limit (a generated task has billions), held-out ones as many
as an evaluation takes. A duplicate is a prompt that comes again, letter for letter but for case and
white space.

Leaves out: rewards, but for the task's self-check.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, median
from typing import Any

from minirl.config import Config
from minirl.records import Example
from minirl.tasks import Task
from minirl.tasks.prompts import encode, has_template, render

MOST_LOOKED_AT = 10_000  # training examples
BARS = 10
BAR_WIDTH = 40


@dataclass(frozen=True)
class Side:
    """The training or the held-out examples that were looked at."""

    name: str
    examples: Sequence[Example]
    lengths: Sequence[int]
    total: int  # how many there are

    @property
    def keys(self) -> Counter[str]:
        return Counter(key_of(example) for example in self.examples)


@dataclass(frozen=True)
class Survey:
    config: Config
    tokenizer: Any
    train: Side
    test: Side

    def rows(self) -> Iterator[tuple[str, str]]:
        limit = self.config.tasks.max_prompt_tokens
        for side in (self.train, self.test):
            yield side.name, _counted(side)
            if not side.lengths:
                continue
            low, high = min(side.lengths), max(side.lengths)
            shown = f"{low} to {high}, mean {fmean(side.lengths):.0f}, "
            yield "  tokens of a prompt", f"{shown}median {median(side.lengths):.0f}"
            longer = sum(length > limit for length in side.lengths)
            remedy = f"; tasks.max_prompt_tokens = {high} keeps all" if longer else ""
            share = f"{longer} of {len(side.lengths)} ({longer / len(side.lengths):.1%})"
            yield "  too long", f"{share} above tasks.max_prompt_tokens = {limit}{remedy}"
            again = sum(count - 1 for count in side.keys.values())
            yield "  duplicates", f"{again} prompts that came before"
        train_keys = self.train.keys
        both = [e for e in self.test.examples if key_of(e) in train_keys]
        shown = f"{len(both)} of {len(self.test.examples)} held-out prompts are trained on"
        yield "in both", shown + (f", such as {_line(both[0])}" if both else "")
        yield "chat template", self._template()

    def _template(self) -> str:
        if isinstance(self.train.examples[0].prompt, str):
            return "not used: prompts are text"
        if has_template(self.tokenizer):
            return "applied"
        return "the model has none: a single message is its text and a line break (docs/tasks.md)"

    def histogram(self) -> Iterator[str]:
        """Of the training prompts' lengths, in tokens."""
        low, high = min(self.train.lengths), max(self.train.lengths)
        width = max(1, -(-(high - low + 1) // BARS))
        counts = Counter((length - low) // width for length in self.train.lengths)
        most = max(counts.values())
        for bar in range((high - low) // width + 1):
            first = low + bar * width
            mark = "#" * -(-counts[bar] * BAR_WIDTH // most)
            yield f"{first:>7} to {first + width - 1:<7}{mark} {counts[bar]}"

    def shown(self, count: int) -> Iterator[tuple[str, str, str]]:
        """A few rendered prompts: a heading, the text as the model sees it, the reference."""
        pairs = zip(self.train.examples, self.train.lengths, strict=True)
        for number, (example, length) in enumerate(islice(pairs, count), start=1):
            heading = f"prompt {number}, {length} tokens"
            yield heading, render(example, self.tokenizer), example.reference


def survey(config: Config, task: Task, tokenizer: Any, limit: int) -> Survey:
    """Looks at up to `limit` training examples."""
    num_train = min(task.num_train, limit)
    train = [task.train(index) for index in range(num_train)]
    test = task.heldout(config.eval.num_prompts)
    return Survey(
        config,
        tokenizer,
        Side("train", train, _lengths(train, tokenizer), task.num_train),
        Side("held out", test, _lengths(test, tokenizer), len(test)),
    )


def key_of(example: Example) -> str:
    prompt = example.prompt
    text = prompt if isinstance(prompt, str) else "\0".join(m["content"] for m in prompt)
    return " ".join(text.casefold().split())


def _lengths(examples: Sequence[Example], tokenizer: Any) -> list[int]:
    return [len(encode(example, tokenizer)) for example in examples]


def _counted(side: Side) -> str:
    if side.total == len(side.examples):
        return f"{side.total:,} examples"
    return f"{side.total:,} examples, of which the first {len(side.examples):,} are looked at"


def _line(example: Example) -> str:
    text = " ".join(key_of(example).replace("\0", " ").split())
    return f'"{text[:60]}…"' if len(text) > 60 else f'"{text}"'
