"""The tiny model: a Qwen3 of 0.35 M parameters that minirl makes and warms up itself, on a CPU.

Takes a seed; gives an ordinary Hugging Face folder in the cache. Two phases of supervised learning
(sft.py) on worked answers of the arithmetic task: a clean one that teaches the skill, then a sloppy
one that teaches to guess and to slip, which RL is to unlearn. A probe on held-out problems follows
each phase; a model that fails it is replaced by one from the next sub-seed.

torch is loaded when a model is built, not before: the controller only asks where the folder is.
Axes: B sequences, T positions.
"""

import fcntl
import hashlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from minirl.config import TasksConfig, TrainConfig
from minirl.errors import MinirlError
from minirl.records import Answer, Example, StopReason
from minirl.shm.board import BoardWriter
from minirl.tasks.arithmetic import Arithmetic, Stream, draw_problem
from minirl.tasks.arithmetic import demonstration as clean
from minirl.tasks.arithmetic import sloppy_demonstration as sloppy
from minirl.train import checkpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from minirl.train.sft import SftExample, SftRank

Report = Callable[[str], None]

PAD, EOS = 0, 1
POSITIONS = 512
# One digit to a token, with its space: " 5" then follows its verb at once, in the prompt and in
# the working, and a plain induction head finds it.
PIECES = r" ?\d| ?[A-Za-z]+| ?#+|\s+|[^\sA-Za-z\d#]"
MODEL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM on CPU refuses 16
    "max_position_embeddings": POSITIONS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "initializer_range": 0.07,  # 0.02, the usual, learns several times more slowly at this size
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Schedule:
    """Steps and learning rates of the warm-up, and what the probe must find."""

    batch_size: int = 16  # steps count, not tokens
    lr: float = 3e-3
    ramp_steps: int = 50
    hold_steps: int = 400
    cool_steps: int = 300
    num_probes: int = 128
    min_skill: float = 0.9  # greedy accuracy after the clean phase
    sloppy_lr: float = 6e-4
    sloppy_steps: int = 100
    no_working: float = 0.65  # above a half, so that greedy decoding guesses
    slip: float = 0.15
    max_greedy: float = 0.40  # accuracy after the sloppy phase
    sampled: tuple[float, float] = (0.15, 0.45)
    max_attempts: int = 5


SCHEDULE = Schedule()


def tiny_model_folder(seed: int, schedule: Schedule = SCHEDULE) -> Path:
    """Named by a hash of the constants and of a sample of the task: others give another model."""
    cache = Path(os.environ.get("MINIRL_CACHE") or Path.home() / ".cache" / "minirl")
    taught = "".join(_taught(50))
    key = hashlib.sha256(f"{MODEL}{schedule}{PIECES}{taught}".encode()).hexdigest()[:8]
    return cache / f"tiny-{key}-seed{seed}"


def _taught(count: int) -> Iterator[str]:
    for problem in (draw_problem(0, Stream.WARMUP, index) for index in range(count)):
        yield problem.prompt + clean(problem)


def ensure_tiny_model(seed: int, report: Report, schedule: Schedule = SCHEDULE) -> Path:
    """The folder, built when absent. Of two processes one builds and the other waits."""
    folder = tiny_model_folder(seed, schedule)
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when its holder ends, however it ends
        if not folder.exists():
            build_tiny_model(folder, seed, report, schedule)
    return folder


def run(seed: int, board: BoardWriter, pipe: Connection) -> None:
    """The body of the process that builds it; it sends lines for a person to read."""
    ensure_tiny_model(seed, pipe.send)


def build_tokenizer() -> "Tokenizer":
    """Byte-level BPE in which each word of the task is one token, the same for every seed."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

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


def tiny_tokenizer() -> SimpleNamespace:
    """The same as the folder's, for a look at prompts: needs no model built."""
    tokenizer = build_tokenizer()
    return SimpleNamespace(chat_template=None, encode=lambda text: tokenizer.encode(text).ids)


def build_tiny_model(
    folder: Path, seed: int, report: Report, schedule: Schedule = SCHEDULE
) -> None:
    """Make, warm up and write the model."""
    import torch

    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        for attempt in range(schedule.max_attempts):
            sub_seed = seed + 1_000_003 * attempt
            torch.manual_seed(sub_seed)
            rank = _new_rank(tokenizer, schedule.lr)
            if Warmup(rank, tokenizer, schedule, sub_seed, report).succeeds():
                _write(folder, rank, tokenizer)
                return
            report(f"warm-up: attempt {attempt + 1} failed, starting over with another sub-seed")
    raise MinirlError(f"warm-up: no model after {schedule.max_attempts} attempts with seed {seed}")


