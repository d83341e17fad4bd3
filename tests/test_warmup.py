"""The tiny model that comes with minirl is made as tests/warm_up.py makes it."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minirl.config import TINY_FOLDER
from minirl.tasks.arithmetic import demonstration, draw_problem
from tests import warm_up
from tests.tiny_models import EOS


def test_it_is_made_as_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "STEPS", (2, 2, 2))
    warm_up.build_tiny_model(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == sorted(os.listdir(TINY_FOLDER))
    problem = draw_problem(0, "train", 0)
    text, shapes = problem.prompt + demonstration(problem) + "\n Ω  naïve — 3,000", []
    for here in (tmp_path, TINY_FOLDER):
        model = AutoModelForCausalLM.from_pretrained(here)
        tokenizer = AutoTokenizer.from_pretrained(here)
        assert (model.dtype, model.config.head_dim) == (torch.float32, 32)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id == EOS
        assert model.config.vocab_size == len(tokenizer)
        # The loaded tokenizer must cut as the one in training did, not as Qwen's own class would.
        assert tokenizer(text)["input_ids"] == warm_up.build_tokenizer().encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
        shapes.append({name: tensor.shape for name, tensor in model.state_dict().items()})
    assert shapes[0] == shapes[1]
