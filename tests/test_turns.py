"""Between texts and flat tokens: only a reply's own text is tokenised, and it comes back whole."""

import pytest
from tiny_models import EOS, PAD, POSITIONS
from tiny_models import tokenizer as tiny_tokenizer
from tokenizers import Tokenizer

from minirl.config import TasksConfig
from minirl.errors import RecipeError
from minirl.records import Example
from minirl.shm.ring import TrajectoryRing
from minirl.tasks import Task
from minirl.tasks.arithmetic import Arithmetic
from minirl.tasks.turns import Dialogue, dialogue_of, readable, reply_tokens, runs, texts_of

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT, TEXT = Example(({"role": "user", "content": "Hi"},), "!"), Example("Hi", "!")


class Chatty(Task):
    turn_stop = (">>",)

    def reply(self, example: Example, turns: tuple[str, ...]) -> str | None:
        return "more"


def chatty(template: str | None = TEMPLATE) -> tuple[Dialogue, Tokenizer]:
    tokenizer = tiny_tokenizer(POSITIONS)
    tokenizer.chat_template = template
    dialogue = dialogue_of(Chatty(TasksConfig()), "chatty", tokenizer)
    assert dialogue is not None
    return dialogue, tokenizer.backend_tokenizer


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_what_a_template_puts_between_two_answers_is_found_by_rendering_one() -> None:
    assert chatty()[0] == Dialogue((">>",), "<eos>", "\n[user]", "\n[assistant]")
    assert chatty(None)[0] == Dialogue((">>",))
    assert dialogue_of(Arithmetic(TasksConfig()), "one turn", tiny_tokenizer(POSITIONS)) is None


def test_a_template_without_a_second_turn_or_a_wrong_stop_text_is_one_line() -> None:
    for template, why in (("{{ raise_exception('only one') }}", "only one"), ("", "second turn")):
        with pytest.raises(RecipeError, match=why):
            chatty(template)
    for wrong in (("",), "</call>"):
        task = Chatty(TasksConfig())
        task.turn_stop = wrong  # type: ignore[assignment]
        with pytest.raises(RecipeError, match="its turn_stop is"):
            dialogue_of(task, "wrong", tiny_tokenizer(POSITIONS))


@pytest.mark.parametrize(
    ("template", "example", "last", "text"),
    [
        (TEMPLATE, CHAT, EOS, "\n[user]more\n[assistant]"),  # the end is there already
        (TEMPLATE, CHAT, PAD, "<eos>\n[user]more\n[assistant]"),  # another special token
        *((TEMPLATE, CHAT, 7, "more"), (TEMPLATE, TEXT, EOS, "more"), (None, CHAT, EOS, "more")),
    ],
)
def test_after_a_chat_models_own_end_a_reply_is_a_users_message_elsewhere_its_text(
    template: str | None, example: Example, last: int, text: str
) -> None:
    dialogue, tokenizer = chatty(template)
    assert reply_tokens("more", example, last, tokenizer, dialogue) == ids(tokenizer, text)


@pytest.mark.parametrize("is_ended", [True, False])
def test_turns_come_back_from_the_flat_record_as_they_were_said(is_ended: bool) -> None:
    dialogue, tokenizer = chatty()
    texts = ("a é answer", "more 💡\n", "last >>", " = 3", "end")
    tokens, versions = [], []
    for number, text in enumerate(texts):
        if number % 2:
            found = reply_tokens(text, CHAT, tokens[-1], tokenizer, dialogue)
        else:
            found = ids(tokenizer, text) + [EOS] * (is_ended and number == 0)
        tokens += found
        versions += [-1 if number % 2 else 2] * len(found)
    ring = TrajectoryRing(1, 200)
    logprobs = [0.0 if version < 0 else -1.0 for version in versions]
    ring.write(0, 1, ids(tokenizer, "Hi"), tokens, logprobs, versions)
    view = ring.read(0, 1)
    assert view.mask.tolist() == [0, 0, *(int(version >= 0) for version in versions)]
    assert texts_of(view, tokenizer, dialogue) == texts
    assert len(runs(view.mask)) == 5
    assert readable(texts) == "a é answer⟦more 💡\n⟧last >>⟦ = 3⟧end"
    one_turn = texts_of(view, tokenizer, None)
    assert len(one_turn) == 1 and "more" not in one_turn[0]