def _new_rank(tokenizer: "Tokenizer", lr: float) -> "SftRank":
    from minirl.train import attention
    from minirl.train.optimizer import Replica
    from minirl.train.policy import Policy
    from minirl.train.sft import SftRank

    from transformers import Qwen3Config, Qwen3ForCausalLM  # isort: skip

    config = Qwen3Config(
        **MODEL,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        vocab_size=tokenizer.get_vocab_size(),
        attn_implementation=attention.NAME,
    )
    policy, train = Policy(Qwen3ForCausalLM(config)), TrainConfig(weight_decay=0.0, grad_clip=1.0)
    return SftRank(Replica(policy, train, lr), max_tokens=16384)  # one micro-batch


@dataclass(frozen=True)
class Warmup:
    rank: "SftRank"
    tokenizer: "Tokenizer"
    schedule: Schedule
    seed: int
    report: Report

    def succeeds(self) -> bool:
        """Hold the learning rate while the model takes off, let it fall; then make it sloppy, until
        greedy decoding guesses and sampling is right at times."""
        plan = self.schedule
        rates = [plan.lr] * plan.hold_steps + _falling(plan.lr, plan.lr / 20, plan.cool_steps)
        ramp = [min(1.0, (step + 1) / plan.ramp_steps) for step in range(len(rates))]
        self.train([a * b for a, b in zip(rates, ramp, strict=True)], is_sloppy=False)
        skill = self.probe(is_sampled=False)
        self.report(f"warm-up: step {len(rates)}, {skill:.0%} right")
        if skill < plan.min_skill:
            return False
        rates = _falling(plan.sloppy_lr, plan.sloppy_lr / 10, plan.sloppy_steps)
        self.train(rates, is_sloppy=True)
        greedy, sampled = self.probe(is_sampled=False), self.probe(is_sampled=True)
        self.report(f"warm-up: made sloppy, {greedy:.0%} right greedy, {sampled:.0%} sampled")
        return greedy <= plan.max_greedy and plan.sampled[0] <= sampled <= plan.sampled[1]

    def train(self, rates: list[float], is_sloppy: bool) -> None:
        for lr, examples in zip(rates, self.batches(is_sloppy), strict=False):
            self.rank.replica.set_learning_rate(lr)
            self.rank.learn(examples)

    def batches(self, is_sloppy: bool) -> "Iterator[list[SftExample]]":
        """Without end. All numbers of steps are equally likely, so that long chains are learned
        too; pools of four batches are sorted by length, so that runs of equal length are long."""
        from minirl.train.sft import SftExample

        plan, size = self.schedule, self.schedule.batch_size
        phase = "sloppy" if is_sloppy else "clean"
        for first in count(1 << 30 if is_sloppy else 0, 4 * size):
            rng = random.Random(f"{self.seed}/{phase}/{first}")
            indices = range(first, first + 4 * size)
            drawn = [draw_problem(self.seed, Stream.WARMUP, i, (1,) * 7) for i in indices]
            examples = []
            for p in sorted(drawn, key=lambda problem: len(problem.steps)):
                answer = sloppy(p, rng, plan.no_working, plan.slip) if is_sloppy else clean(p)
                tokens = [tuple(self.tokenizer.encode(text).ids) for text in (p.prompt, answer)]
                examples.append(SftExample(tokens[0], (*tokens[1], EOS)))
            for start in rng.sample(range(0, 4 * size, size), 4):
                yield examples[start : start + size]

    def probe(self, is_sampled: bool) -> float:
        """Mean reward of generated answers to held-out problems, at temperature 1 or greedy."""
        import torch

        from minirl.train import attention

        indices, model = range(self.schedule.num_probes), cast(Any, self.rank.replica.module).model
        problems = [draw_problem(self.seed, Stream.PROBE, index) for index in indices]
        prompts = [self.tokenizer.encode(problem.prompt).ids for problem in problems]
        width = max(map(len, prompts))
        tokens_BT = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        model.set_attn_implementation("sdpa")  # generation pads; it knows no packed sequences
        written_BT = model.generate(
            tokens_BT,
            attention_mask=(tokens_BT != PAD).long(),
            do_sample=is_sampled,
            top_k=0 if is_sampled else None,  # by default transformers samples among 50
            max_new_tokens=128,
        )
        model.set_attn_implementation(attention.NAME)
        task, total = Arithmetic(TasksConfig()), 0.0
        for problem, written in zip(problems, written_BT[:, width:].tolist(), strict=True):
            stop = StopReason.STOP if EOS in written else StopReason.LENGTH
            answer = Answer(self.tokenizer.decode(written), stop, len(written))
            total += task.reward(Example(problem.prompt, str(problem.result)), answer)
        return total / len(problems)


def _falling(first: float, last: float, count: int) -> list[float]:
    return [first + (last - first) * step / count for step in range(count)]


def _write(folder: Path, rank: "SftRank", tokenizer: "Tokenizer") -> None:
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    model: Any = rank.replica.module.model
    with checkpoint.written_aside(folder) as aside:
        model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
        model.save_pretrained(aside)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            eos_token="<eos>",
            padding_side="left",
            model_max_length=POSITIONS,
            clean_up_tokenization_spaces=False,
        ).save_pretrained(aside)
