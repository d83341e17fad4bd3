"""The black box: what was going on when a number went bad.

    blackbox/step-000012-logprob_gap/   why.json: rule, value, limit, remedy, the command, the last
                                        metrics, the canary that was published with these weights
                                        recipe.toml
                                        record/: the batch, as record.py writes it
                                        weights/: what the step began with, a Hugging Face folder

Takes a breach and what the controller holds (the ring, the weight store), gives a folder and the
command that computes it again. One a rule and run: each holds a whole model. A disk that is full
leaves no box, and a note; never a second fault.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirl import record
from minirl.config import Config
from minirl.errors import MinirlError
from minirl.lines import BROKEN
from minirl.recipe import to_toml
from minirl.records import Batch
from minirl.secrets import scrub
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import WeightStore

FOLDER = "blackbox"
NUM_LINES = 20  # of metrics
WITH_WEIGHTS = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json")


@dataclass(frozen=True)
class Why:
    rule: str
    step: int
    message: str
    value: float | None = None
    limit: str = ""
    remedy: str = ""


def command(box: Path) -> str:
    return f"minirl replay {box}"


class BlackBox:
    def __init__(
        self, config: Config, run_dir: Path, ring: TrajectoryRing, store: WeightStore, source: Path
    ):
        self._config, self._run_dir, self._source = config, run_dir, source
        self._ring, self._store = ring, store

    def folder(self, why: Why) -> Path:
        return self._run_dir / FOLDER / f"step-{why.step:06d}-{why.rule}"

    def write(
        self,
        why: Why,
        lines: list[dict[str, Any]],
        batch: Batch | None,
        version: int,
        values: dict[str, float | None] | None = None,
    ) -> str:
        """`version` is that of the weights to keep. Gives what a person is told."""
        box = self.folder(why)
        try:
            self._write(box, why, lines, batch, version, values or {})
        except Exception as error:  # safetensors has its own kind for a full disk
            shutil.rmtree(box, ignore_errors=True)
            return f"no black box could be written: {error}"
        return f"black box: {box}; look at it with: {command(box)}"

    def _write(
        self,
        box: Path,
        why: Why,
        lines: list[dict[str, Any]],
        batch: Batch | None,
        version: int,
        values: dict[str, float | None],
    ) -> None:
        shutil.rmtree(box, ignore_errors=True)
        box.mkdir(parents=True)
        (box / "recipe.toml").write_text(to_toml(self._config))
        if batch is not None:
            recorded = record.take(batch, self._ring, values)
            record.write(record.path_of(box, batch.step), recorded)
        canary = self._write_weights(box / "weights", version)
        found = {
            **why.__dict__,
            "version": version,
            "canary": canary,
            "command": command(box),
            "metrics": lines[-NUM_LINES:],
        }
        (box / "why.json").write_text(scrub(json.dumps(found, indent=2)) + "\n")

    def _write_weights(self, folder: Path, version: int) -> list[float] | None:
        from safetensors.torch import save_file

        found = self._store.snapshot(version)
        if found is None:
            return None
        folder.mkdir()
        save_file(found[0], folder / "model.safetensors", {"format": "pt"})
        for pattern in WITH_WEIGHTS:
            for path in self._source.glob(pattern):
                shutil.copy2(path, folder / path.name)
        return found[1].tolist()


@dataclass(frozen=True)
class Box:
    """A black box, read back."""

    why: dict[str, Any]
    batch: record.Recorded | None
    weights: Path | None


def read(box: Path) -> Box:
    try:
        why = json.loads((box / "why.json").read_bytes())
        if not isinstance(why, dict) or not isinstance(why.get("rule"), str):
            raise ValueError("it names no rule")
        canary = why.get("canary")
        if canary is not None and not all(isinstance(value, float) for value in canary):
            raise ValueError("its canary is not a list of numbers")
    except OSError as error:
        raise MinirlError(f"{box}/why.json cannot be read ({error.strerror})") from None
    except BROKEN as error:
        raise MinirlError(f"{box}/why.json is no black box's: {error}") from None
    steps = record.steps_of(box)
    batch = record.read(record.path_of(box, steps[0])) if steps else None
    return Box(why, batch, box / "weights" if (box / "weights").is_dir() else None)
