"""Run directories without a run: written by the real run log, buffer and tracer, fed with made-up
answers.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from minirl.buffer import Buffer, OnStale
from minirl.config import Config
from minirl.devices import Placement
from minirl.evaluation import EVAL_IDS, Evaluation
from minirl.recipe import to_toml
from minirl.records import Batch, Example, Group, Prompt, StopReason, Trajectory
from minirl.run_dir import LOCK
from minirl.run_log import RunLog
from minirl.tools import machine
from minirl.train.messages import AnswerTokens, Trained
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
    facts = machine.describe("cpu")
    machine.write(path, facts)
    dice = random.Random(config.seed)
    fleet = Fleet(path / "logs", 2)
    place = Placement("cpu")
    fleet.workers += [
        Worker(Role.ROLLOUT, 0, 0, "", None, place),
        Worker(Role.TRAIN, 0, 1, "", None, place),
    ]
    buffer = Buffer(config.train.batch_size, config.buffer.max_staleness, OnStale.MASK)
    log = RunLog(config, path, fleet, Silent())
    log.begin()
    evaluate(log, version=0, right=1)
    for step in range(1, config.train.steps + 1):
        is_last = step == config.train.steps
        batch = make_batch(config, buffer, step, dice)
        for group in batch.groups:
            prompt = Prompt(group.prompt_index, Example(QUESTION, "4"), (1, 2))
            log.keep_texts(group.id, prompt, ("<i>4</i>",) * len(group.rewards))
        buffer.published()
        log.trained(step, batch, made_up(batch, dice), buffer, [])
        if step == config.train.steps // 2 or is_last:
            evaluate(log, version=step, right=3)
    if is_traced:
        write_trace(path, config)
    if is_whole:
        log.summarise(True, {"seed": config.seed, **facts})
    log.close()
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


def made_up(batch: Batch, dice: random.Random) -> Trained:
    values: dict[str, float | None] = {
        "buffer/staleness_mean": 0.0,
        "buffer/staleness_max": 0.0,
        "train/tokens": 50.0,
        "train/entropy": 1 / batch.step,
        "train/clip_frac": 0.01 * dice.random(),
        "train/capped_frac": 0.0,
        "train/logprob_gap": 1e-6 * (1 + dice.random()),
        "train/grad_norm": 1.0,
        "train/tokens_per_s": 1000.0 + dice.random(),
    }
    versions = [max(0, batch.version - 1), batch.version, batch.version]
    shown = AnswerTokens([" <4>", "\n", "&"], versions, [None, 1e-7, 0.02])
    return Trained(batch.version + 1, values, samples=(shown,))


def evaluate(log: RunLog, version: int, right: int) -> None:
    evaluation = Evaluation(HELDOUT, first_cell=0, step=version)
    for place in range(len(HELDOUT)):
        evaluation.answered(Trajectory(place, 5, 3, StopReason.STOP, version, version))
        evaluation.texts[EVAL_IDS + place] = f"as version {version} says: <4>"
        evaluation.graded(EVAL_IDS + place, float(place < right))
    log.evaluated(evaluation)


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
