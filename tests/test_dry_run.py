"""`minirl train --dry-run` refuses what `minirl train` would refuse, in one line, at once."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minirl import cli, model
from minirl.config import TINY_FOLDER
from minirl.errors import RecipeError
from minirl.recipe import check_model, kv_bytes_per_token, load

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}{% if not loud %}.{% endif %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(TINY_FOLDER, tmp_path / "model")
    (tmp_path / "r.toml").write_text('[model]\npath = "model"\n[devices]\nkind = "cpu"\n')
    return tmp_path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def pickled(path: Path) -> None:
    path.rename(path.with_name("pytorch_model.bin"))


@pytest.mark.parametrize(
    ("harm", "name", "line"),
    [
        (Path.unlink, "tokenizer.json", "has no tokenizer.json; copy it there"),
        (pickled, "model.safetensors", "has no *.safetensors; pickled weights are never loaded"),
        (cut, "model.safetensors", "its model.safetensors cannot be read ("),
        (None, "tasks.options.no=1", "tasks.options.no = 1: is no option of this task"),
        (None, "tasks.options.step_weights=1", "must be of type list"),
        (None, "tasks.max_prompt_tokens=1", "none of 64 prompts is as short as that; raise it to"),
        (None, "rollout.stop_tokens=[5,428]", "the model has only the tokens below 428"),
        (None, "rollout.kv_cache_gib=3e-4", "one sequence of 384 tokens needs 0.000366; raise it"),
        (None, "tasks.template.loud=true", "the model has no chat template; leave it out"),
        (None, "model.path=./gone", "no such folder, nor a hub name"),
        (None, "model.path=model/gone", "no such folder, nor a hub name"),
        (None, "model.path=~/gone/x", "no such folder, nor a hub name"),
        (None, "tasks.kind=gsm8k --set tasks.data=/gone", "FileNotFoundError: there is no such"),
    ],
)
def test_it_is_refused(
    folder: Path, harm: object, name: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(model, "ask_hub", lambda: pytest.fail("the hub was asked"))
    if callable(harm):
        harm(folder / "model" / name)
    with pytest.raises(RecipeError) as caught:
        overrides = [] if harm else name.split(" --set ")
        cli.train(Path("r.toml"), overrides, dry_run=True)
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert not Path("runs").exists()


def test_only_layers_that_keep_all_tokens_count_for_the_kv_cache(folder: Path) -> None:
    config = load(folder / "r.toml", ["rollout.kv_cache_gib=3.7e-4"]).config
    check_model(config, folder / "model", "cpu")
    check_model(load(None, ["rollout.kv_cache_gib=1e-9"]).config, folder / "model", "cuda")
    sizes = json.loads((folder / "model/config.json").read_text())
    assert kv_bytes_per_token(config, sizes) == 2 * 2 * 2 * 32 * 4
    sizes["layer_types"][0] = "sliding_attention"
    assert kv_bytes_per_token(config, sizes) == 2 * 1 * 2 * 32 * 4


def test_the_chat_template_is_given_the_recipes_table(folder: Path) -> None:
    (folder / "model/chat_template.jinja").write_text(CHAT)
    chat = [{"role": "user", "content": "Hi"}]
    for options, text in (([], "Hi."), (["tasks.template.loud=true"], "Hi")):
        config = load(folder / "r.toml", options).config
        tokenizer = model.tokenizer_of(config, folder / "model")
        assert tokenizer.apply_chat_template(chat, tokenize=False) == text
    with pytest.raises(RecipeError, match="chat template does not read lud"):
        config = load(folder / "r.toml", ["tasks.template.lud=true"]).config
        model.tokenizer_of(config, folder / "model")


def test_without_a_network_the_hub_is_asked_once() -> None:
    program = """
import os, sys
import huggingface_hub.constants
from minirl import model
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:1"  # where nothing answers
os.environ.pop("HF_HUB_OFFLINE", None)
huggingface_hub.constants.HF_HUB_OFFLINE = False
model.ask_hub()
assert model.is_offline() and huggingface_hub.constants.is_offline_mode()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
