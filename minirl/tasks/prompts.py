"""From examples to token prompts, in an order that a resumed run can continue.

Takes a task and a tokenizer, gives prompts one by one. A finite task is shuffled anew each epoch,
by the seed. What was *consumed* (trained, or dropped for good) is remembered by index: after a
restart exactly the prompts that were in flight are requeued.
"""

import random
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import count
from typing import Any

from minirl.config import Config
from minirl.errors import RecipeError
from minirl.records import Example, Prompt
from minirl.tasks import Task

SHUFFLED_UP_TO = 10_000_000  # a generated task is endless and already in random order


class PromptStream:
    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        seed: int,
        consumed: "Consumed | None" = None,
        bounded: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """`bounded`: what the task's code runs in."""
        self._task, self._tokenizer, self._seed, self._bounded = task, tokenizer, seed, bounded
        self.consumed = consumed or Consumed()
        self.waiting: list[int] = []  # requeued, lowest first
        self._fresh = (i for i in count(self.consumed.below) if i not in self.consumed)
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def next(self) -> Prompt:
        index = self.waiting.pop(0) if self.waiting else next(self._fresh)
        with self._bounded():
            example = self._task.train(self.place(index))
        return Prompt(index, example, encode(example, self._tokenizer))

    def put_back(self, index: int) -> None:
        """Requeues a prompt whose group was lost to a fault, also after it was trained. Lowest
        index first, so that at η = 0 a step that is repeated gets the same prompts."""
        self.consumed.discard(index)
        insort(self.waiting, index)

    def place(self, index: int) -> int:
        """The example that the prompt of this index is."""
        epoch, place = divmod(index, self._task.num_train)
        return place if self._task.num_train > SHUFFLED_UP_TO else self._epoch(epoch)[place]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self._task.num_train))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


class Consumed:
    """A set of indices that is dense from 0 on: all those below a mark, and a few above it."""

    def __init__(self, below: int = 0, above: Iterable[int] = ()):
        self.below, self.above = below, set(above)

    def add(self, index: int) -> None:
        self.above.add(index)
        while self.below in self.above:
            self.above.remove(self.below)
            self.below += 1

    def discard(self, index: int) -> None:
        if index < self.below:
            self.above.update(range(index + 1, self.below))
            self.below = index
        self.above.discard(index)

    def __contains__(self, index: int) -> bool:
        return index < self.below or index in self.above


def short_prompts(config: Config, examples: Sequence[Example], tokenizer: Any) -> list[Prompt]:
    """Without those that are too long; that all are is a wrong recipe."""
    prompts = [Prompt(i, e, encode(e, tokenizer)) for i, e in enumerate(examples)]
    limit, lengths = config.tasks.max_prompt_tokens, [len(p.tokens) for p in prompts]
    if min(lengths, default=limit + 1) > limit:
        rule = f"none of {len(lengths)} prompts is as short as that"
        remedy = f"raise it to {max(lengths)}" if lengths else "the task must give examples"
        raise RecipeError("tasks.max_prompt_tokens", limit, rule, remedy)
    return [prompt for prompt in prompts if len(prompt.tokens) <= limit]


def trained_on(test: Iterable[Example], train: Iterable[Example]) -> list[str]:
    """The held-out prompts that are also among those to train on, as `key_of` writes them."""
    trained = {*map(key_of, train)}
    return [key for key in map(key_of, test) if key in trained]


def key_of(example: Example) -> str:
    """One text for prompts that differ only in case and white space."""
    prompt = example.prompt
    text = prompt if isinstance(prompt, str) else " ".join(m["content"] for m in prompt)
    return " ".join(text.casefold().split())


def encode(example: Example, tokenizer: Any) -> tuple[int, ...]:
    """What the model sees. A template writes its own special tokens, so none are added to it."""
    is_templated = not isinstance(example.prompt, str) and has_template(tokenizer)
    options = {"add_special_tokens": False} if is_templated else {}
    return tuple(tokenizer.encode(render(example, tokenizer), **options))


def render(example: Example, tokenizer: Any) -> str:
    """Text as it is, chat messages by the model's template, or else as docs/tasks.md says."""
    if isinstance(example.prompt, str):
        return example.prompt
    messages = list(example.prompt)
    if has_template(tokenizer):
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if len(messages) == 1:
        return f"{messages[0]['content']}\n"
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"


def has_template(tokenizer: Any) -> bool:
    return getattr(tokenizer, "chat_template", "its own") is not None
