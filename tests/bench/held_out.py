"""Held-out accuracy of any version of a run, from its kept weights when the run is over.

A part of the async bench. Answers are sampled by transformers, as the recipe's [eval] says,
and graded by the task itself; no clock runs meanwhile.
"""

from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import load_file

from minirl import devices
from minirl.model import load_tokenizer
from minirl.recipe import load
from minirl.records import Answer, Example, StopReason
from minirl.tasks.prompts import encode
from minirl.tasks.registry import make_task

SEED = 7  # of sampling, the same for every version


class HeldOut:
    def __init__(self, pipe: Connection, folder: str, recipe: Path, num_problems: int):
        devices.hide_broken_torchvision()
        from transformers import AutoModelForCausalLM

        self.config = load(recipe).config
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = load_tokenizer(Path(folder))
        self.task = make_task(self.config)
        self.examples = list(self.task.heldout(num_problems))

    @torch.no_grad()
    def accuracy(self, weights: Path) -> float:
        """Axes: B problems, L tokens, padded on the left."""
        missing, unknown = self.model.load_state_dict(load_file(weights), strict=False)
        assert not unknown and set(missing) <= {"lm_head.weight"}  # which is tied: there once
        torch.manual_seed(SEED)
        prompts = [list(encode(example, self.tokenizer)) for example in self.examples]
        longest, pad = max(map(len, prompts)), self.tokenizer.eos_token_id  # masked
        whole_BL = self.model.generate(
            torch.tensor([[pad] * (longest - len(p)) + p for p in prompts]),
            attention_mask=torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
            do_sample=self.config.eval.temperature > 0,
            temperature=self.config.eval.temperature or None,
            top_k=0,
            max_new_tokens=self.config.rollout.max_new_tokens,
            pad_token_id=pad,
        )
        answers = whole_BL[:, longest:].tolist()
        right = [self.reward(e, a) for e, a in zip(self.examples, answers, strict=True)]
        return sum(right) / len(right)

    def reward(self, example: Example, tokens: list[int]) -> float:
        eos = self.tokenizer.eos_token_id
        has_ended = eos in tokens
        written = tokens[: tokens.index(eos) + 1] if has_ended else tokens
        text = self.tokenizer.decode(written, skip_special_tokens=True)
        stop = StopReason.STOP if has_ended else StopReason.LENGTH
        return self.task.reward(example, Answer(text, stop, len(written)))


def accuracy_of(held_out: HeldOut, weights: Path) -> float:
    return held_out.accuracy(weights)
