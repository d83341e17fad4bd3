"""A batch whose loss, gradient or logprobs were not finite, on disk, and what it was computed with.

    nonfinite/step-000012-0/    recipe.toml, batch.json (step, version, groups, the command)
                                metrics.jsonl: the last steps (written by the controller)
                                part-0.safetensors: the micro-batches of rank 0, as they were packed
                                weights/: the policy at that moment, a Hugging Face folder

`minirl replay` computes its loss again. Nothing is pickled. Only the first few of a run are kept:
each holds a whole model.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from minirl.config import Config
from minirl.errors import MinirlError, RecipeError
from minirl.recipe import load, to_toml
from minirl.records import Batch
from minirl.train.batch import MicroBatch
from minirl.train.checkpoint import as_one_line, read_object, save_model
from minirl.train.optimizer import Replica
from minirl.train.policy import Policy
from minirl.train.prepare import Minibatch

MAX_SAVED = 2


@dataclass(frozen=True)
class Saved:
    config: Config
    record: dict[str, Any]  # batch.json
    weights: Path
    parts: list[list[MicroBatch]]  # by rank


def folder(run_dir: Path, step: int, progress: float) -> Path:
    return run_dir / "nonfinite" / f"step-{step:06d}-{round(100 * progress)}"


def command(saved: Path) -> str:
    return f"minirl replay {saved}"


def in_weights(replicas: Iterable[Replica]) -> str:
    """The first parameter that is not finite, or "". By norms: one pass over the weights."""
    for replica in replicas:
        named = list(replica.module.named_parameters())
        norms = torch.stack(torch._foreach_norm([p.detach() for _, p in named]))
        if not norms.isfinite().all():
            return named[int((~norms.isfinite()).nonzero()[0, 0])][0]
    return ""


def in_state(replicas: Iterable[Replica]) -> str:
    """The same for what optimizers keep."""
    for replica in replicas:
        for state in replica.optimizer.state.values():
            for name, value in (state or {}).items():  # None: another rank's share
                if torch.is_tensor(value) and not value.isfinite().all():
                    return f"{name} of an optimizer"
    return ""


def what_is_bad(seen: dict[str, float]) -> str:
    """In the order in which one spoils the next."""
    names = {
        "vllm": "vLLM's logprobs were",
        "logprobs": "the trainer's logprobs were",
        "loss": "the loss was",
        "grad_norm": "the gradient was",
    }
    bad = [names[name] for name in names if not math.isfinite(seen.get(name, 0.0))]
    return bad[0] if bad else "the loss or its gradient, on another rank, was"


def save_part(saved: Path, rank: int, minibatch: Minibatch, seen: dict[str, float]) -> str:
    """By every rank: its own micro-batches and what it saw. Gives why it could not, or ""."""
    tensors, numbers = {}, []
    for i, micro in enumerate(minibatch.micro_batches):
        columns = {f.name: getattr(micro, f.name) for f in fields(MicroBatch)}
        numbers.append({"max_seqlen": micro.max_seqlen, "is_dummy": micro.is_dummy})
        for name, value in columns.items():
            if name not in numbers[i] and value is not None:
                tensors[f"{i}/{name}"] = value.detach().cpu().contiguous().clone()
    metadata = {"micro_batches": json.dumps(numbers), "seen": json.dumps(seen)}
    try:
        saved.mkdir(parents=True, exist_ok=True)
        save_file(tensors, saved / f"part-{rank}.safetensors", metadata)
    except (OSError, SafetensorError) as error:
        return str(error)
    return ""


def save_rest(
    saved: Path,
    policy: Policy,
    config: Config,
    source: Path,
    minibatch: Minibatch,
    batch: Batch,
) -> str:
    """By rank 0, when all parts are there. Gives why it could not, or ""."""
    record = {
        "step": batch.step,
        "version": batch.version,
        "progress": minibatch.progress,
        "num_trainable": minibatch.num_trainable,
        "command": command(saved),
        "groups": [group.as_json() for group in batch.groups],
    }
    try:
        save_model(saved / "weights", policy, source)
        (saved / "recipe.toml").write_text(to_toml(config))
        (saved / "batch.json").write_text(json.dumps(record, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        return str(error)
    return ""


def read(saved: Path) -> Saved:
    """Whatever is wrong with the folder is one MinirlError."""
    if not (saved / "batch.json").is_file():
        remedy = "name a folder of a run's nonfinite/, such as nonfinite/step-000012-0"
        raise RecipeError("PATH", str(saved), "has no batch.json", remedy)
    record = read_object(saved / "batch.json")
    with as_one_line(f"{saved}/batch.json"):
        for key, kind in (("step", int), ("num_trainable", int), ("progress", float)):
            if not isinstance(record[key], (kind, int)) or not record[key] >= 0:
                raise ValueError(f"{key} is no number")
    if not record["num_trainable"]:
        raise MinirlError(f"{saved}/batch.json: num_trainable is 0")
    parts = [_read_part(path) for path in sorted(saved.glob("part-*.safetensors"))]
    return Saved(load(saved / "recipe.toml").config, record, saved / "weights", parts)


def _read_part(path: Path) -> list[MicroBatch]:
    with as_one_line(str(path)):
        with safe_open(path, framework="pt") as file:
            numbers = json.loads((file.metadata() or {})["micro_batches"])
            columns: list[dict[str, Any]] = [dict(n) for n in numbers]
            for key in file.keys():  # noqa: SIM118
                place, _, name = key.partition("/")
                columns[int(place)][name] = file.get_tensor(key)
        return [MicroBatch(**column) for column in columns]
