"""What is asked and what is right: prompts (stage 1) and rewards (stage 3).

Takes the recipe's [tasks] section and the seed; gives examples, rewards and replies. A task of
one's own is a class of some ten lines with `load` and `reward` (docs/write-a-task.md).
Leaves out: tokens, processes, how data is read (sources.py).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from minirl.config import TasksConfig
from minirl.errors import RecipeError, one_line
from minirl.records import Answer, Example
from minirl.tasks.sources import SourceRow, as_rows, read


class Task:
    """Data is read at first use: a verifier never reads it."""

    data: str = ""  # what is read where the recipe names no tasks.data, and its columns
    prompt_column: str = "prompt"
    reference_column: str = "reference"
    turn_stop: tuple[str, ...] = ()  # texts that end a turn, where the task replies
    options: Mapping[str, Any] = {}  # what [tasks.options] may set; an instance has this run's
    solution_form = "{}"  # what stands around the reference in an answer that scores 1

    def __init__(self, config: TasksConfig, seed: int = 0):
        self.config, self.seed = config, seed
        self.prompt_column = config.prompt_column or type(self).prompt_column
        self.reference_column = config.reference_column or type(self).reference_column
        self.options = {**type(self).options, **config.options}
        for name, value in config.options.items():
            self.check_option(name, name in type(self).options, "is no option of this task")
            kind = type(type(self).options[name])
            is_kind = type(value) in ((int, float) if kind is float else (kind,))
            self.check_option(name, is_kind, f"must be of type {kind.__name__}")
        self._examples = cache(self._read)

    def check_option(self, name: str, is_right: bool, rule: str) -> None:
        """For a constructor: the rule that an option must meet."""
        if not is_right:
            remedy = f"the defaults are {dict(type(self).options)}"
            raise RecipeError(f"tasks.options.{name}", self.options[name], rule, remedy)

    def load(self, split: str) -> Iterable[Mapping[str, Any]]:
        """The rows of "train" or "test"; by default those of tasks.data."""
        return read(self.config, self.config.data or self.data, self.prompt_column, split)

    def example(self, row: SourceRow) -> Example:
        """By default a row's two columns; a prompt is text or chat messages."""
        prompt, reference = row.column(self.prompt_column), row.column(self.reference_column)
        if not isinstance(reference, str):
            reference = json.dumps(reference, ensure_ascii=False, default=str)
        if isinstance(prompt, str) and prompt.strip():
            return Example(prompt, reference)
        if isinstance(prompt, list) and prompt and all(isinstance(m, Mapping) for m in prompt):
            messages = tuple({key: m.get(key) for key in ("role", "content")} for m in prompt)
            if all(isinstance(text, str) for message in messages for text in message.values()):
                return Example(messages, reference)
        rule = f'no prompt in its column "{self.prompt_column}": {one_line(repr(prompt), 40)}'
        raise row.error(rule, 'text, or messages like {"role": "user", "content": "…"}')

    def reward(self, example: Example, answer: Answer) -> float:
        """1 is right, 0 is wrong. An exception drops the group: it is never a reward of 0."""
        raise NotImplementedError(f"{type(self).__name__} has no reward(self, example, answer)")

    def reply(self, example: Example, turns: tuple[str, ...]) -> str | None:
        """The task's next message, or None to end the conversation. `turns` alternates the model's
        texts and the replies. Only a task of several turns overrides this (turns.py)."""
        return None

    def solution(self, example: Example) -> str:
        """An answer that must score 1: the self-check uses it."""
        return self.solution_form.format(example.reference)

    @property
    def num_train(self) -> int:
        return len(self._examples("train"))

    def train(self, index: int) -> Example:
        """The training example at `index`, the same at every call."""
        return self._examples("train")[index]

    def heldout(self, count: int) -> Sequence[Example]:
        """Up to `count` held-out examples, the same at every call."""
        return self._examples("test")[:count]

    def _read(self, split: str) -> list[Example]:
        examples = [self.example(row) for row in as_rows(self.load(split), split)]
        if not examples:
            where, rule = self.config.data or self.data, f"has no rows to {split} on"
            raise RecipeError("tasks.data", where, rule, "check data, splits and load")
        return examples


def has_turns(task: Task) -> bool:
    return type(task).reply is not Task.reply


class Generated(Task):
    """A task whose examples are drawn without end, not read."""

    num_train = 2**31

    def __init__(self, config: TasksConfig, seed: int = 0):
        super().__init__(config, seed)
        if config.data:
            rule = "is not read: this task draws its own problems"
            raise RecipeError("tasks.data", config.data, rule, "leave it out")

    def draw(self, index: int, is_test: bool) -> Example:
        """The same at every call; no example is both trained on and held out."""
        raise NotImplementedError

    def train(self, index: int) -> Example:
        return self.draw(index, is_test=False)

    def heldout(self, count: int) -> Sequence[Example]:
        """`count` different examples, where there are so many."""
        found: dict[str, Example] = {}
        for index in range(20 * count + 500):  # an easy setting has few problems
            if len(found) < count:
                example = self.draw(index, is_test=True)
                found.setdefault(str(example.prompt), example)
        return list(found.values())
