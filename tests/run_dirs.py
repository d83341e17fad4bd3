"""Run directories without a run: written by the real journal, buffer, metrics log and tracer, fed
with made-up answers. What only a trainer writes (trajectories.jsonl) has its shape from a real run,
which test_run.py checks.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from minirl.buffer import Buffer, OnStale
from minirl.config import Config
from minirl.devices import Placement, describe
from minirl.evaluation import EVAL_IDS, Evaluation
from minirl.journal import LOCK, Journal
from minirl.recipe import to_toml
from minirl.records import Batch, Example, Group, Prompt, StopReason, Trajectory
from minirl.view.trace import FOLDER, Tracer
from minirl.workers import Fleet, Role, Worker

QUESTION = 'Is <b>2 & 2</b> "4"?\nSay so.'  # must come out as text
HELDOUT = [Prompt(i, Example(f"{QUESTION} {i}", "4"), (1, 2)) for i in range(4)]


class Silent:
    """A view that shows nothing."""

    def note(self, text: str) -> None: ...

    def evaluated(self, version: int, accuracy: float) -> None: ...

    def step(self, line: dict[str, Any]) -> None: ...


def make_config(seed: int = 0, steps: int = 6, eta: int = 2, lr: float = 1e-6) -> Config:
    base = Config(seed=seed)
    return replace(
        base,
        train=replace(base.train, steps=steps, batch_size=2, lr=lr),
        rollout=replace(base.rollout, group_size=2, max_new_tokens=32),
        buffer=replace(base.buffer, max_staleness=eta),
        eval=replace(base.eval, num_prompts=len(HELDOUT)),
        log=replace(base.log, trace=True),
    )


def write_run(path: Path, config: Config, is_whole: bool = True, is_traced: bool = True) -> Path:
    (path / "logs").mkdir(parents=True)
    (path / LOCK).touch()
    (path / "recipe.toml").write_text(to_toml(config))
    facts = describe("cpu")
    (path / "machine.json").write_text(json.dumps({**facts, "started": "2026-01-01T00:00:00+0000"}))
    dice = random.Random(config.seed)
    fleet = Fleet(path / "logs", 2)
    place = Placement("cpu")
    fleet.workers += [
        Worker(Role.ROLLOUT, 0, 0, "", None, place),
        Worker(Role.TRAIN, 0, 1, "", None, place),
    ]
    buffer = Buffer(config.train.batch_size, config.buffer.max_staleness, OnStale.MASK)
    journal = Journal(config, path, fleet, Silent())
    journal.begin()
    evaluate(journal, version=0, right=1)
    for step in range(1, config.train.steps + 1):
        is_last = step == config.train.steps
        batch = make_batch(config, buffer, step, dice)
        for group in batch.groups:
            prompt = Prompt(group.prompt_index, Example(QUESTION, "4"), (1, 2))
            journal.keep_texts(group.id, prompt, ("<i>4</i>",) * len(group.rewards))
        buffer.published()
        journal.trained(step, batch, made_up_values(step, dice), buffer, is_last)
        write_trajectories(path, batch)
        if step == config.train.steps // 2 or is_last:
            evaluate(journal, version=step, right=3)
    if is_traced:
        write_trace(path, config)
    if is_whole:
        journal.summarise(True, {"seed": config.seed, **facts})
    journal.close()
    return path


def make_batch(config: Config, buffer: Buffer, step: int, dice: random.Random) -> Batch:
    for _ in range(config.train.batch_size):
        ticket = buffer.admit(step * 10, buffer.version)
        trajectories = []
        for place in range(config.rollout.group_size):
            written = dice.randint(2, 32)
            stop = StopReason.LENGTH if written == 32 else StopReason.STOP
            version = buffer.version
            trajectories.append(Trajectory(place, written + 2, written, stop, version, version))
        rewards = tuple(float(dice.random() < step / 7) for _ in trajectories)
        buffer.finish(Group(ticket.group_id, step * 10, tuple(trajectories), rewards))
    batch = buffer.next_batch(step)
    assert batch is not None
    return batch


def made_up_values(step: int, dice: random.Random) -> dict[str, float | None]:
    return {
        "buffer/staleness_mean": 0.0,
        "buffer/staleness_max": 0.0,
        "train/tokens": 50.0,
        "train/entropy": 1 / step,
        "train/clip_frac": 0.01 * dice.random(),
        "train/capped_frac": 0.0,
        "train/logprob_gap": 1e-6 * (1 + dice.random()),
        "train/grad_norm": 1.0,
        "train/tokens_per_s": 1000.0 + dice.random(),
    }


def write_trajectories(path: Path, batch: Batch) -> None:
    groups = [
        {
            "group": group.id,
            "prompt": group.prompt_index,
            "rewards": list(group.rewards),
            "advantages": [reward - 0.5 for reward in group.rewards],
            "versions": [[t.head_version, t.tail_version] for t in group.trajectories],
            "written": [t.num_written for t in group.trajectories],
            "cut": [int(t.stop) for t in group.trajectories],
            "masked": [],
        }
        for group in batch.groups
    ]
    kept = {
        "group": batch.groups[0].id,
        "ids": [5, 6, 7],
        "pieces": [" <4>", "\n", "&"],
        "versions": [max(0, batch.version - 1), batch.version, batch.version],
        "trained": [0, 1, 1],
        "logprobs": [-0.1, -0.2, -0.3],
        "gaps": [None, 1e-7, 0.02],
        "progress": 0.0,
        "left_out": 9,
    }
    line = {"step": batch.step, "version": batch.version, "groups": groups, "tokens": [kept]}
    with (path / "trajectories.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def evaluate(journal: Journal, version: int, right: int) -> None:
    evaluation = Evaluation(HELDOUT, first_cell=0)
    for place in range(len(HELDOUT)):
        evaluation.answered(Trajectory(place, 5, 3, StopReason.STOP, version, version))
        evaluation.texts[EVAL_IDS + place] = f"as version {version} says: <4>"
        evaluation.graded(EVAL_IDS + place, float(place < right))
    journal.evaluated(evaluation)


def write_trace(path: Path, config: Config) -> None:
    """An engine and a rank, one group a step: through the real tracer, in no time at all."""
    engine, rank = (Tracer(path / FOLDER / f"{name}-0.jsonl", "s") for name in ("rollout", "train"))
    engine.state("waiting for prompts", {})
    rank.state("waiting for batch", {})
    for step in range(1, config.train.steps + 1):
        engine.state("generating", {})
        engine.begin_sequence(step)
        engine.first_token(step)
        engine.end_sequence(step, {"group": step, "place": 0, "tokens": 3, "versions": [0, 0]})
        engine.state("waiting for prompts", {})
        rank.step(step, step - 1, [step])
        rank.state("training", {"phase": "forward and backward"})
        rank.state("training", {"phase": "optimizer step"})
        rank.state("publishing", {"version": step})
        rank.state("waiting for batch", {})
