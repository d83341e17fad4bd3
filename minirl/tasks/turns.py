"""Several turns: between the texts that a task sees and the flat tokens of one trajectory.

Takes tokens and mask, gives the texts of the turns: a run of written tokens is a turn of the model,
a run without mask after it is the reply. The other way only a reply's own text is tokenised. After
a chat model's own end a reply is a user's message, in what the template puts between two answers
(rendering a conversation of known words finds that once); elsewhere it is its text alone.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minirl.errors import RecipeError
from minirl.records import Example
from minirl.shm.ring import TrajectoryView
from minirl.tasks import Task, has_turns
from minirl.tasks.prompts import has_template


class Dialogue(NamedTuple):
    """What engines and verifiers must know of a task with several turns."""

    stop: tuple[str, ...] = ()  # texts that end a turn
    end: str = ""  # what a chat template puts after an answer: its first token
    before: str = ""  # the rest, up to the user's message
    after: str = ""  # what it puts after that, up to the model's next answer


def dialogue_of(task: Task, kind: str, tokenizer: Any) -> Dialogue | None:
    """None: the task has one turn."""
    if not has_turns(task):
        return None
    stop = task.turn_stop
    if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
        rule = f"its turn_stop is {stop!r}"
        raise RecipeError("tasks.kind", kind, rule, 'a tuple of texts, such as ("</call>",)')
    if not has_template(tokenizer):
        return Dialogue(stop)
    said = {"FirstQuestion": "user", "FirstAnswer": "assistant", "SecondQuestion": "user"}
    messages = [{"role": role, "content": text} for text, role in said.items()]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, after = text.split("FirstAnswer")[1].split("SecondQuestion")
    except Exception as error:  # a template is a program of its own
        rule = f"it replies, and the model's chat template has no second turn ({error})"
        raise RecipeError("tasks.kind", kind, rule, "take a model whose template has") from None
    end = tokenizer.decode(tokenizer.encode(before, add_special_tokens=False)[:1])
    return Dialogue(stop, end, before.removeprefix(end), after)


def runs(mask: NDArray[np.uint8]) -> list[slice]:
    """After the prompt: the model's tokens, a reply's, the model's, …"""
    edges = (np.flatnonzero(np.diff(mask)) + 1).tolist()
    return [slice(a, b) for a, b in pairwise([*edges, len(mask)])]


def texts_of(view: TrajectoryView, tokenizer: Any, dialogue: Dialogue | None) -> tuple[str, ...]:
    """The model's and the task's, in turn. `tokenizer` is one of the library tokenizers."""
    if dialogue is None:
        return (tokenizer.decode(view.tokens[view.mask == 1].tolist(), skip_special_tokens=True),)
    texts = []
    for number, run in enumerate(runs(view.mask)):
        is_reply = number % 2 == 1
        text = tokenizer.decode(view.tokens[run].tolist(), skip_special_tokens=not is_reply)
        framed = text.removeprefix(dialogue.end)  # missing where the model wrote it itself
        if is_reply and framed.startswith(dialogue.before) and framed.endswith(dialogue.after):
            text = framed.removeprefix(dialogue.before).removesuffix(dialogue.after)
        texts.append(text)
    return tuple(texts)


def reply_tokens(
    text: str, example: Example, last: int, tokenizer: Any, dialogue: Dialogue
) -> list[int]:
    """`last` is the token that the model's turn ends with."""
    added = tokenizer.get_added_tokens_decoder()
    is_message = dialogue.end and not isinstance(example.prompt, str)
    if not is_message or last not in added or not added[last].special:
        return tokenizer.encode(text, add_special_tokens=False).ids
    framed = dialogue.end + dialogue.before + text + dialogue.after
    tokens = tokenizer.encode(framed, add_special_tokens=False).ids
    return tokens[1:] if tokens[0] == last else tokens


def readable(turns: tuple[str, ...]) -> str:
    """A whole conversation as one text for people, replies in ⟦ ⟧."""
    return "".join(f"⟦{text}⟧" if i % 2 else text for i, text in enumerate(turns))
