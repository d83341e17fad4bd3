"""Is a checkpoint whole? Asked before anything is built on it.

Takes a folder, gives its state, or one MinirlError that names the file and what is wrong with it:
gone, cut, not JSON, not safetensors. Only headers are read: safetensors files say themselves how
long they are, so one that was cut is found without reading its weights.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from minirl.buffer import History
from minirl.errors import MALFORMED, MinirlError, one_line

NEEDED = ("config.json", "trainer/state.json", "trainer/optimizer.safetensors")


@contextmanager
def as_one_line(what: str) -> Iterator[None]:
    """Whatever a file that is not what it should be makes its reader raise."""
    try:
        yield
    except (OSError, SafetensorError, *MALFORMED) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise MinirlError(f"{what} cannot be read ({one_line(reason)})") from None


def newest_first(run_dir: Path) -> list[Path]:
    found = (run_dir / "checkpoints").glob("step-*")
    return sorted((path for path in found if path.is_dir()), reverse=True)


def newest_whole(run_dir: Path) -> tuple[Path | None, dict[str, Any] | None, list[str]]:
    """The newest checkpoint that is whole, its state, and what is wrong with each newer one. Where
    all are broken there is nothing to go on from, and starting over would bury them."""
    broken: list[str] = []
    for folder in newest_first(run_dir):
        try:
            return folder, read_whole(folder), broken
        except MinirlError as error:
            broken.append(str(error))
    if broken:
        remedy = f"start a new run, or from the beginning without {run_dir / 'checkpoints'}"
        raise MinirlError(f"no checkpoint of {run_dir} is whole; {remedy} ({broken[0]})")
    return None, None, broken


def read_whole(folder: Path) -> dict[str, Any]:
    """The controller's state, of a checkpoint whose files are all there and as long as they say."""
    for name in NEEDED:
        if not (folder / name).is_file():
            raise MinirlError(f"{folder} is not whole: it has no {name}")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise MinirlError(f"{folder} is not whole: it has no model.safetensors")
    read_object(folder / "config.json")
    held: set[str] = set()
    for path in [*weights, *sorted(folder.glob("*/*.safetensors"))]:
        with as_one_line(str(path)), safe_open(path, framework="np") as file:
            held |= set(file.keys()) if path in weights else set()
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with as_one_line(str(index)):
            missing = read_object(index)["weight_map"].keys() - held
        if missing:
            raise MinirlError(f"{folder} is not whole: no file holds {min(missing)}")
    state = read_object(folder / "trainer" / "state.json")
    if type(state.get("step")) is not int:
        raise MinirlError(f"{folder}/trainer/state.json names no step")
    with as_one_line(f"{folder}/trainer/state.json"):
        _ = History(**state["history"])
        indices = [state["consumed_below"], *state["consumed_above"]]
        if not all(type(index) is int and index >= 0 for index in indices):
            raise ValueError("the consumed prompts are no indices")
    return state


def read_object(path: Path) -> dict[str, Any]:
    with as_one_line(str(path)):
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
    return found
