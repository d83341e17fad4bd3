"""What supervised learning learns from, and what its ranks and their controller say. No torch.

A *lesson* is a prompt and the answer to learn: the example's worked answer where the task has one,
else `solution(example)`, and the token that ends an answer. Lessons come in the prompt stream's
order, so every rank draws the same batches. Those longer than the recipe's limits are left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from minirl.config import Config
from minirl.devices import Placement
from minirl.errors import RecipeError
from minirl.records import Example
from minirl.tasks import Task
from minirl.tasks.prompts import PromptStream, encode

MAX_IN_A_ROW = 1000  # lessons that are too long, before the recipe is taken for wrong


@dataclass(frozen=True)
class Lesson:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


def taught(task: Task, example: Example) -> str:
    return example.worked or task.solution(example)


class Lessons:
    def __init__(self, config: Config, task: Task, tokenizer: Any):
        self.config, self._task, self._tokenizer = config, task, tokenizer
        self._stream = PromptStream(task, tokenizer, config.seed)
        self.num_too_long = 0

    def batch(self, size: int) -> list[Lesson]:
        found: list[Lesson] = []
        num_tried = 0
        while len(found) < size:
            prompt = self._stream.next()
            found += self._fitting([self.lesson(prompt.example, prompt.tokens)])
            num_tried += 1
            if num_tried > MAX_IN_A_ROW + 100 * len(found):
                raise self._wrong()
        return found

    def heldout(self, count: int) -> list[Lesson]:
        examples = self._task.heldout(count)
        return self._fitting(self.lesson(e, encode(e, self._tokenizer)) for e in examples)

    def lesson(self, example: Example, prompt: tuple[int, ...]) -> Lesson:
        text = taught(self._task, example)
        answer = self._tokenizer.encode(text, add_special_tokens=False)
        return Lesson(prompt, (*answer, self._tokenizer.eos_token_id))

    def _fitting(self, lessons: Iterable[Lesson]) -> list[Lesson]:
        tasks, rollout = self.config.tasks, self.config.rollout
        found = []
        for lesson in lessons:
            is_short = len(lesson.prompt) <= tasks.max_prompt_tokens
            if is_short and len(lesson.answer) <= rollout.max_new_tokens:
                found.append(lesson)
            else:
                self.num_too_long += 1
        return found

    def _wrong(self) -> RecipeError:
        return RecipeError(
            "rollout.max_new_tokens",
            self.config.rollout.max_new_tokens,
            "nearly all prompts or worked answers are longer than the recipe allows",
            "raise it, or tasks.max_prompt_tokens",
        )


@dataclass(frozen=True)
class SftSetup:
    """What a rank is spawned with. [train] of its config has the values of [sft]."""

    config: Config
    folder: str
    rank: int
    num_ranks: int
    rendezvous: str
    placement: Placement


@dataclass(frozen=True)
class Learn:
    """To every rank: step 0, 1, …"""

    step: int


@dataclass(frozen=True)
class Test:
    """To every rank: the loss on held-out lessons."""


@dataclass(frozen=True)
class SaveModel:
    folder: str


@dataclass(frozen=True)
class Learned:
    """From rank 0. Values are named as in metrics.py."""

    values: dict[str, float | None] = field(default_factory=dict)
    num_too_long: int = 0


@dataclass(frozen=True)
class Tested:
    loss: float | None  # None: there are no held-out lessons
