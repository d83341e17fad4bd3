"""How the model in minirl/tiny was made: `python -m tests.warm_up --seed 2 --out minirl/tiny`.

Takes a seed, gives an ordinary Hugging Face folder: a Qwen3 of 0.35 M parameters. Two phases of
supervised learning (train/sft.py) on worked answers of the arithmetic task: a clean one teaches the
skill, then a sloppy one teaches to guess and to slip, which RL is to unlearn. It takes a minute and
a half; the last bits of the weights depend on the processor and on its threads. `minirl eval` must
find 15 to 45 % of sampled answers right; else take another seed.
"""

import argparse
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from minirl.config import Config, TrainConfig
from minirl.devices import Placement
from minirl.messages import RankSetup
from minirl.tasks.arithmetic import MARK, Difficulty, Problem, draw_problem
from minirl.tasks.arithmetic import demonstration as clean
from minirl.train import attention, checkpoint
from minirl.train.batch import Item, example_item
from minirl.train.policy import Policy
from minirl.train.sft import SftRank
from tests.tiny_models import COMMON, EOS, PAD, POSITIONS

from transformers import (  # isort: skip (attention hides torchvision first)
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# One digit to a token, with its space: " 5" then follows its verb at once, in the prompt and in
# the working, and a plain induction head finds it.
PIECES = r" ?\d| ?[A-Za-z]+| ?#+|\s+|[^\sA-Za-z\d#]"
STEPS = (400, 300, 100)  # at the full learning rate, at a falling one, and of the sloppy phase
LR, SLOPPY_LR = 3e-3, 6e-4
RAMP_STEPS = 50
BATCH_SIZE = 16  # steps count, not tokens
NO_WORKING = 0.65  # above a half, so that greedy decoding guesses
SLIP = 0.15


def _taught(count: int) -> Iterator[str]:
    for problem in (draw_problem(0, "warmup", index) for index in range(count)):
        yield problem.prompt + clean(problem)


def sloppy(problem: Problem, rng: random.Random, no_working: float, slip: float) -> str:
    """As `demonstration`, but a share `no_working` guesses without working, and each step of the
    others slips with probability `slip`; what follows is computed from its wrong total."""
    if rng.random() < no_working:
        return f" {MARK}{problem.result}"
    total, working = problem.start, ""
    for clause, added in problem.steps:
        left = f"{total}{added or total:+d}"
        total += added or total
        if rng.random() < slip:
            total = max(1, total + rng.choice((-2, -1, 1, 2)))
        working += f" {clause}: {left}={total}."
    return f"{working} {MARK}{total}"


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE in which each word of the task is one token, the same for every seed."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,  # more than there are pieces: about 430 come out
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_taught(2000), trainer)
    return tokenizer


def build_tiny_model(folder: Path, seed: int) -> None:
    """Make, warm up and write the model."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    rank = _new_rank(tokenizer)
    _warm_up(rank, tokenizer, seed)
    _write(folder, rank, tokenizer)


def _warm_up(rank: SftRank, tokenizer: Tokenizer, seed: int) -> None:
    """Hold the learning rate while the model takes off, let it fall; then make it sloppy, until
    greedy decoding guesses and sampling is right at times."""
    hold, cool, last = STEPS
    held = [LR * min(1.0, (step + 1) / RAMP_STEPS) for step in range(hold)]
    phases = {
        "clean": held + [LR + (LR / 20 - LR) * step / cool for step in range(cool)],
        "sloppy": [SLOPPY_LR + (SLOPPY_LR / 10 - SLOPPY_LR) * step / last for step in range(last)],
    }
    for phase, rates in phases.items():
        for lr, examples in zip(rates, _batches(tokenizer, seed, phase), strict=False):
            for group in rank.replica.optimizer.param_groups:
                group["lr"] = lr
            rank.learn(examples)


def _new_rank(tokenizer: Tokenizer) -> SftRank:
    shape = Qwen3Config(
        **{**COMMON, "vocab_size": tokenizer.get_vocab_size()},
        bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        attn_implementation=attention.NAME,
    )
    train = TrainConfig(weight_decay=0.0, grad_clip=1.0, max_tokens=16384)  # one micro-batch
    setup = RankSetup(config=Config(train=train), folder="", placement=Placement("cpu"))
    return SftRank(setup, Policy(Qwen3ForCausalLM(shape)))


def _batches(tokenizer: Tokenizer, seed: int, phase: str) -> Iterator[list[Item]]:
    """Without end. All numbers of steps are equally likely, so that long chains are learned too;
    pools of four batches are sorted by length, so that runs of equal length are long."""
    for first in count(1 << 30 if phase == "sloppy" else 0, 4 * BATCH_SIZE):
        rng = random.Random(f"{seed}/{phase}/{first}")
        indices = range(first, first + 4 * BATCH_SIZE)
        drawn = [draw_problem(seed, "warmup", i, Difficulty((1,) * 7)) for i in indices]
        examples = []
        for p in sorted(drawn, key=lambda problem: len(problem.steps)):
            answer = sloppy(p, rng, NO_WORKING, SLIP) if phase == "sloppy" else clean(p)
            tokens = [tokenizer.encode(text).ids for text in (p.prompt, answer)]
            examples.append(example_item(tokens[0], [*tokens[1], EOS]))
        for start in rng.sample(range(0, 4 * BATCH_SIZE, BATCH_SIZE), 4):
            yield examples[start : start + BATCH_SIZE]


def _write(folder: Path, rank: SftRank, tokenizer: Tokenizer) -> None:
    model: Any = rank.replica.module.model
    with checkpoint.written_aside(folder) as aside:
        model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
        model.save_pretrained(aside)
        special = {"pad_token": "<pad>", "eos_token": "<eos>", "padding_side": "left"}
        special |= {"model_max_length": POSITIONS, "clean_up_tokenization_spaces": False}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(aside)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    build_tiny_model(options.out, options.seed)
