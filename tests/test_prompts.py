"""Prompts: each example once an epoch, and after a resume exactly what was not consumed."""

import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from cases import DATA
from hypothesis import given
from hypothesis import strategies as st
from test_cli import minirl
from tiny_models import EOS, PAD, POSITIONS
from tiny_models import tokenizer as tiny_tokenizer
from tokenizers import Tokenizer

from minirl.config import Config, TasksConfig
from minirl.errors import RecipeError
from minirl.model import load_tokenizer
from minirl.records import Example
from minirl.shm.ring import TrajectoryRing
from minirl.tasks import Task
from minirl.tasks.arithmetic import Arithmetic
from minirl.tasks.prompts import SHUFFLED_UP_TO, Consumed, PromptStream, encode, render
from minirl.tasks.registry import bounded
from minirl.tasks.turns import Dialogue, dialogue_of, readable, reply_tokens, runs, texts_of


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
def test_a_broken_run_consumes_each_index_once(num_train: int, count: int, random: Random) -> None:
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


# Turns: only a reply's own text is tokenised, and it comes back whole -----------------------------

TURNS_TEMPLATE = (DATA / "turns.jinja").read_text()
CHAT, TEXT = Example(({"role": "user", "content": "Hi"},), "!"), Example("Hi", "!")


class Chatty(Task):
    turn_stop = (">>",)

    def reply(self, example: Example, turns: tuple[str, ...]) -> str | None:
        return "more"


def chatty(template: str | None = TURNS_TEMPLATE) -> tuple[Dialogue, Tokenizer]:
    tokenizer = tiny_tokenizer(POSITIONS)
    tokenizer.chat_template = template
    dialogue = dialogue_of(Chatty(TasksConfig()), "chatty", tokenizer)
    assert dialogue is not None
    return dialogue, tokenizer.backend_tokenizer


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_what_stands_between_two_answers_is_found_or_refused_in_one_line() -> None:
    assert chatty()[0] == Dialogue((">>",), "<eos>", "\n[user]", "\n[assistant]")
    assert chatty(None)[0] == Dialogue((">>",))
    assert dialogue_of(Arithmetic(TasksConfig()), "one turn", tiny_tokenizer(POSITIONS)) is None
    for template, why in (("{{ raise_exception('only one') }}", "only one"), ("", "second turn")):
        with pytest.raises(RecipeError, match=why):
            chatty(template)
    for wrong in (("",), "</call>"):
        task = Chatty(TasksConfig())
        task.turn_stop = wrong  # type: ignore[assignment]
        with pytest.raises(RecipeError, match="its turn_stop is"):
            dialogue_of(task, "wrong", tiny_tokenizer(POSITIONS))


def test_after_a_chat_models_own_end_a_reply_is_a_users_message_elsewhere_its_text() -> None:
    for template, example, last, text in (
        (TURNS_TEMPLATE, CHAT, EOS, "\n[user]more\n[assistant]"),  # the end is there already
        (TURNS_TEMPLATE, CHAT, PAD, "<eos>\n[user]more\n[assistant]"),  # another special token
        *((TURNS_TEMPLATE, *where, "more") for where in ((CHAT, 7), (TEXT, EOS))),
        (None, CHAT, EOS, "more"),
    ):
        dialogue, tokenizer = chatty(template)
        assert reply_tokens("more", example, last, tokenizer, dialogue) == ids(tokenizer, text)


@pytest.mark.parametrize("is_ended", [True, False])
def test_turns_come_back_from_the_flat_record_as_they_were_said(is_ended: bool) -> None:
    dialogue, tokenizer = chatty()
    texts = ("a é answer", "more 💡\n", "last >>", " = 3", "end")
    tokens, versions = [], []
    for number, text in enumerate(texts):
        found = ids(tokenizer, text) + [EOS] * (is_ended and number == 0)
        if number % 2:
            found = reply_tokens(text, CHAT, tokens[-1], tokenizer, dialogue)
        tokens += found
        versions += [-1 if number % 2 else 2] * len(found)
    ring = TrajectoryRing(1, 200)
    ring.write(0, 1, ids(tokenizer, "Hi"), tokens, [-1.0] * len(tokens), versions)
    view = ring.read(0, 1)
    assert view.mask.tolist() == [0, 0, *(int(version >= 0) for version in versions)]
    assert texts_of(view, tokenizer, dialogue) == texts and len(runs(view.mask)) == 5
    assert readable(texts) == "a é answer⟦more 💡\n⟧last >>⟦ = 3⟧end"
    one_turn = texts_of(view, tokenizer, None)
    assert len(one_turn) == 1 and "more" not in one_turn[0]


# `minirl data`: what it shows is what a run would see ---------------------------------------------

ROWS = {  # the third is the first again, but for case and space
    "train": ["What is 1 + 1?", "What is 2 + 2?", "what is  1 + 1?", "What is 3?" + " Think!" * 40],
    "test": ["What is 2 + 2?", "And 5?"],
}


def test_the_tiny_models_view_of_rows_of_ones_own(tmp_path: Path) -> None:
    for split, questions in ROWS.items():
        lines = [json.dumps({"question": q, "answer": str(len(q))}) for q in questions]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    path = tmp_path / "r.toml"
    path.write_text('[tasks]\nkind = "gsm8k"\ndata = "."\nmax_prompt_tokens = 200\n')
    done = minirl("data", str(path), "--show", "1", cwd=tmp_path.parent)  # another folder
    for text in (
        "What is 1 + 1?\nPlease reason step by step",
        "reference: 14",
        "4 references score 1",
        "1 of 4 (25.0%) above tasks.max_prompt_tokens = 200",
        "1 prompts that came before",
        "1 of 2 held-out prompts are trained on, such as",
        "the model has none",
    ):
        assert text in done.stdout


def test_the_light_tokenizer_is_the_runs_own(tied_folder: Path, tmp_path: Path) -> None:
    """With a chat template and without one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tied_folder)
    tokenizer.chat_template = TURNS_TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    one = ({"role": "user", "content": "2?"},)
    for folder in (tmp_path, tied_folder):
        light, whole = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        for example in (Example(one, ""), Example("Tom has 7 apples.", "")):
            assert encode(example, light) == encode(example, whole)
            assert render(example, light) == render(example, whole)
    assert render(Example(one, ""), light) == "2?\n"
    several = ({"role": "system", "content": "Brief."}, *one)
    assert render(Example(several, ""), light) == "system: Brief.\nuser: 2?\nassistant:"


def test_an_example_that_hangs_or_fails_is_one_line_with_its_own_line(tmp_path: Path) -> None:
    """In the controller, long after the self-check."""
    file = tmp_path / "late.py"
    file.write_text("def hang():\n    while True:\n        pass\n\ndef fail():\n    1 / 0\n")
    own: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), own)
    config = Config(tasks=TasksConfig(kind=f"{file}:Late", timeout_s=2.0))
    slow = r"longer than tasks.timeout_s = 2 \(late.py, line \d, in hang\)"
    for name, said in (("hang", slow), ("fail", r"\(late.py, line 6, in fail\)")):
        with pytest.raises(RecipeError, match=said), bounded(config):
            own[name]()
