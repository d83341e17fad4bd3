"""Tasks of one's own, as a user would write them, that a random model gets rewards from."""

import time
from string import ascii_lowercase

from minirl.records import Answer, Example
from minirl.tasks import Generated

AGAIN = " again?"


class Endless(Generated):
    """Right is an answer of an even number of tokens: a random model is right half the time."""

    num_train = 10**8  # in order

    def draw(self, index: int, is_test: bool) -> Example:
        return Example(f"Ann has {index} pears." if is_test else f"Tom has {index} apples.", "even")

    def reward(self, example: Example, answer: Answer) -> float:
        return float(answer.num_tokens % 2 == 0 or answer.text == "right")

    def solution(self, example: Example) -> str:
        return "right"


class Again(Endless):
    """Three turns, whatever the model says; a turn ends at a letter, which even a random model
    writes soon. Right is an even number of tokens in all."""

    turn_stop = tuple(ascii_lowercase)

    def reply(self, example: Example, turns: tuple[str, ...]) -> str | None:
        assert turns[1::2] == (AGAIN,) * (len(turns) // 2)
        return AGAIN if len(turns) < 5 else None

    def reward(self, example: Example, answer: Answer) -> float:
        if answer.text != "right":
            assert answer.turns[-1] == answer.text and len(answer.turns) <= 5
        return super().reward(example, answer)


class Talkative(Again):
    """In training, a reply to one prompt in four raises, and so does one reward in ten."""

    def reply(self, example: Example, turns: tuple[str, ...]) -> str | None:
        name, _, number, _ = str(example.prompt).split()
        if name == "Tom" and int(number) % 4 == 3 and turns != ("right",):  # the self-check
            raise ValueError("nothing to say")
        return super().reply(example, turns)

    def reward(self, example: Example, answer: Answer) -> float:
        kind = sum(answer.text.encode())
        if answer.text != "right" and str(example.prompt).startswith("Tom") and kind % 10 == 3:
            raise ValueError("no verdict")
        return super().reward(example, answer)


class UnsureAgain(Endless):
    """Two turns. Of the rewards, and of the replies too, one in seven raises and a few hang."""

    turn_stop = Again.turn_stop

    def reply(self, example: Example, turns: tuple[str, ...]) -> str | None:
        is_over = len(turns) == 3 or turns == ("right",)  # the self-check
        return None if is_over else fail("nothing to say", turns[-1], 6, 9) or AGAIN

    def reward(self, example: Example, answer: Answer) -> float:
        if answer.text != "right":
            fail("no verdict", answer.text, 3, 5)
        return super().reward(example, answer)


def fail(why: str, text: str, raises: int, hangs: int) -> None:
    kind = sum(text.encode())
    if kind % 7 == raises:
        raise ValueError(why)
    if kind % 41 == hangs:
        time.sleep(60)
