"""Tiny random models as ordinary Hugging Face folders: no warm-up, written in a moment."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minirl.devices import hide_broken_torchvision

hide_broken_torchvision()

import transformers  # noqa: E402

PAD, EOS, VOCAB, POSITIONS = 0, 1, 384, 512
COMMON: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=128, intermediate_size=256)
COMMON |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
COMMON |= dict(head_dim=32, max_position_embeddings=POSITIONS)  # vLLM on CPU refuses 16
# The usual initializer_range, 0.02, learns several times more slowly at this size.
COMMON |= dict(initializer_range=0.07, eos_token_id=EOS, pad_token_id=PAD, bos_token_id=None)


def write(
    folder: Path,
    tied: bool = True,
    seed: int = 0,
    kind: str = "Qwen3Config",
    own_tokenizer: Tokenizer | None = None,
    **values: Any,
) -> Path:
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**{**COMMON, **values}, tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(config)
    special = {"eos_token_id": EOS, "pad_token_id": PAD}
    model.generation_config = transformers.GenerationConfig(**special)
    model.save_pretrained(folder)
    tokenizer(POSITIONS, own_tokenizer).save_pretrained(folder)
    return folder


def tokenizer(max_length: int, own: Tokenizer | None = None) -> Any:
    """By default one token a byte: fewer than the model has rows."""
    if own is None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {piece: i for i, piece in enumerate(["<pad>", "<eos>", *alphabet])}
        own = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        own.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "padding_side": "left"}
    special |= {"model_max_length": max_length, "clean_up_tokenization_spaces": False}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, **special)
