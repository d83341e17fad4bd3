"""Tiny random models as ordinary Hugging Face folders: no warm-up, written in a moment."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minirl.devices import hide_broken_torchvision

hide_broken_torchvision()

import transformers  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

PAD, EOS, VOCAB, POSITIONS = 0, 1, 384, 512
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,  # vLLM on CPU refuses 16
    max_position_embeddings=POSITIONS,
    initializer_range=0.07,  # 0.02, the usual, learns several times more slowly at this size
    eos_token_id=EOS,
    pad_token_id=PAD,
)


def write(
    folder: Path, tied: bool = True, seed: int = 0, kind: Any = Qwen3Config, **values: Any
) -> Path:
    torch.manual_seed(seed)
    kind = getattr(transformers, kind) if isinstance(kind, str) else kind
    config = kind(**{**COMMON, **values}, bos_token_id=None, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    tokenizer(POSITIONS).save_pretrained(folder)
    return folder


def tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """One token a byte: fewer than the model has rows."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(["<pad>", "<eos>", *alphabet])}
    plain = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", model_max_length=max_length
    )
