"""A batch whose loss or gradient was not finite, on disk, and what it was computed with.

    nonfinite/step-000012-0/    recipe.toml, batch.json (step, version, losses, the command)
                                part-0.safetensors: the micro-batches of rank 0, as they were packed
                                weights/: the policy at that moment, a Hugging Face folder

`minirl replay` computes its loss again. Nothing is pickled. Only the first few of a run are kept:
each holds a whole model.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from minirl.config import Config
from minirl.errors import RecipeError
from minirl.recipe import load, to_toml
from minirl.records import Batch
from minirl.train.batch import MicroBatch
from minirl.train.checkpoint import save_model
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


def save_part(saved: Path, rank: int, minibatch: Minibatch, seen: dict[str, float]) -> None:
    """By every rank: its own micro-batches and what it saw."""
    saved.mkdir(parents=True, exist_ok=True)
    tensors, numbers = {}, []
    for i, micro in enumerate(minibatch.micro_batches):
        columns = {f.name: getattr(micro, f.name) for f in fields(MicroBatch)}
        numbers.append({"max_seqlen": micro.max_seqlen, "is_dummy": micro.is_dummy})
        for name, value in columns.items():
            if name not in numbers[i] and value is not None:
                tensors[f"{i}/{name}"] = value.detach().cpu().contiguous().clone()
    metadata = {"micro_batches": json.dumps(numbers), "seen": json.dumps(seen)}
    save_file(tensors, saved / f"part-{rank}.safetensors", metadata)


def save_rest(
    saved: Path,
    policy: Policy,
    config: Config,
    source: Path,
    minibatch: Minibatch,
    batch: Batch,
) -> None:
    """By rank 0, when all parts are there."""
    save_model(saved / "weights", policy, source)
    (saved / "recipe.toml").write_text(to_toml(config))
    record = {
        "step": batch.step,
        "version": batch.version,
        "progress": minibatch.progress,
        "num_trainable": minibatch.num_trainable,
        "command": command(saved),
        "groups": [{**asdict(g), "masked": sorted(g.masked)} for g in batch.groups],
    }
    (saved / "batch.json").write_text(json.dumps(record, indent=2) + "\n")


def read(saved: Path) -> Saved:
    if not (saved / "batch.json").is_file():
        remedy = "name a folder of a run's nonfinite/, such as nonfinite/step-000012-0"
        raise RecipeError("PATH", str(saved), "has no batch.json", remedy)
    record = json.loads((saved / "batch.json").read_text())
    parts = [_read_part(path) for path in sorted(saved.glob("part-*.safetensors"))]
    return Saved(load(saved / "recipe.toml").config, record, saved / "weights", parts)


def _read_part(path: Path) -> list[MicroBatch]:
    with safe_open(path, framework="pt") as file:
        numbers = json.loads(file.metadata()["micro_batches"])
        columns: list[dict[str, Any]] = [dict(n) for n in numbers]
        for key in file.keys():  # noqa: SIM118
            place, _, name = key.partition("/")
            columns[int(place)][name] = file.get_tensor(key)
    return [MicroBatch(**column) for column in columns]
