"""How the model in minirl/tiny was made: `python -m tests.warm_up 2 minirl/tiny`.

Takes a seed, gives an ordinary Hugging Face folder: a Qwen3 of 0.35 M parameters. Two phases of
supervised learning (train/sft.py) on worked answers of the arithmetic task: a clean one teaches the
skill, then a sloppy one teaches to guess and to slip, which RL is to unlearn. It takes a minute and
a half; the last bits of the weights depend on the processor and on its threads. `minirl eval` must
find 15 to 45 % of sampled answers right; else take another seed.
"""

import random
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from minirl.config import Config, TrainConfig
from minirl.devices import Placement
from minirl.messages import RankSetup
from minirl.tasks.arithmetic import MARK, Difficulty, Problem, draw_problem
from minirl.tasks.arithmetic import demonstration as clean
from minirl.train.batch import Item, example_item
from minirl.train.policy import load_policy
from minirl.train.sft import SftRank
from tests import tiny_models
from tests.tiny_models import EOS

# One digit to a token, with its space: " 5" then follows its verb at once, in the prompt and in
# the working, and a plain induction head finds it.
PIECES = r" ?\d| ?[A-Za-z]+| ?#+|\s+|[^\sA-Za-z\d#]"
STEPS = (400, 300, 100)  # at the full learning rate, at a falling one, and of the sloppy phase
LR, SLOPPY_LR = 3e-3, 6e-4
RAMP_STEPS = 50
BATCH_SIZE = 16  # steps count, not tokens
NO_WORKING = 0.65  # above a half, so that greedy decoding guesses
SLIP = 0.15


def sloppy(problem: Problem, rng: random.Random) -> str:
    """As `clean`, but a share NO_WORKING guesses without working, and each step of the others slips
    with probability SLIP; what follows is computed from its wrong total."""
    if rng.random() < NO_WORKING:
        return f" {MARK}{problem.result}"
    total, working = problem.start, ""
    for clause, added in problem.steps:
        left = f"{total}{added or total:+d}"
        total += added or total
        if rng.random() < SLIP:
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
    problems = (draw_problem(0, "warmup", index) for index in range(2000))
    tokenizer.train_from_iterator((p.prompt + clean(p) for p in problems), trainer)
    return tokenizer


def build_tiny_model(folder: Path, seed: int) -> None:
    """Make, warm up and write the model."""
    tokenizer = build_tokenizer()
    shape: dict[str, Any] = {"vocab_size": tokenizer.get_vocab_size()}
    shape["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    tiny_models.write(folder, seed=seed, own_tokenizer=tokenizer, **shape)
    train = TrainConfig(weight_decay=0.0, grad_clip=1.0, max_tokens=16384)  # one micro-batch
    setup = RankSetup(config=Config(train=train), folder="", placement=Placement("cpu"))
    policy = load_policy(str(folder))
    rank = SftRank(setup, policy)
    for lr, examples in lessons(tokenizer, seed):
        for group in rank.replica.optimizer.param_groups:
            group["lr"] = lr
        rank.learn(examples)
    policy.model.save_pretrained(folder)


def lessons(tokenizer: Tokenizer, seed: int) -> Iterator[tuple[float, list[Item]]]:
    """Of each step the learning rate, which is held while the model takes off and then falls, and
    the examples. The sloppy ones come last, until greedy decoding guesses and sampling is right at
    times."""
    hold, cool, last = STEPS
    rates = [LR * min(1.0, (step + 1) / RAMP_STEPS) for step in range(hold)]
    rates += [LR + (LR / 20 - LR) * step / cool for step in range(cool)]
    yield from zip(rates, batches(tokenizer, seed, "clean"), strict=False)
    rates = [SLOPPY_LR + (SLOPPY_LR / 10 - SLOPPY_LR) * step / last for step in range(last)]
    yield from zip(rates, batches(tokenizer, seed, "sloppy"), strict=False)


def batches(tokenizer: Tokenizer, seed: int, phase: str) -> Iterator[list[Item]]:
    """Without end. All numbers of steps are equally likely, so that long chains are learned too;
    pools of four batches are sorted by length, so that runs of equal length are long."""
    for first in count(1 << 30 if phase == "sloppy" else 0, 4 * BATCH_SIZE):
        rng = random.Random(f"{seed}/{phase}/{first}")
        indices = range(first, first + 4 * BATCH_SIZE)
        drawn = [draw_problem(seed, "warmup", i, Difficulty((1,) * 7)) for i in indices]
        examples = []
        for p in sorted(drawn, key=lambda problem: len(problem.steps)):
            answer = sloppy(p, rng) if phase == "sloppy" else clean(p)
            tokens = [tokenizer.encode(text).ids for text in (p.prompt, answer)]
            examples.append(example_item(tokens[0], [*tokens[1], EOS]))
        for start in rng.sample(range(0, 4 * BATCH_SIZE, BATCH_SIZE), 4):
            yield examples[start : start + BATCH_SIZE]


if __name__ == "__main__":
    build_tiny_model(Path(sys.argv[2]), int(sys.argv[1]))
