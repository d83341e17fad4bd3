"""The model's folder: where it is and what is in it. Reads files, loads no weights.

Takes the recipe's [model], gives a local Hugging Face folder, the table of its tensors (from the
safetensors headers) and its tokenizer. This is all of the model that the controller ever sees.
"""

import json
import os
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import urlopen

from minirl import devices
from minirl.config import TINY, TINY_FOLDER, Config
from minirl.errors import RecipeError, one_line
from minirl.recipe import find_model

if TYPE_CHECKING:
    from minirl.shm.weights import TensorSpec

# Tokenizer classes of which tokenizer.json is all.
WHOLE = ("PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", "Qwen2TokenizerFast")


def local_folder(config: Config, weights: bool = True) -> Path:
    """A local folder as it is; a hub name by download, or from the cache without a network."""
    path, found = config.model.path, find_model(config)
    if path == TINY or Path(path).is_dir():
        return found or TINY_FOLDER
    ask_hub()
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.txt", "*.jinja", "*.model", *(["*.safetensors"] if weights else ())]
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except Exception as error:  # the hub library raises a dozen kinds of its own
        rule = f"cannot be had from the hub ({type(error).__name__})"
        remedy = "check the name and the network, or give a local folder"
        raise RecipeError("model.path", path, rule, remedy) from None


@cache
def ask_hub() -> None:
    """Without a network the hub's libraries retry each file for many seconds. So it is asked once,
    and if nothing answers they use their cache alone, here and in all workers."""
    from huggingface_hub import constants

    try:
        if not constants.HF_HUB_OFFLINE:
            urlopen(constants.ENDPOINT, timeout=10).close()
    except HTTPError:
        pass  # an answer too
    except OSError:
        constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"


def weight_table(folder: Path) -> "tuple[TensorSpec, ...]":
    """Every tensor of the checkpoint, in a fixed order. A tied head is the embedding: left out."""
    from safetensors import SafetensorError, safe_open

    from minirl.shm.weights import TensorSpec  # not at the top: it loads torch

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        remedy = "pickled weights are never loaded"
        raise RecipeError("model.path", str(folder), "has no *.safetensors", remedy)
    table = []
    for path in files:
        try:
            with safe_open(path, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    table.append(TensorSpec(name, tuple(tensors.get_slice(name).get_shape())))
        except (OSError, SafetensorError) as error:
            rule = f"its {path.name} cannot be read ({one_line(str(error))})"
            raise RecipeError("model.path", str(folder), rule, "fetch the model again") from None
    is_tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False)
    return tuple(spec for spec in table if not (is_tied and spec.name == "lm_head.weight"))


def check_folder(folder: Path) -> None:
    """What can be seen of weights and tokenizer without loading them; a trainer rank, which loads
    them, compares every shape."""
    weight_table(folder)
    if not (folder / "tokenizer.json").is_file():
        remedy = "copy it there: AutoTokenizer.from_pretrained(name).save_pretrained(folder)"
        raise RecipeError("model.path", str(folder), "has no tokenizer.json", remedy)


def tokenizer_of(config: Config, folder: Path) -> Any:
    """The folder's tokenizer, whose chat template is given tasks.template."""
    tokenizer, options = load_tokenizer(folder), config.tasks.template
    for name in options:
        if name not in str(tokenizer.chat_template):
            rule = f"the model's chat template does not read {name}"
            if tokenizer.chat_template is None:
                rule = "the model has no chat template"
            raise RecipeError("tasks.template", options, rule, "leave it out")
    if options:
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **options)
    return tokenizer


def load_tokenizer(folder: Path) -> Any:
    """Without transformers and torch, which take seconds to import, where tokenizer.json is all
    there is to it, and no chat template."""
    config, path = folder / "tokenizer_config.json", folder / "tokenizer.json"
    try:
        about = json.loads(config.read_text()) if config.is_file() else {}
        is_whole = about.get("tokenizer_class") in WHOLE and path.is_file()
        has_template = about.get("chat_template") or (folder / "chat_template.jinja").exists()
        if is_whole and not has_template:
            return PlainTokenizer(path, about)
        devices.hide_broken_torchvision()
        import transformers

        if is_whole:
            return transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        return transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of many kinds, down to a bare Exception of the Rust library
        rule = f"its tokenizer cannot be loaded ({one_line(str(error))})"
        raise RecipeError("model.path", str(folder), rule, "fetch the model again") from None


class PlainTokenizer:
    """A tokenizer.json without a chat template, read by the tokenizers library alone."""

    chat_template = None

    def __init__(self, path: Path, about: dict[str, Any]):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        end = about.get("eos_token") or ""  # its text, or a table with its text in it
        text = end["content"] if isinstance(end, dict) else end
        self.eos_token_id: int | None = self._tokenizer.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
