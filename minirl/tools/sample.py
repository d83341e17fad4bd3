"""`minirl sample`: a few answers to one prompt, with the logprob of each token. Takes a model.

Logprobs are those of the distribution that was sampled from; at temperature 0 the model's own.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from minirl import model
from minirl.errors import RecipeError
from minirl.launch import model_folder
from minirl.recipe import check_model
from minirl.records import Example, Prompt
from minirl.tasks.prompts import encode, has_template
from minirl.tools.collect import Attempt, Collector
from minirl.tools.evaluate import Target
from minirl.view.console import Bar


def sample(
    target: Target, text: str, count: int, is_raw: bool
) -> Iterator[tuple[Attempt, list[tuple[str, float]]]]:
    """Answers, with text and logprob of each token."""
    bar, own = Bar("answers"), target.config.devices
    config = replace(target.config, devices=replace(own, rollout=own.tensor_parallel))  # one engine
    with tempfile.TemporaryDirectory(prefix="minirl-sample-") as name:
        logs = Path(name)
        source = target.folder or model_folder(config, logs, bar.note)
        tokenizer = model.load_tokenizer(source, config.model.trust_remote_code)
        prompt = render(text, tokenizer, is_raw)
        limit = len(prompt.tokens)
        config = replace(config, tasks=replace(config.tasks, max_prompt_tokens=limit))
        check_model(config, source)
        there = Collector(config, source, tokenizer, logs, bar.note, is_graded=False)
        with there.running(count):
            for _, ended in there.answers([prompt] * count):
                answer, view = there.attempt(ended), there.view(ended)
                if view is None:
                    rule = f"vLLM refuses it ({answer.error})"
                    raise RecipeError("PROMPT", "…", rule, "shorten it")
                written = view.mask == 1
                pieces = [tokenizer.decode([token]) for token in view.tokens[written].tolist()]
                tokens = zip(pieces, view.logprobs[written].tolist(), strict=True)
                yield answer, list(tokens)


def render(text: str, tokenizer: Any, is_raw: bool) -> Prompt:
    is_chat = not is_raw and has_template(tokenizer)
    example = Example(({"role": "user", "content": text},) if is_chat else text, "")
    if tokens := encode(example, tokenizer):
        return Prompt(0, example, tokens)
    raise RecipeError("PROMPT", "", "has no token", "write something")
