"""Run directories without a run: the files in the form that a run writes (test_run.py checks that),
filled with made-up answers. The trace is written by the real tracer.
"""

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from minirl.config import Config
from minirl.recipe import to_toml
from minirl.shm.tracer import TraceFile, Tracer

QUESTION = 'Is <b>2 & 2</b> "4"?\nSay so.'  # must come out as text
MACHINE = {"device_kind": "cpu", "cpu": "a CPU", "cores": 2, "packages": {"torch": "2.13.0"}}


def make_config(seed: int = 0, steps: int = 6, eta: int = 2, lr: float = 1e-6) -> Config:
    base = Config(seed=seed)
    return replace(
        base,
        train=replace(base.train, steps=steps, batch_size=2, lr=lr),
        buffer=replace(base.buffer, max_staleness=eta),
        log=replace(base.log, trace=True),
    )


def write_run(path: Path, config: Config, is_whole: bool = True, is_traced: bool = True) -> Path:
    path.mkdir(parents=True)
    (path / "lock").touch()
    (path / "recipe.toml").write_text(to_toml(config))
    (path / "machine.json").write_text(json.dumps(MACHINE))
    dice, steps = random.Random(config.seed), range(1, config.train.steps + 1)
    write_lines(path / "metrics.jsonl", (metrics(step, dice) for step in steps))
    write_lines(path / "batches.jsonl", (batch(step, dice) for step in steps))
    write_lines(path / "samples.jsonl", (sample(step) for step in steps))
    half, last = config.train.steps // 2, config.train.steps
    write_lines(path / "evals.jsonl", (evaluation(step) for step in (0, half, last)))
    if is_traced:
        write_trace(path / "trace.json", config.train.steps)
    if is_whole:
        (path / "summary.json").write_text(json.dumps({"finished": True, "balance": "even"}))
    return path


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def metrics(step: int, dice: random.Random) -> dict[str, Any]:
    return {
        "step": step,
        "version": step,
        "seconds": 2.0 * step,
        "reward/mean": dice.random() * step / 7,
        "reward/std": 0.4,
        "rollout/length_mean": 10.0,
        "rollout/truncated_frac": 0.0,
        "rollout/tokens_per_s": 500.0,
        "rollout/idle_frac": 0.1,
        "buffer/staleness_mean": 0.0,
        "buffer/staleness_max": 0.0,
        "buffer/groups_dropped": 0,
        "train/tokens": 50.0,
        "train/entropy": 1 / step,
        "train/clip_frac": 0.01 * dice.random(),
        "train/capped_frac": 0.0,
        "train/logprob_gap": 1e-6 * (1 + dice.random()),
        "train/grad_norm": 1.0,
        "train/tokens_per_s": 1000.0 + dice.random(),
        "train/idle_frac": 0.2,
    }


def batch(step: int, dice: random.Random) -> dict[str, Any]:
    groups = [
        {
            "id": 2 * step + n,
            "prompt": step,
            "prompt_tokens": 2,
            "rewards": [1.0, 0.0],
            "lengths": [dice.randint(2, 32), 32],
            "versions": [[step - 1, step - 1], [max(0, step - 2), step - 1]],
            "stops": ["stop", "length"],
        }
        for n in range(2)
    ]
    return {"step": step, "version": step - 1, "groups": groups}


def sample(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "group": 2 * step,
        "prompt": QUESTION,
        "answer": "<i>4</i>",
        "reference": "4",
        "reward": 1.0,
        "shaped": 1.0,
        "versions": [max(0, step - 4), step - 1],
        "stop": "stop",
        "tokens": [" <4>", "\n", "&"],
        "token_versions": [max(0, step - 4), max(0, step - 2), step - 1],
        "token_gaps": [None, 1e-7, 0.02],
    }


def evaluation(step: int) -> dict[str, Any]:
    text = f"as version {step} says: <4>"
    answer = {"prompt": QUESTION, "reference": "4", "answer": text, "reward": 1.0}
    middle = 0.25 + 0.5 * (step > 0)
    interval = {"accuracy": middle, "low": middle - 0.2, "high": middle + 0.2, "count": 4}
    return {"step": step, "version": step, "seconds": 2.0 * step, **interval, "answers": [answer]}


def write_trace(path: Path, steps: int) -> None:
    """One engine and one rank, one group per step, in no time at all."""
    file = TraceFile(path)
    file.begin()
    engine, rank = Tracer(file, "rollout-0"), Tracer(file, "train-0")
    engine.state("waiting for prompts", {})
    rank.state("waiting for batch", {})
    for step in range(1, steps + 1):
        engine.state("generating", {})
        engine.begin_sequence(step)
        engine.first_token(step)
        engine.end_sequence(step, step, 0, {"place": 0})
        engine.state("waiting for prompts", {})
        rank.step(step, step - 1, [(step, 0)])
        rank.state("training", {"phase": "forward and backward"})
        rank.state("publishing", {"version": step})
        rank.state("waiting for batch", {})
    engine.close()
    rank.close()
