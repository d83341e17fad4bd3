"""What the tiny model is, its tokenizer, and where it is kept. No torch: the controller looks here.

Takes a seed, gives a folder in the cache; warmup.py says how the model in it is made.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minirl.tasks.arithmetic import Stream, demonstration, draw_problem

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# One digit to a token, with its space: " 5" then follows its verb at once, in the prompt and in
# the working, and a plain induction head finds it. As " " and "5" it would follow a token that is
# everywhere.
PIECES = r" ?\d| ?[A-Za-z]+| ?#+|\s+|[^\sA-Za-z\d#]"


@dataclass(frozen=True)
class Recipe:
    """Every constant of the warm-up; the cache's name has a hash of them."""

    hidden: int = 128
    intermediate: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32  # vLLM on CPU refuses 16
    positions: int = 512
    rope_theta: float = 1e4
    init: float = 0.07  # 0.02, the usual, learns several times more slowly at this size
    batch_size: int = 16  # steps count, not tokens
    lr: float = 3e-3
    ramp_steps: int = 50
    probe_every: int = 50
    num_probes: int = 128
    take_off: float = 0.25
    """Accuracy at which the learning rate starts to fall."""
    max_hold_steps: int = 900
    """A model that has not taken off by then is given up."""
    cool_steps: int = 300
    again_steps: int = 100
    max_cools: int = 5
    """The learning rate falls over cool_steps, then over again_steps until the skill is there."""
    skill: float = 0.95
    """Accuracy that ends the clean phase."""
    sloppy_lr: float = 6e-4
    sloppy_steps: int = 100
    max_sloppies: int = 3
    no_working: float = 0.65
    """Share of sloppy demonstrations that only guess: above a half, so greedy decoding guesses."""
    slip: float = 0.15
    max_greedy: float = 0.40
    sampled: tuple[float, float] = (0.15, 0.45)
    max_attempts: int = 5


RECIPE = Recipe()


def tiny_model_folder(seed: int, recipe: Recipe = RECIPE) -> Path:
    """Where the tiny model of this seed and this recipe is kept."""
    root = os.environ.get("MINIRL_CACHE")
    cache = Path(root) if root else Path.home() / ".cache" / "minirl"
    return cache / f"tiny-{_recipe_hash(recipe)}-seed{seed}"


def _recipe_hash(recipe: Recipe) -> str:
    """Of the constants and of a sample of the task, so that a changed task is a new model too."""
    problems = [draw_problem(0, Stream.WARMUP, index) for index in range(50)]
    taught = "".join(p.prompt + demonstration(p) for p in problems)
    return hashlib.sha256(f"{recipe}{PIECES}{taught}".encode()).hexdigest()[:8]


def build_tokenizer() -> "Tokenizer":
    """Byte-level BPE in which each word of the task is one token, the same for every seed."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    problems = [draw_problem(0, Stream.WARMUP, index) for index in range(2000)]
    trainer = trainers.BpeTrainer(
        vocab_size=512,  # more than there are pieces: about 430 come out
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((p.prompt + demonstration(p) for p in problems), trainer)
    return tokenizer


class TinyTokenizer:
    """The same as the folder's, for who only wants to look at prompts: needs no model built."""

    chat_template = None

    def __init__(self) -> None:
        self._tokenizer = build_tokenizer()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids
