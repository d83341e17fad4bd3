"""Supervised learning: what is learned from, two ranks against one, and the whole command."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plain_script
import pytest
import torch
from processes import LIMIT_S, TRAINER_PLACE, files_up_to, wait_until
from ranks import FIRST_VERSION, LONGEST, GroupWriter, LocalRank, Recipe, relative_error
from safetensors.torch import load_file
from test_cli import ROOT, minirl

from minirl.config import TINY_FOLDER, Config
from minirl.errors import MinirlError, RecipeError
from minirl.messages import Learned, Saved, SftSetup
from minirl.model import load_tokenizer
from minirl.recipe import load
from minirl.records import Batch, Group
from minirl.run_dir import read_lines
from minirl.shm.ring import TrajectoryRing
from minirl.tasks.arithmetic import Arithmetic, demonstration, draw_problem
from minirl.tools import sft_run
from minirl.tools.sft_run import as_training
from minirl.train.batch import Item, example_item
from minirl.train.optimizer import build_optimizer
from minirl.train.policy import build_policy, load_policy
from minirl.train.sft import SftData, SftRank, step
from recipes import minimal
from tests import warm_up
from tests.soak.controller_process import living

from transformers import AutoModelForCausalLM, AutoTokenizer  # isort: skip

STEPS, SIZE = 3, 6
RECIPE = ROOT / "recipes" / "smoke.toml"

SETS = (  # train.max_tokens makes several micro-batches
    f"sft.steps={STEPS} sft.batch_size={SIZE} sft.lr=1e-3 devices.train=2 train.max_tokens=600 "
    "rollout.max_new_tokens=220 tasks.max_prompt_tokens=280 eval.num_prompts=5 eval.every=2"
)


@pytest.fixture(scope="module")
def sets(tied_folder: Path) -> list[str]:
    return [*SETS.split(), f'model.path="{tied_folder}"']


@pytest.fixture(scope="module")
def config(sets: list[str]) -> Config:
    return load(RECIPE, sets).config


@pytest.fixture
def rank(config: Config) -> SftRank:
    folder, training = config.model.path, as_training(config)
    setup = SftSetup(config=training, folder=folder, placement=TRAINER_PLACE, output="")
    return SftRank(setup, build_policy(training, folder))


def parts(item: Item) -> tuple[list[int], list[int]]:
    """Prompt and answer."""
    tokens, num_prompt = item.view.tokens.tolist(), int((~item.trainable).sum())
    return tokens[:num_prompt], tokens[num_prompt:]


def data_of(config: Config) -> SftData:
    task = Arithmetic(config.tasks, config.seed)
    return SftData(config, task, load_tokenizer(Path(config.model.path)))


def test_lines_that_a_full_disk_did_not_take_are_reported(config: Config, tmp_path: Path) -> None:
    setup = SftSetup(config=config, folder="", placement=TRAINER_PLACE, output="out")
    said: list[object] = [Learned(i, {"sft/loss": 0.5}, 0) for i in range(50)]
    messages = iter([*said, Saved("out")])
    workers: Any = SimpleNamespace(next_message=lambda limit_s: next(messages), all=[])
    notes: list[str] = []
    bar: Any = SimpleNamespace(note=notes.append, at=lambda *about: None)
    with files_up_to(1000), pytest.raises(MinirlError, match=r"metrics\.jsonl is not whole"):
        sft_run.follow(setup, tmp_path, workers, bar, [])
    assert len(notes) == 1 and "its lines wait in memory" in notes[0]


def command(sets: list[str], folder: Path) -> list[str]:
    return ["sft", str(RECIPE), "--run-dir", str(folder), *(f"--set={text}" for text in sets)]


def test_an_example_is_the_prompt_the_worked_answer_and_an_end(config: Config) -> None:
    task, data = Arithmetic(config.tasks, config.seed), data_of(config)
    tokenizer = load_tokenizer(Path(config.model.path))
    for asked, item in zip(task.heldout(5), data.heldout(5), strict=True):
        prompt, answer = parts(item)
        assert tokenizer.decode(prompt) == asked.prompt
        assert answer[-1] == tokenizer.eos_token_id and "=" in str(asked.worked)
        assert tokenizer.decode(answer[:-1]) == asked.worked
        (plain,) = data._fitting(replace(asked, worked=""), tuple(prompt))
        assert tokenizer.decode(parts(plain)[1][:-1]) == task.solution(asked)
    # Those that are too long are left out and counted.
    data = data_of(replace(config, rollout=replace(config.rollout, max_new_tokens=60)))
    assert all(len(parts(item)[1]) <= 60 for item in data.batch(20))
    assert data.num_too_long > 0
    with pytest.raises(RecipeError, match=r"rollout\.max_new_tokens"):
        data_of(replace(config, rollout=replace(config.rollout, max_new_tokens=1))).batch(1)


def test_only_answers_are_learned_each_on_its_own(rank: SftRank, tied_folder: Path) -> None:
    model = plain_script.load(tied_folder)
    a, b = example_item((5, 6, 7), (8, 9, 1)), example_item((10, 11), (12, 1))
    sums = []
    for item in (a, b):
        logprobs = plain_script.logprobs(model, item.view.tokens.tolist())
        sums.append(-logprobs[len(parts(item)[0]) :].sum().item())
    assert rank.loss([a]) == pytest.approx(sums[0] / 3, rel=1e-4)
    assert rank.loss([a, b]) == pytest.approx(sum(sums) / 5, rel=1e-4)
    assert rank.loss([]) is None


def test_two_ranks_are_one(config: Config, sets: list[str], rank: SftRank, tmp_path: Path) -> None:
    """The command with two ranks gives the update of one."""
    run_dir, data = tmp_path / "run", data_of(config)
    minirl(*command(sets, run_dir))
    heldout = data.heldout(5)
    before = rank.loss(heldout)
    values = [step(rank, data, SIZE, i) for i in range(STEPS)]
    lines = read_lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line, own in zip(lines, values, strict=True):
        for name in ("sft/loss", "train/grad_norm", "train/lr", "train/tokens"):
            assert line[name] == pytest.approx(own[name], rel=1e-4), name
    assert ["sft/heldout_loss" in line for line in lines] == [False, True, True]
    summary, after = json.loads((run_dir / "summary.json").read_text()), rank.loss(heldout)
    assert summary["finished"] and summary["steps"] == STEPS and after < before - 0.1
    assert summary["heldout_loss_before"] == pytest.approx(before, rel=1e-5)
    assert summary["heldout_loss_after"] == pytest.approx(after, rel=1e-4)
    theirs = load_file(run_dir / "model" / "model.safetensors")
    for name, weight in rank.replica.module.model.named_parameters():
        assert torch.allclose(theirs[name], weight, atol=1e-5), name
    assert load_tokenizer(run_dir / "model").encode("Tom has 7 apples.")


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_no_process(sets: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "minirl.cli", *command([*sets, "sft.steps=100000"], folder)],
        start_new_session=True,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    wait_until(lambda: bool(read_lines(folder / "metrics.jsonl")))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    wait_until(lambda: not living(process.pid))
    summary = json.loads((folder / "summary.json").read_text())
    assert not summary["finished"] and (folder / "model" / "config.json").is_file()
    assert summary["steps"] == len(read_lines(folder / "metrics.jsonl"))


# recipes/minimal.py is minirl at η = 0; the tiny model is made as tests/warm_up.py makes it -----

NUM_GROUPS = 4


def as_written(group: Group, ring: TrajectoryRing) -> list[minimal.Written]:
    """A group as minimal.py has it."""
    views = [ring.read(trajectory.cell, group.id) for trajectory in group.trajectories]
    pairs = zip(views, group.rewards, strict=True)
    return [minimal.Written(v.tokens.tolist(), int((v.mask == 0).sum()), r) for v, r in pairs]


def test_its_step_is_the_trainers(tied_folder: Path) -> None:
    assert len(Path(minimal.__file__).read_text().splitlines()) <= 200, "read in one sitting"
    sets = ["buffer.max_staleness=0", f"train.batch_size={NUM_GROUPS}"]
    config = load(minimal.RECIPE, sets).config
    size = config.rollout.group_size
    policy = load_policy(str(tied_folder), config.model.dtype)
    optimizer = build_optimizer(policy.parameters(), config.train.lr, config.train)
    ring = TrajectoryRing(3 * NUM_GROUPS * size, LONGEST)
    rank, engine = LocalRank(tied_folder, config, ring), plain_script.load(tied_folder)
    writer, own = GroupWriter(engine, ring, config), dict(policy.model.named_parameters())
    recipes = [Recipe(group_size=size, is_reward_equal=i == 0) for i in range(NUM_GROUPS)]
    for number in (1, 2, 3):
        before = {name: p.detach().clone() for name, p in own.items()}
        engine.load_state_dict(policy.model.state_dict())
        version = FIRST_VERSION + number - 1
        groups = [writer.write(r, 100 * number + i, version) for i, r in enumerate(recipes)]
        values = rank.train(Batch(number, version, tuple(groups)))
        written = [as_written(group, ring) for group in groups]
        loss = minimal.update(policy, optimizer, written, config, number - 1)
        assert loss == pytest.approx(values["train/loss"], rel=1e-4, abs=1e-6)
        assert values["train/behav_ratio_mean"] == pytest.approx(1, abs=1e-5)
        momentum = {name: optimizer.state[p]["exp_avg"] for name, p in own.items()}
        assert relative_error(rank.momentum(), momentum) < 1e-4
        # Looser: Adam turns a rounding error of a gradient near 0 into a part of the step.
        assert relative_error(rank.weights(), own, before) < 1e-3


@pytest.mark.slow
def test_it_learns() -> None:
    learned = minimal.run(12, 0)
    assert learned.after > learned.before + 0.2


def test_warm_up_makes_the_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "STEPS", (2, 2, 2))
    warm_up.build_tiny_model(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == sorted(os.listdir(TINY_FOLDER))
    problem = draw_problem(0, "train", 0)
    text, shapes = problem.prompt + demonstration(problem) + "\n Ω  naïve — 3,000", []
    for here in (tmp_path, TINY_FOLDER):
        model = AutoModelForCausalLM.from_pretrained(here)
        tokenizer = AutoTokenizer.from_pretrained(here)
        assert (model.dtype, model.config.head_dim) == (torch.float32, 32)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id == warm_up.EOS
        assert model.config.vocab_size == len(tokenizer)
        # The loaded tokenizer must cut as the one in training did, not as Qwen's own class would.
        assert tokenizer(text)["input_ids"] == warm_up.build_tokenizer().encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
        shapes.append({name: tensor.shape for name, tensor in model.state_dict().items()})
    assert shapes[0] == shapes[1]
