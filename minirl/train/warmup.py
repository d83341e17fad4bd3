"""The tiny model: a Qwen3 of 0.35 M parameters that minirl makes and warms up itself, on a CPU.

Takes a seed; gives an ordinary Hugging Face folder. Two phases of supervised learning (sft.py) on
worked answers of the arithmetic task: a clean one, until the model has the skill, then a sloppy one
that teaches it to guess and to slip. What is left for RL is to find back to showing its working and
to stop slipping. It sharpens a skill; it does not teach arithmetic from nothing.

Nothing here counts on luck: each phase ends when a probe on held-out problems says so, and a model
that does not take off is thrown away for one from the next sub-seed.

Leaves out: RL, vLLM, devices (a CPU is faster at this size), other tasks.

Axes: B sequences, T positions, V vocabulary.
"""

import fcntl
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence

from minirl.config import TasksConfig, TrainConfig
from minirl.devices import hide_broken_torchvision
from minirl.errors import MinirlError
from minirl.records import Answer, Example, StopReason
from minirl.shm.board import BoardWriter
from minirl.tasks.arithmetic import (
    Arithmetic,
    Problem,
    Stream,
    demonstration,
    draw_problem,
    sloppy_demonstration,
)
from minirl.train import attention
from minirl.train.lessons import Lesson
from minirl.train.optimizer import Replica
from minirl.train.policy import Policy
from minirl.train.sft import Student
from minirl.train.tiny import RECIPE, Recipe, build_tokenizer, tiny_model_folder

hide_broken_torchvision()

