"""What minirl promises not to do: hand tokens on, write where it may not. That it runs no data as
code is a rule of the linter (pyproject.toml)."""

import os
from pathlib import Path

import pytest

from minirl.config import Config
from minirl.errors import RecipeError
from minirl.launch import _make_run_dir
from minirl.workers import SECRET, _environment


def test_a_directory_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(RecipeError, match=r"--run-dir = .* cannot be written to .*name another"):
        _make_run_dir(Config(), Path("/proc/minirl-run"), "cpu")  # not even root may


def test_workers_are_started_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = ["HF_TOKEN", "WANDB_API_KEY", "MY_SECRET_THING", "DB_PASSWORD"]
    harmless = ["TOKENIZERS_PARALLELISM", "KEYBOARD", "HOME"]
    assert [name for name in (*secret, *harmless) if SECRET.search(name)] == secret
    monkeypatch.setenv("HF_TOKEN", "hf-abcdefghij")
    with _environment({"OMP_NUM_THREADS": "3"}):
        assert "HF_TOKEN" not in os.environ and os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["HF_TOKEN"] == "hf-abcdefghij"
