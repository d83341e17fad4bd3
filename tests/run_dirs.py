"""Run directories without a run: the files in the form that a run writes (test_run.py checks that),
filled with made-up answers. The trace is written by the real tracer.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from minirl.config import Config
from minirl.recipe import to_toml
from minirl.shm.tracer import Tracer, open_trace

QUESTION = 'Is <b>2 & 2</b> "4"?\nSay so.'  # must come out as text
ANSWER = {"prompt": QUESTION, "reference": "4", "reward": 1.0}
MACHINE = {"device_kind": "cpu", "cpu": "a CPU", "cores": 2, "packages": {"torch": "2.13.0"}}
VALUES = {
    **dict.fromkeys(("rollout/length_mean", "rollout/tokens_per_s", "train/tokens_per_s"), 10.0),
    **dict.fromkeys(("rollout/idle_frac", "train/idle_frac", "train/entropy"), 0.1),
    **dict.fromkeys(("buffer/staleness_mean", "buffer/staleness_max", "train/grad_norm"), 1.0),
    **dict.fromkeys(("rollout/truncated_frac", "train/clip_frac", "train/capped_frac"), 0.0),
    **{"train/logprob_gap": 1e-6, "buffer/groups_dropped": 0},
}


def make_config(seed: int = 0, steps: int = 6, eta: int = 2, lr: float = 1e-6) -> Config:
    base = Config(seed=seed)
    train = replace(base.train, steps=steps, batch_size=2, lr=lr)
    return replace(base, train=train, buffer=replace(base.buffer, max_staleness=eta))


def write_run(path: Path, config: Config, is_whole: bool = True) -> Path:
    path.mkdir(parents=True)
    (path / "lock").touch()
    (path / "recipe.toml").write_text(to_toml(config))
    (path / "machine.json").write_text(json.dumps(MACHINE))
    last = config.train.steps
    steps = range(1, last + 1)
    write = {"metrics": metrics, "batches": batch, "samples": sample, "evals": evaluation}
    for name, line in write.items():
        own = (0, last // 2, last) if name == "evals" else steps
        lines = [json.dumps(line(step, config.seed)) for step in own]
        (path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    write_trace(path / "trace.json", last)
    if is_whole:
        (path / "summary.json").write_text(json.dumps({"finished": True, "balance": "even"}))
    return path


def metrics(step: int, seed: int) -> dict[str, Any]:
    reward = step / (7 + seed)
    return {"step": step, "version": step, "seconds": 2.0 * step, "reward/mean": reward, **VALUES}


def batch(step: int, seed: int) -> dict[str, Any]:
    versions = [[step - 1, step - 1], [max(0, step - 2), step - 1]]
    group = {"prompt": step, "prompt_tokens": 2, "rewards": [1.0, 0.0], "lengths": [step, 32]}
    group |= {"versions": versions, "stops": ["stop", "length"]}
    groups = [{"id": 2 * step + n, **group} for n in range(2)]
    return {"step": step, "version": step - 1, "groups": groups}


def sample(step: int, seed: int) -> dict[str, Any]:
    versions = [max(0, step - 4), max(0, step - 2), step - 1]
    answer = {**ANSWER, "answer": "<i>4</i>", "versions": versions[::2], "stop": "stop"}
    tokens = {"tokens": [" <4>", "\n", "&"], "token_versions": versions}
    return {"step": step, "group": 2 * step, **answer, **tokens, "token_gaps": [None, 1e-7, 0.02]}


def evaluation(step: int, seed: int) -> dict[str, Any]:
    accuracy = 0.25 + 0.5 * (step > 0)
    interval = {"accuracy": accuracy, "low": accuracy - 0.2, "high": accuracy + 0.2, "count": 4}
    answers = [{**ANSWER, "answer": f"as version {step} says: <4>"}]
    return {"step": step, "version": step, "seconds": 2.0 * step, **interval, "answers": answers}


def write_trace(path: Path, steps: int) -> None:
    """One engine and one rank, one group per step, in no time at all."""
    file = open_trace(path)
    engine, rank = Tracer(file, "rollout-0"), Tracer(file, "train-0")
    for step in range(1, steps + 1):
        engine.state("generating", {})
        engine.begin_sequence(step)
        engine.end_sequence(step, step, {"place": 0})
        engine.state("waiting for prompts", {})
        rank.state("training", {"phase": f"pack step {step}"})
        rank.state("publishing", {"version": step})
        rank.state("waiting for batch", {})
    engine.close()
    rank.close()
