"""What a model will see of a task: `minirl data`. Takes a task and a tokenizer, gives rows of text.

Training examples are looked at up to a limit (a generated task has billions), held-out ones as many
as an evaluation takes. A duplicate is a prompt that comes again, letter for letter but for case and
white space. Leaves out: rewards, but for the task's self-check.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from minirl.config import Config
from minirl.errors import toml_value
from minirl.records import Example
from minirl.tasks import Task
from minirl.tasks.check import MOST_LOOKED_AT
from minirl.tasks.prompts import encode, has_template, key_of, trained_on


def data_rows(config: Config, task: Task, tokenizer: Any) -> Iterator[tuple[str, str]]:
    train = [task.train(i) for i in range(min(task.num_train, MOST_LOOKED_AT))]
    test = task.heldout(config.eval.num_prompts)
    yield "train", f"{task.num_train:,} examples, of which {len(train):,} are looked at"
    yield from _side(train, config.tasks.max_prompt_tokens, tokenizer)
    yield "held out", f"{len(test):,} examples"
    yield from _side(test, config.tasks.max_prompt_tokens, tokenizer)
    both = trained_on(test, train)
    shown = f"{len(both)} of {len(test)} held-out prompts are trained on"
    such = f', such as "{both[0][:60]}": accuracy on them says little' if both else ""
    yield "WARNING" if both else "in both", shown + such
    none = "the model has none: a single message is its text and a line break (docs/tasks.md)"
    options = config.tasks.template
    how = f"applied with {toml_value(options)}" if options else "applied"
    template = how if has_template(tokenizer) else none
    is_text = isinstance(train[0].prompt, str)
    yield "chat template", "not used: prompts are text" if is_text else template


def _side(examples: Sequence[Example], limit: int, tokenizer: Any) -> Iterator[tuple[str, str]]:
    lengths = [len(encode(example, tokenizer)) for example in examples]
    if not (num := len(lengths)):
        return
    yield "  tokens of a prompt", f"{min(lengths)} to {max(lengths)}, mean {fmean(lengths):.0f}"
    longer = sum(length > limit for length in lengths)
    remedy = f"; tasks.max_prompt_tokens = {max(lengths)} keeps all" if longer else ""
    share = f"{longer} of {num} ({longer / num:.1%})"
    yield "  too long", f"{share} above tasks.max_prompt_tokens = {limit}{remedy}"
    yield "  duplicates", f"{num - len({*map(key_of, examples)})} prompts that came before"
