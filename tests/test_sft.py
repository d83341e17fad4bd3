"""Supervised learning: what is learned from, two ranks against one, and the whole command."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_cli import ROOT, minirl

from minirl.config import Config
from minirl.errors import RecipeError
from minirl.model import load_tokenizer
from minirl.recipe import load
from minirl.run_dir import read_lines
from minirl.tasks.arithmetic import Arithmetic
from minirl.tools.sft_run import as_training
from minirl.train.lessons import Lesson, Lessons, SftSetup, taught
from minirl.train.sft import Student, build_student, pack, step
from tests.soak.life import living

STEPS, SIZE = 3, 6
OVERRIDES = [
    f"sft.steps={STEPS}",
    f"sft.batch_size={SIZE}",
    "sft.lr=1e-3",
    "sft.warmup_steps=1",
    "rollout.max_new_tokens=220",
    "tasks.max_prompt_tokens=280",
    "train.max_tokens=600",  # several micro-batches
    "eval.num_prompts=5",
    "eval.every=2",
    "devices.train=2",
]
RECIPE = ROOT / "recipes" / "smoke.toml"


@pytest.fixture(scope="module")
def config(tied_folder: Path) -> Config:
    return load(RECIPE, [*OVERRIDES, f'model.path="{tied_folder}"']).config


@pytest.fixture(scope="module")
def run_dir(tied_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole command, with two ranks."""
    folder = tmp_path_factory.mktemp("sft") / "run"
    sets = [f"--set={text}" for text in [*OVERRIDES, f'model.path="{tied_folder}"']]
    done = minirl("sft", str(RECIPE), "--run-dir", str(folder), *sets)
    assert done.returncode == 0, done.stderr
    assert "held-out loss" in done.stderr and f"steps {STEPS}/{STEPS}" in done.stderr
    return folder


@pytest.fixture(scope="module")
def lessons(config: Config, tied_folder: Path) -> Lessons:
    return Lessons(
        config, Arithmetic(config.tasks, config.seed), load_tokenizer(tied_folder, False)
    )


def alone(config: Config, folder: Path) -> Student:
    from crew import TRAINER_PLACE

    return build_student(SftSetup(as_training(config), str(folder), 0, 1, "", TRAINER_PLACE))


def test_a_lesson_is_the_prompt_the_worked_answer_and_an_end(
    config: Config, tied_folder: Path
) -> None:
    task = Arithmetic(config.tasks, config.seed)
    tokenizer = load_tokenizer(tied_folder, False)
    lessons = Lessons(config, task, tokenizer)
    example = task.train(0)
    lesson = lessons.lesson(example, tuple(tokenizer.encode(example.prompt)))
    assert tokenizer.decode(lesson.prompt) == example.prompt
    assert lesson.answer[-1] == tokenizer.eos_token_id
    answer = tokenizer.decode(lesson.answer[:-1])
    assert answer == taught(task, example) == example.worked and "=" in answer
    assert taught(task, replace(example, worked="")) == task.solution(example)


def test_lessons_that_are_too_long_are_left_out_and_counted(
    config: Config, tied_folder: Path
) -> None:
    short = replace(config, rollout=replace(config.rollout, max_new_tokens=60))
    task, tokenizer = Arithmetic(config.tasks), load_tokenizer(tied_folder, False)
    lessons = Lessons(short, task, tokenizer)
    assert all(len(lesson.answer) <= 60 for lesson in lessons.batch(20))
    assert lessons.num_too_long > 0
    none = replace(config, rollout=replace(config.rollout, max_new_tokens=1))
    with pytest.raises(RecipeError, match=r"rollout\.max_new_tokens"):
        Lessons(none, task, tokenizer).batch(1)


def test_only_answers_are_learned_and_sequences_do_not_see_each_other(
    config: Config, tied_folder: Path
) -> None:
    student = alone(config, tied_folder)
    a, b = Lesson((5, 6, 7), (8, 9, 1)), Lesson((10, 11), (12, 1))
    packed = pack([a, b], "cpu")
    assert packed.is_answer_T.tolist() == [False] * 3 + [True] * 3 + [False] * 2 + [True] * 2
    losses = [student.loss([lesson]) for lesson in (a, b)]
    both = student.loss([a, b])
    assert losses[0] is not None and losses[1] is not None and both is not None
    assert both == pytest.approx((3 * losses[0] + 2 * losses[1]) / 5, rel=1e-5)
    import plain_script

    model = plain_script.load(tied_folder)
    tokens = [*a.prompt, *a.answer]
    own = plain_script.own(plain_script.distributions(model, tokens, 1.0), tokens)
    assert losses[0] == pytest.approx(-own[3:].mean().item(), rel=1e-4)
    assert student.loss([]) is None


def test_two_ranks_give_the_update_of_one(
    config: Config, tied_folder: Path, lessons: Lessons, run_dir: Path
) -> None:
    student = alone(config, tied_folder)
    heldout = lessons.heldout(5)
    before = student.loss(heldout)
    values = [step(student, lessons, SIZE, i) for i in range(STEPS)]
    lines = read_lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line, own in zip(lines, values, strict=True):
        for name in ("sft/loss", "train/grad_norm", "train/lr", "train/tokens"):
            assert line[name] == pytest.approx(own[name], rel=1e-4), name
    assert "sft/heldout_loss" not in lines[0] and "sft/heldout_loss" in lines[1]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["heldout_loss_before"] == pytest.approx(before, rel=1e-5)
    assert summary["heldout_loss_after"] == pytest.approx(student.loss(heldout), rel=1e-4)
    assert summary["heldout_loss_after"] < summary["heldout_loss_before"] - 0.1
    theirs = load_file(run_dir / "model" / "model.safetensors")
    for name, weight in student.replica.module.model.named_parameters():
        assert torch.allclose(theirs[name], weight, atol=1e-5), name


def test_the_model_is_an_ordinary_folder(run_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(run_dir / "model")
    assert AutoTokenizer.from_pretrained(run_dir / "model").encode("Tom has 7 apples.")
    assert {p.name for p in run_dir.iterdir()} == {
        *("model", "metrics.jsonl", "summary.json", "recipe.toml", "logs")
    }


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_no_process(tied_folder: Path, tmp_path: Path) -> None:
    sets = [f"--set={text}" for text in (*OVERRIDES, "sft.steps=100000", "devices.train=1")]
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "minirl.cli", "sft", str(RECIPE), "--run-dir", str(folder)),
            *(*sets, f'--set=model.path="{tied_folder}"'),
        ],
        start_new_session=True,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    while not read_lines(folder / "metrics.jsonl"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert living(process.pid) == []
    summary = json.loads((folder / "summary.json").read_text())
    assert not summary["finished"] and (folder / "model" / "config.json").is_file()
    assert summary["steps"] == len(read_lines(folder / "metrics.jsonl"))
