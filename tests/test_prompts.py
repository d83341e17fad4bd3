"""Prompts: each example once an epoch, and after a resume exactly what was not consumed."""

from random import Random
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from minirl.records import Example
from minirl.tasks.prompts import SHUFFLED_UP_TO, Consumed, PromptStream, encode


class Letters:
    """A tokenizer: one token per letter, and a begin token where special tokens are wanted."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def stream(num_train: int = 10, seed: int = 0, consumed: Consumed | None = None) -> PromptStream:
    """Of examples that are their numbers."""
    examples = [Example(str(i), str(i)) for i in range(min(num_train, 100))]
    task: Any = SimpleNamespace(num_train=num_train, train=examples.__getitem__)
    return PromptStream(task, Letters(), seed, consumed)


def take(prompts: PromptStream, count: int) -> list[int]:
    """The next examples."""
    return [int(prompts.next().example.reference) for _ in range(count)]


def test_text_is_encoded_as_it_is_and_chat_by_the_models_template() -> None:
    assert encode(Example("ab", ""), Letters()) == (1, ord("a"), ord("b"))
    chat = Example(({"role": "user", "content": "x"},), "")
    assert bytes(encode(chat, Letters())).decode() == "<user>x<assistant>"  # no second begin token


def test_every_epoch_is_another_permutation_by_the_seed() -> None:
    prompts = stream(50, seed=3)
    epochs = [take(prompts, 50) for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, list(range(50))]}) == 4
    assert take(stream(50, seed=3), 100) == epochs[0] + epochs[1]
    assert take(stream(50, seed=4), 50) != epochs[0]
    assert take(stream(SHUFFLED_UP_TO + 1), 5) == [0, 1, 2, 3, 4]  # an endless task


@given(st.integers(1, 9), st.integers(0, 40), st.randoms(use_true_random=False))
def test_a_run_broken_anywhere_consumes_each_index_once(
    num_train: int, count: int, random: Random
) -> None:
    prompts = stream(num_train)
    consumed: list[int] = []
    in_flight: list[int] = []
    for _ in range(count):
        in_flight.append(prompts.next().index)
        random.shuffle(in_flight)
        while in_flight and random.random() < 0.45:
            index = in_flight.pop()
            if random.random() < 0.2:
                prompts.put_back(index)
            else:
                consumed.append(index)
                prompts.consumed.add(index)
        if random.random() < 0.1:
            saved = prompts.consumed
            prompts = stream(num_train, consumed=Consumed(saved.below, sorted(saved.above)))
            in_flight = []
    assert len(set(consumed)) == len(consumed)
    assert {index for index in range(100) if index in prompts.consumed} == set(consumed)
    missing = set(range(max(consumed, default=-1) + 1)) - set(consumed)
    assert prompts.consumed.below == min(missing, default=len(consumed)), "the dense part is a mark"
    resumed = stream(num_train, consumed=prompts.consumed)
    assert {resumed.next().index for _ in missing} == missing
