"""What is asked and what is right: prompts (stage 1) and rewards (stage 3).

A task of one's own is a class of some ten lines (docs/write-a-task.md):

    class Backwards(Task):
        def load(self, split):
            return [{"prompt": f"Spell {w} backwards.", "reference": w[::-1]} for w in WORDS[split]]

        def reward(self, example, answer):
            return float(answer.text.strip() == example.reference)

Leaves out: tokens, processes, the hub (sources.py).
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from minirl.config import TasksConfig
from minirl.errors import RecipeError, one_line
from minirl.records import Answer, Example
from minirl.tasks.sources import Row, Source, bad_row, column

TRAIN, TEST = "train", "test"


class Task:
    """The base of every task. Instances are built in the controller (for prompts) and in every
    verifier process (for rewards), from the same arguments. Data is read when it is first asked
    for: a verifier, which only grades, never reads it.

    A class that is no child of this one serves too, if it has `num_train`, `train`, `heldout`,
    `reward` and `solution`.
    """

    data: str = ""
    """What is read where the recipe names no tasks.data."""
    prompt_column: str = "prompt"
    reference_column: str = "reference"
    """Columns of that data, where the recipe names none."""
    turn_stop: tuple[str, ...] = ()
    """Texts that end a turn of the model, where the task replies; rollout.stop does so too."""
    options: Mapping[str, Any] = {}
    """What [tasks.options] may set, with defaults; on an instance, what holds for this run."""

    def __init__(self, config: TasksConfig, seed: int = 0):
        self.config, self.seed = config, seed
        self.prompt_column = config.prompt_column or type(self).prompt_column
        self.reference_column = config.reference_column or type(self).reference_column
        self.options = merged(type(self).options, config.options)

    # -- what a task of one's own says

    def load(self, split: str) -> Iterable[Row | Example | Mapping[str, Any]]:
        """The rows of "train" or "test". Unless a task says otherwise: those of tasks.data."""
        return self.source.rows(split)

    def example(self, row: Row) -> Example:
        """One row as what is asked. Unless a task says otherwise: its two columns, a prompt as text
        or chat messages, and what the reward knows."""
        prompt, reference = column(row, self.prompt_column), column(row, self.reference_column)
        if not isinstance(reference, str):
            reference = json.dumps(reference, ensure_ascii=False, default=str)
        if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
            messages = [{"role": m["role"], "content": m["content"]} for m in prompt]
            return Example(tuple(messages), reference)
        if not isinstance(prompt, str) or not prompt.strip():
            shown = one_line(repr(prompt), 40)
            rule = f'has no prompt in its column "{self.prompt_column}": {shown}'
            raise bad_row(row, rule, 'text, or messages like {"role": "user", "content": "…"}')
        return Example(prompt, reference)

    def reward(self, example: Example, answer: Answer) -> float:
        """1 is right, 0 is wrong. An exception drops the group: it is never a reward of 0."""
        raise NotImplementedError(f"{type(self).__name__} has no reward(self, example, answer)")

    def reply(self, example: Example, turns: tuple[str, ...]) -> str | None:
        """What the model is told next, or None when the conversation is over. `turns` are the
        model's texts and the replies so far, in turn; the last one is the model's. A task that
        has this has several turns (tasks/turns.py). An exception drops the group."""
        return None

    def solution(self, example: Example) -> str:
        """An answer made from the reference that must score 1: the task's self-check uses it."""
        return example.reference

    # -- what the rest of minirl asks

    @property
    def num_train(self) -> int:
        """How many training examples there are; a generated task says a large number."""
        return len(self._train)

    def train(self, index: int) -> Example:
        """The training example at `index`, the same at every call."""
        return self._train[index]

    def heldout(self, count: int) -> Sequence[Example]:
        """Up to `count` held-out examples, the same at every call."""
        return self._test[:count]

    @property
    def source(self) -> Source:
        config, data = self.config, self.config.data or self.data
        return Source(data, config.train_split, config.test_split, self.prompt_column)

    @cached_property
    def _train(self) -> list[Example]:
        return self._examples(TRAIN)

    @cached_property
    def _test(self) -> list[Example]:
        return self._examples(TEST)

    def _examples(self, split: str) -> list[Example]:
        found = []
        for number, row in enumerate(self.load(split), start=1):
            place = Row({}, f"{type(self).__name__}.load", f"row {number} of {split}")
            if isinstance(row, Mapping):
                row = self.example(
                    row if isinstance(row, Row) else Row(row, place.source, place.place)
                )
            if not isinstance(row, Example):
                raise bad_row(place, "is neither a dict nor an Example", "yield one of these")
            found.append(row)
        if not found:
            where, rule = self.config.data or self.data, f"has no rows to {split} on"
            raise RecipeError("tasks.data", where, rule, "check data, splits and load")
        return found


def _is_message(item: Any) -> bool:
    texts = [item.get("role"), item.get("content")] if isinstance(item, Mapping) else [None]
    return all(isinstance(text, str) for text in texts)


def merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """A task's options with those of the recipe; one that the task does not have is an error."""
    for name, value in given.items():
        key = f"tasks.options.{name}"
        if name not in defaults:
            near = difflib.get_close_matches(name, defaults, n=1)
            remedy = f"did you mean {near[0]}?" if near else "leave it out"
            there = f"it has {', '.join(defaults)}" if defaults else "it has none"
            raise RecipeError(key, value, f"is no option of this task, {there}", remedy)
        wanted = type(defaults[name])
        is_whole_float = wanted is float and type(value) is int
        if type(value) is not wanted and not is_whole_float:
            kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
            rule = f"must be {kinds.get(wanted, 'a list')}"
            raise RecipeError(key, value, rule, f"the default is {defaults[name]!r}")
    return {**defaults, **given}


def need(task: Task, name: str, is_so: bool, rule: str) -> None:
    """For a task's constructor: an option that makes no sense is one line, too."""
    if not is_so:
        remedy = f"the default is {type(task).options[name]!r}"
        raise RecipeError(f"tasks.options.{name}", task.options[name], rule, remedy)
