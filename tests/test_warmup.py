"""The tiny model that comes with minirl is made as tests/warm_up.py makes it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minirl.config import TINY_FOLDER
from minirl.tasks.arithmetic import demonstration, draw_problem
from tests import warm_up
from tests.warm_up import EOS, build_tiny_model, build_tokenizer

FILES = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}


def test_it_is_made_as_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "STEPS", (2, 2, 2))
    folder = tmp_path / "tiny"
    build_tiny_model(folder, 2)
    assert {path.name for path in folder.iterdir()} == FILES | {"tokenizer_config.json"}
    problem = draw_problem(0, "train", 0)
    text, shapes = problem.prompt + demonstration(problem) + "\n Ω  naïve — 3,000", []
    for here in (folder, TINY_FOLDER):
        model = AutoModelForCausalLM.from_pretrained(here)
        tokenizer = AutoTokenizer.from_pretrained(here)
        assert (model.dtype, model.config.head_dim) == (torch.float32, 32)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id == EOS
        assert model.config.vocab_size == len(tokenizer)
        # The loaded tokenizer must cut as the one in training did, not as Qwen's own class would.
        assert tokenizer(text)["input_ids"] == build_tokenizer().encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
        shapes.append({name: tensor.shape for name, tensor in model.state_dict().items()})
    assert shapes[0] == shapes[1]