from transformers import (  # noqa: E402
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar, enable_progress_bar  # noqa: E402

Report = Callable[[str], None]

PAD, EOS = 0, 1
MAX_TOKENS = 16384  # more than a batch has: one micro-batch


@dataclass
class Pupil:
    """The model in training, what it is taught with, and how many steps it has taken."""

    model: Qwen3ForCausalLM
    tokenizer: Tokenizer
    student: Student
    recipe: Recipe
    seed: int
    report: Report
    num_steps: int = 0
    clean: Iterator[list[Lesson]] = field(init=False)
    sloppy: Iterator[list[Lesson]] = field(init=False)

    def __post_init__(self) -> None:
        self.clean = _lessons(self, is_sloppy=False)
        self.sloppy = _lessons(self, is_sloppy=True)


def ensure_tiny_model(seed: int, report: Report, recipe: Recipe = RECIPE) -> Path:
    """The folder, built when absent. Of two processes one builds and the other waits."""
    folder = tiny_model_folder(seed, recipe)
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when its holder ends, however it ends
        if not folder.exists():
            build_tiny_model(folder, seed, report, recipe)
    return folder


def build_tiny_model(folder: Path, seed: int, report: Report, recipe: Recipe = RECIPE) -> None:
    """Make, warm up and write the model. A folder that is already there is left as it is."""
    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        for attempt in range(recipe.max_attempts):
            pupil = _enrol(tokenizer, recipe, seed, attempt, report)
            if _learn_skill(pupil) and _learn_sloppiness(pupil):
                _write(folder, pupil)
                return
            report(f"warm-up: attempt {attempt + 1} failed, starting over with another sub-seed")
    raise MinirlError(f"warm-up: no model after {recipe.max_attempts} attempts with seed {seed}")


def _enrol(tokenizer: Tokenizer, recipe: Recipe, seed: int, attempt: int, report: Report) -> Pupil:
    sub_seed = seed + 1_000_003 * attempt
    torch.manual_seed(sub_seed)
    model = Qwen3ForCausalLM(_model_config(recipe, tokenizer.get_vocab_size()))
    replica = Replica(Policy(model), TrainConfig(weight_decay=0.0, grad_clip=1.0), recipe.lr)
    return Pupil(model, tokenizer, Student(replica, MAX_TOKENS), recipe, sub_seed, report)


def _model_config(recipe: Recipe, vocab_size: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.positions,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        initializer_range=recipe.init,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        attn_implementation=attention.NAME,
    )


@contextmanager
def _padded(model: Qwen3ForCausalLM) -> Iterator[None]:
    """For probes: generation knows rows and masks, not packed sequences."""
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(attention.NAME)


def _learn_skill(pupil: Pupil) -> bool:
    """The clean phase: hold the learning rate until the model takes off, then let it fall, and
    again from half the height until the skill is there."""
    recipe, skill = pupil.recipe, 0.0
    while skill < recipe.take_off:
        if pupil.num_steps >= recipe.max_hold_steps:
            return False
        loss = _train(pupil, pupil.clean, recipe.probe_every, recipe.lr, recipe.lr)
        skill = probe_skill(pupil)
        pupil.report(_progress(pupil, loss, skill))
    for cool in range(recipe.max_cools):
        num_steps, height = (recipe.again_steps, 0.5) if cool else (recipe.cool_steps, 1.0)
        loss = _train(pupil, pupil.clean, num_steps, recipe.lr * height, recipe.lr / 20)
        skill = probe_skill(pupil)
        pupil.report(_progress(pupil, loss, skill))
        if skill >= recipe.skill:
            return True
    return False


def _learn_sloppiness(pupil: Pupil) -> bool:
    """The sloppy phase: until greedy and sampled accuracy are as low as RL is to find them."""
    recipe = pupil.recipe
    low, high = recipe.sampled
    for _ in range(recipe.max_sloppies):
        _train(pupil, pupil.sloppy, recipe.sloppy_steps, recipe.sloppy_lr, recipe.sloppy_lr / 10)
        greedy, sampled = probe_accuracy(pupil, False), probe_accuracy(pupil, True)
        pupil.report(
            f"warm-up: step {pupil.num_steps}, made sloppy: right {greedy:.0%} greedy, "
            f"{sampled:.0%} sampled"
        )
        if greedy <= recipe.max_greedy and low <= sampled <= high:
            return True
    return False


def _progress(pupil: Pupil, loss: float, skill: float) -> str:
    return f"warm-up: step {pupil.num_steps}, loss {loss:.3f}, {skill:.0%} worked right"


def _train(
    pupil: Pupil, lessons: Iterator[list[Lesson]], num_steps: int, lr_from: float, lr_to: float
) -> float:
    """Take steps while the learning rate goes straight from one value to the other."""
    loss = 0.0
    for step in range(num_steps):
        ramp = min(1.0, (pupil.num_steps + 1) / pupil.recipe.ramp_steps)
        lr = lr_from + (lr_to - lr_from) * step / num_steps
        pupil.student.replica.set_learning_rate(lr * ramp)
        loss = pupil.student.learn(next(lessons)).loss
        pupil.num_steps += 1
    return loss


def _lessons(pupil: Pupil, is_sloppy: bool) -> Iterator[list[Lesson]]:
    """Batches without end. All numbers of steps are equally likely, so that long chains are
    learned too; pools of four batches are sorted by length, so that runs of equal length are
    long."""
    size, recipe = pupil.recipe.batch_size, pupil.recipe
    phase = "sloppy" if is_sloppy else "clean"
    for first in count(1 << 30 if is_sloppy else 0, 4 * size):
        rng = random.Random(f"{pupil.seed}/{phase}/{first}")
        drawn = (
            draw_problem(pupil.seed, Stream.WARMUP, first + i, (1,) * 7) for i in range(4 * size)
        )
        problems = sorted(drawn, key=lambda problem: len(problem.steps))
        answers = [
            sloppy_demonstration(p, rng, recipe.no_working, recipe.slip)
            if is_sloppy
            else demonstration(p)
            for p in problems
        ]
        for start in rng.sample(range(0, 4 * size, size), 4):
            part = slice(start, start + size)
            yield _tokenized(pupil.tokenizer, problems[part], answers[part])


def _tokenized(tokenizer: Tokenizer, problems: list[Problem], answers: list[str]) -> list[Lesson]:
    prompts = [tuple(e.ids) for e in tokenizer.encode_batch([p.prompt for p in problems])]
    written = [(*e.ids, EOS) for e in tokenizer.encode_batch(answers)]
    return [Lesson(prompt, answer) for prompt, answer in zip(prompts, written, strict=True)]


@torch.no_grad()
def probe_skill(pupil: Pupil) -> float:
    """Share of probe problems that greedy decoding would answer word for word as demonstrated:
    the likeliest token is the demonstrated one at every place. One forward pass tells."""
    problems = _probe_problems(pupil)
    lessons = _tokenized(pupil.tokenizer, problems, [demonstration(p) for p in problems])
    # Right padding and causal attention: no mask.
    tokens_BT = pad_sequence(
        [torch.tensor(lesson.prompt + lesson.answer) for lesson in lessons], batch_first=True
    )
    with _padded(pupil.model):
        likeliest_BT = pupil.model(input_ids=tokens_BT, use_cache=False).logits.argmax(-1)
    num_right = 0
    for row, lesson in enumerate(lessons):
        before = slice(len(lesson.prompt) - 1, lesson.length - 1)  # where answers are foretold
        num_right += tuple(likeliest_BT[row, before].tolist()) == lesson.answer
    return num_right / len(lessons)


@torch.no_grad()
def probe_accuracy(pupil: Pupil, is_sampled: bool) -> float:
    """Mean reward of generated answers to the probe problems, at temperature 1 or greedy."""
    problems, task = _probe_problems(pupil), Arithmetic(TasksConfig())
    prompts = [e.ids for e in pupil.tokenizer.encode_batch([p.prompt for p in problems])]
    width = max(len(prompt) for prompt in prompts)
    tokens_BT = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    settings = GenerationConfig(
        do_sample=is_sampled,
        top_k=0 if is_sampled else None,  # unless told, transformers samples among 50
        max_new_tokens=128,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    with _padded(pupil.model):
        written_BT = pupil.model.generate(
            tokens_BT, attention_mask=(tokens_BT != PAD).long(), generation_config=settings
        )[:, width:]
    rewards = [
        task.reward(Example(p.prompt, str(p.result)), _answer(pupil.tokenizer, written))
        for p, written in zip(problems, written_BT.tolist(), strict=True)
    ]
    return sum(rewards) / len(rewards)


def _answer(tokenizer: Tokenizer, written: list[int]) -> Answer:
    is_ended = EOS in written
    tokens = written[: written.index(EOS)] if is_ended else written
    stop = StopReason.STOP if is_ended else StopReason.LENGTH
    return Answer(tokenizer.decode(tokens), stop, len(tokens) + is_ended)


def _probe_problems(pupil: Pupil) -> list[Problem]:
    return [
        draw_problem(pupil.seed, Stream.PROBE, index) for index in range(pupil.recipe.num_probes)
    ]


def _write(folder: Path, pupil: Pupil) -> None:
    """Write aside, then rename: the folder is whole or absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        pupil.model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
        disable_progress_bar()
        pupil.model.save_pretrained(aside)
        enable_progress_bar()
        PreTrainedTokenizerFast(
            tokenizer_object=pupil.tokenizer,
            pad_token="<pad>",
            eos_token="<eos>",
            padding_side="left",
            model_max_length=pupil.recipe.positions,
            clean_up_tokenization_spaces=False,
        ).save_pretrained(aside)
        aside.chmod(0o755)  # mkdtemp makes it private
        os.rename(aside, folder)
    except OSError:
        if not folder.exists():  # else another process was faster, and its model stays
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def run(seed: int, board: BoardWriter, pipe: Connection) -> None:
    """The body of the process that makes the tiny model; it sends lines for a person to read."""
    ensure_tiny_model(seed, pipe.send)
