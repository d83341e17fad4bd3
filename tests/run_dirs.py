"""Run directories without a run: the real RunLog writes them, fed with made-up steps."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from minirl.buffer import Buffer
from minirl.config import Config
from minirl.devices import Placement
from minirl.evaluation import Ended, Evaluation
from minirl.groups import GroupState
from minirl.messages import AnswerTokens, Role, Trained
from minirl.recipe import build, to_toml
from minirl.records import Batch, Example, Group, Prompt, StopReason, Trajectory
from minirl.rollout.dispatch import Assignment
from minirl.run_log import RunLog
from minirl.workers import Worker, Workers

QUESTION = 'Is <b>2 & 2</b> "4"?\nSay so, '  # must come out as text
HELDOUT = [Prompt(i, Example(f"{QUESTION}{i}", "4"), (1, 2)) for i in range(4)]
MACHINE = {"device_kind": "cpu", "cpu": "a CPU", "cores": 2, "packages": {"torch": "2.13.0"}}
MACHINE |= {"started": "2026-01-01T12:00:00+0000"}
VALUES: dict[str, float | None] = {
    **dict.fromkeys(("train/tokens_per_s", "train/entropy", "train/grad_norm"), 1.0),
    **dict.fromkeys(("buffer/staleness_mean", "buffer/staleness_max", "train/clip_frac"), 0.0),
    **{"train/logprob_gap": 1e-6, "train/tokens": 50.0},
}


class Notes(list[str]):
    note = list.append

    def step(self, line: dict[str, float]) -> None: ...


NO_SAVER: Any = SimpleNamespace(save_bad=lambda *about, **how: "")


def make_config(seed: int = 0, steps: int = 6, eta: int = 2, lr: float = 1e-6) -> Config:
    values = {"seed": seed, "train.steps": steps, "train.batch_size": 2, "train.lr": lr}
    return build({**values, "rollout.group_size": 2, "buffer.max_staleness": eta})


def log_of(path: Path, config: Config, step: int = 0, evaluating: int | None = None) -> RunLog:
    workers = Workers(path, 2)
    for row, role in enumerate((Role.ROLLOUT, Role.TRAIN)):
        workers.all.append(Worker(role, 0, row, "", None, Placement("cpu")))
    log = RunLog(config, path, workers, Notes(), NO_SAVER, step, evaluating)
    log.begin()
    return log


def evaluate(log: RunLog, version: int, right: int) -> None:
    evaluation = Evaluation(HELDOUT, range(4), step=version, version=version)
    for place in range(len(HELDOUT)):
        answer = Trajectory(place, 5, 3, StopReason.STOP, version, version)
        text = f"as version {version} says: <4>"
        evaluation.end(place, Ended(place, place, answer, float(place < right), text=text))
    log.evaluated(evaluation)


def train(log: RunLog, step: int) -> None:
    """Two groups of two answers, of 3 and 4 tokens; two versions wrote the second."""
    version, groups, states = step - 1, [], {}
    for group_id in (2 * step, 2 * step + 1):
        one = Trajectory(0, 5, 3, StopReason.STOP, version, version)
        two = Trajectory(1, 6, 4, StopReason.LENGTH, max(0, version - 1), version)
        groups.append(Group(group_id, step, (one, two), (1.0, log.config.seed / 10)))
        states[group_id] = GroupState(group_id, HELDOUT[0], (), Assignment(0, 1), 0)
        states[group_id].texts = ("<i>4</i>", "5")
    versions = [max(0, version - 3), max(0, version - 1), version]
    shown = AnswerTokens([" <4>", "\n", "&"], versions, [None, 1e-7, 0.02])
    trained, batch = Trained(step, VALUES, samples=(shown,)), Batch(step, version, tuple(groups))
    log.trained(batch, trained, Buffer(2, 0), states)


def write_run(path: Path, config: Config, is_whole: bool = True) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "recipe.toml").write_text(to_toml(config))
    (path / "machine.json").write_text(json.dumps(MACHINE))
    log, last = log_of(path, config), config.train.steps
    log.workers_replaced = 2
    evaluate(log, version=0, right=1)
    for step in range(1, last + 1):
        train(log, step)
        if step in (last // 2, last):
            evaluate(log, version=step, right=3)
    if is_whole:
        log.summarise(True, {"drops": {"reward_error": 3, "equal_rewards": 1200}})
    log.close()
    return path
