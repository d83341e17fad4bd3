"""The tiny model that comes with minirl, and the way in which it was made."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minirl.config import TINY_FOLDER
from minirl.errors import MinirlError
from minirl.tasks.arithmetic import Stream, demonstration, draw_problem
from tests import warm_up
from tests.warm_up import EOS, build_tiny_model, build_tokenizer

FILES = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}


@pytest.fixture(autouse=True)
def miniature(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same path in seconds: a few steps, and any skill will do."""
    for name, value in {"STEPS": (2, 2, 2), "SAMPLED": (0.0, 1.0), "NUM_PROBES": 8}.items():
        monkeypatch.setattr(warm_up, name, value)


def test_digits_are_split_and_every_text_comes_back() -> None:
    tokenizer = build_tokenizer()
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(" 12+345").ids]
    assert pieces == [" 1", "2", "+", "3", "4", "5"]
    vocabulary = (tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size()))
    assert not any(sum(c.isdigit() for c in piece) > 1 for piece in vocabulary)
    for text in ("Tom has 7 apples.\n\n Ω  naïve — 3,000 #### 9", " #### 9"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_it_is_made_as_the_one_that_comes_with_minirl(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    build_tiny_model(folder, 2)
    assert {path.name for path in folder.iterdir()} == FILES | {"tokenizer_config.json"}
    problem = draw_problem(0, Stream.TRAIN, 0)
    text, shapes = problem.prompt + demonstration(problem), []
    for here in (folder, TINY_FOLDER):
        model = AutoModelForCausalLM.from_pretrained(here)
        tokenizer = AutoTokenizer.from_pretrained(here)
        assert (model.dtype, model.config.head_dim) == (torch.float32, 32)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id == EOS
        assert model.config.vocab_size == len(tokenizer)
        # The loaded tokenizer must cut as the one in training did, not as Qwen's own class would.
        assert tokenizer(text)["input_ids"] == build_tokenizer().encode(text).ids
        shapes.append({name: tensor.shape for name, tensor in model.state_dict().items()})
    assert shapes[0] == shapes[1]


def test_a_model_that_fails_its_probe_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "MAX_ATTEMPTS", 2)
    monkeypatch.setattr(warm_up, "SAMPLED", (2.0, 3.0))
    with pytest.raises(MinirlError, match="2 attempts"):
        build_tiny_model(tmp_path / "tiny", 0)
    assert list(tmp_path.iterdir()) == []
