"""The tiny model: its tokenizer, its folder, and builds that are cut short or run twice."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minirl.errors import MinirlError
from minirl.tasks.arithmetic import Stream, demonstration, draw_problem
from minirl.train import tiny
from minirl.train.tiny import EOS, build_tiny_model, build_tokenizer, tiny_model_folder

# The same path in seconds: a few steps, and any skill will do.
MINIATURE = {"STEPS": (2, 2, 2), "SAMPLED": (0.0, 1.0), "NUM_PROBES": 8}
WEIGHTS = "model.safetensors"
FILES = {WEIGHTS, *(f"{name}.json" for name in ("config", "generation_config"))}
FILES |= {"tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(autouse=True, scope="module")
def miniature() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in MINIATURE.items():
            patch.setattr(tiny, name, value)
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "tiny"
    build_tiny_model(folder, 0, print)
    return folder


def test_digits_are_split_and_every_text_comes_back() -> None:
    tokenizer = build_tokenizer()
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(" 12+345").ids]
    assert pieces == [" 1", "2", "+", "3", "4", "5"]
    vocabulary = (tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size()))
    assert not any(sum(c.isdigit() for c in piece) > 1 for piece in vocabulary)
    for text in ("Tom has 7 apples.\n\n Ω  naïve — 3,000 #### 9", " #### 9"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_folder_loads_with_transformers(built: Path) -> None:
    assert {path.name for path in built.iterdir()} == FILES
    model = AutoModelForCausalLM.from_pretrained(built)
    tokenizer = AutoTokenizer.from_pretrained(built)
    assert (model.dtype, model.config.head_dim) == (torch.float32, 32)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == EOS
    assert model.config.vocab_size == len(tokenizer)
    problem = draw_problem(0, Stream.TRAIN, 0)
    text = problem.prompt + demonstration(problem)
    # The loaded tokenizer must cut as the one in training did, not as Qwen's own class would.
    assert tokenizer(text)["input_ids"] == build_tokenizer().encode(text).ids


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights(built: Path, tmp_path: Path) -> None:
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    for seed in (0, 1):
        build_tiny_model(tmp_path / str(seed), seed, print)
        is_equal = (tmp_path / str(seed) / WEIGHTS).read_bytes() == (built / WEIGHTS).read_bytes()
        assert is_equal == (seed == 0)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.slow
def test_of_two_processes_one_builds_and_a_killed_one_leaves_no_half_folder(tmp_path: Path) -> None:
    def build() -> subprocess.Popen[str]:
        shorter = f"vars(tiny).update({MINIATURE!r})"
        ensure = "print(tiny.ensure_tiny_model(0, lambda line: None))"
        program = f"from minirl.train import tiny\n{shorter}\n{ensure}"
        env = {**os.environ, "MINIRL_CACHE": str(tmp_path)}
        return subprocess.Popen([sys.executable, "-c", program], env=env, stdout=-1, text=True)

    folder, process = tmp_path / tiny_model_folder(0).name, build()
    while process.poll() is None and not list(tmp_path.glob(f".{folder.name}.*")):
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not folder.exists() or {path.name for path in folder.iterdir()} == FILES
    printed = [process.communicate()[0].strip() for process in [build(), build()]]
    assert printed == [str(folder), str(folder)]
    assert {path.name for path in folder.iterdir()} == FILES


def test_a_model_that_fails_its_probe_is_given_up_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(tiny, "MAX_ATTEMPTS", 2)
    monkeypatch.setattr(tiny, "SAMPLED", (2.0, 3.0))
    with pytest.raises(MinirlError, match="2 attempts"):
        build_tiny_model(tmp_path / "tiny", 0, lines.append)
    assert sum("retrying" in line for line in lines) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_cache_folder_follows_the_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIRL_CACHE", "/cache")
    before = tiny_model_folder(3)
    assert before.parent == Path("/cache") and before != tiny_model_folder(4)
    monkeypatch.setattr(tiny, "LR", 1e-3)
    assert tiny_model_folder(3) != before
