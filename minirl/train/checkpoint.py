"""Checkpoints: Hugging Face folders that transformers and vLLM load as they are.

    step-000040/          config.json, model.safetensors, tokenizer and chat template
    step-000040/trainer/  state.json (the controller's part), optimizer.safetensors,
                          master.safetensors: what is trained, where the model is saved in less
                          than float32 or merged,
                          critic.safetensors and critic_optimizer.safetensors where there is one;
                          of what is sharded each rank's share: optimizer-0-of-2.safetensors
    step-000040/adapter/  with LoRA: the adapter alone, as peft reads it; the model above is merged

Written by `replacing`, so a folder of this name is whole. Leaves out tensors: policy.py
writes the model, and each Replica its share. The controller looks at checkpoints without torch.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open

from minirl.errors import MALFORMED, MinirlError, one_line
from minirl.messages import CheckpointState
from minirl.run_dir import remove

STATE = "trainer/state.json"
BESIDE_WEIGHTS = ("*token*", "chat_template*", "vocab*", "merges.txt", "generation_config.json")


def copy_tokenizer(source: Path, folder: Path) -> None:
    for path in (path for pattern in BESIDE_WEIGHTS for path in source.glob(pattern)):
        shutil.copy2(path, folder / path.name)


def found(run_dir: Path) -> list[Path]:
    """All of a run, oldest first."""
    return sorted(path for path in (run_dir / "checkpoints").glob("step-*") if path.is_dir())


def sweep(run_dir: Path) -> None:
    """Removes what a trainer that was killed while saving has left."""
    for path in (run_dir / "checkpoints").glob(".step-*"):
        whole = path.with_name(path.name[1:].removesuffix(".old"))
        if path.suffix == ".old" and not whole.exists():
            os.rename(path, whole)  # it was about to be replaced
        else:
            remove(path)


def prune(run_dir: Path, keep: int, accuracies: Sequence[tuple[int, float]] = ()) -> None:
    """Keeps the last `keep`, and the best by its version's evaluation: of equals the later."""
    folders, scores = found(run_dir), {}
    for folder in folders:
        with suppress(MinirlError):  # it is broken
            scores[folder] = dict(accuracies).get(read_state(folder).history.version, -1.0)
    best = max(folders, key=lambda folder: (scores.get(folder, -1.0), folder))
    for folder in folders[:-keep]:
        if folder != best:
            remove(folder)


@contextmanager
def as_one_line(path: Path, what: str = "cannot be read") -> Iterator[None]:
    """Whatever a file that is not what it should be makes its reader, or a model, raise."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, *MALFORMED) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise MinirlError(f"{path} {what} ({one_line(reason)})") from None


def newest_whole(run_dir: Path) -> tuple[Path | None, CheckpointState | None, list[str]]:
    """The newest checkpoint that is whole, its state, and what is wrong with each newer one. Raises
    where all are broken: starting over would bury them."""
    broken: list[str] = []
    for folder in reversed(found(run_dir)):
        try:
            return folder, read_whole(folder), broken
        except MinirlError as error:
            broken.append(str(error))
    if broken:
        remedy = f"start a new run, or from the beginning without {run_dir / 'checkpoints'}"
        raise MinirlError(f"no checkpoint of {run_dir} is whole; {remedy} ({broken[0]})")
    return None, None, broken


def read_state(folder: Path) -> CheckpointState:
    with as_one_line(folder / STATE):
        return TypeAdapter(CheckpointState).validate_json((folder / STATE).read_bytes())


def read_whole(folder: Path) -> CheckpointState:
    """The state of a checkpoint whose files are all there and as long as their headers say."""
    shares = [path.stem for path in (folder / "trainer").glob("optimizer*.safetensors")]
    if not shares or not shares[0].endswith(("optimizer", f"-of-{len(shares)}")):
        raise MinirlError(f"{folder} lacks the optimizer's state, or a share of it")
    for path in sorted({folder / "model.safetensors", *folder.rglob("*.safetensors")}):
        with as_one_line(path), safe_open(path, framework="np"):
            pass
    with as_one_line(folder / "config.json"):
        json.loads((folder / "config.json").read_bytes())
    return read_state(folder)
