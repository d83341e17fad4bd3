"""Checkpoints: ordinary Hugging Face folders that transformers and vLLM load as they are.

    step-000040/          config.json, model.safetensors, tokenizer and chat template
    step-000040/trainer/  state.json (step, version, consumed prompts, …), optimizer.safetensors,
                          master.safetensors where the model is saved in less than float32,
                          critic.safetensors and critic_optimizer.safetensors where there is one,
                          rng.safetensors: each rank's generators
    step-000040/adapter/  with LoRA: the adapter alone, as peft reads it; the model above is merged

Written aside, flushed and renamed, so a folder of this name is whole. Safetensors only: nothing is
pickled. The learning rate is a function of the step, so it has no state of its own.

Before anything is built on a checkpoint, `read_whole` says whether all of it is there: one
MinirlError names the file and what is wrong with it (gone, cut, not JSON, not safetensors). It
reads only headers: a safetensors file says itself how long it is.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from minirl.buffer import History
from minirl.errors import MALFORMED, MinirlError, one_line
from minirl.train import lora
from minirl.train.optimizer import load_state, state_by_name

if TYPE_CHECKING:  # the controller reads checkpoints without a model
    from minirl.train.optimizer import Replica
    from minirl.train.policy import Policy

NEEDED = ("config.json", "trainer/state.json", "trainer/optimizer.safetensors")
BESIDE_WEIGHTS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "generation_config.json",
)


def save(
    folder: Path,
    learner: "Replica",
    critic: "Replica | None",
    source: Path,
    state: dict[str, Any],
    generators: dict[str, torch.Tensor] | None = None,
) -> None:
    """`source` is the model folder whose tokenizer files go along."""
    aside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    trainer = aside / "trainer"
    trainer.mkdir(parents=True)
    policy = cast("Policy", learner.module)
    save_model(aside, policy, source)
    if lora.is_adapted(policy.model):
        lora.save_adapter(policy.model, aside / "adapter", str(source))
    elif policy.dtype != torch.float32:
        save_file(_parameters(policy.model), trainer / "master.safetensors")
    optimizer = state_by_name(policy.model, learner.optimizer)
    save_file(_contiguous(optimizer), trainer / "optimizer.safetensors")
    if critic is not None:
        save_file(_parameters(critic.module), trainer / "critic.safetensors")
        optimizer = state_by_name(critic.module, critic.optimizer)
        save_file(_contiguous(optimizer), trainer / "critic_optimizer.safetensors")
    save_file(_contiguous(generators or {}), trainer / "rng.safetensors")
    (trainer / "state.json").write_text(json.dumps(state))
    for path in [*aside.rglob("*"), aside]:  # folders too: they hold the names
        _flush(path)
    before = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        os.rename(folder, before)
    os.rename(aside, folder)
    _flush(folder.parent)
    shutil.rmtree(before, ignore_errors=True)


def save_model(folder: Path, policy: "Policy", source: Path) -> None:
    """Weights, config and tokenizer: what transformers and vLLM load."""
    weights = {name: weight() for name, weight in lora.merged(policy.model).items()}
    parameters = lora.own_names(policy.model)
    policy.model.config.dtype = policy.dtype
    policy.model.save_pretrained(
        folder, state_dict={name: weights[name].to(policy.dtype) for name in parameters}
    )
    for pattern in BESIDE_WEIGHTS:
        for path in source.glob(pattern):
            shutil.copy2(path, folder / path.name)


def load(folder: Path, learner: "Replica", critic: "Replica | None") -> None:
    """Optimizer states, and weights that the model in the same folder does not hold exactly."""
    policy, trainer = cast("Policy", learner.module), folder / "trainer"
    if lora.is_adapted(policy.model):
        lora.load_adapter(policy.model, folder / "adapter")
    elif (trainer / "master.safetensors").is_file():
        _copy_into(policy.model, load_file(trainer / "master.safetensors"))
    load_state(policy.model, learner.optimizer, load_file(trainer / "optimizer.safetensors"))
    if critic is not None:
        _copy_into(critic.module, load_file(trainer / "critic.safetensors"))
        state = load_file(trainer / "critic_optimizer.safetensors")
        load_state(critic.module, critic.optimizer, state)


def read_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "trainer" / "state.json").read_text())


# Each rank's generators ------------------------------------------------------------------------


def generators(device: str) -> dict[str, torch.Tensor]:
    """Of this rank."""
    found = {"cpu": torch.get_rng_state()}
    if device.startswith("cuda"):
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore_generators(folder: Path, rank: int, device: str) -> None:
    """A rank that was not there when it was saved keeps those of the seed."""
    path = folder / "trainer" / "rng.safetensors"
    saved = load_file(path) if path.is_file() else {}
    if (state := saved.get(f"rank-{rank}/cpu")) is not None:
        torch.set_rng_state(state)
    if (state := saved.get(f"rank-{rank}/cuda")) is not None and device.startswith("cuda"):
        torch.cuda.set_rng_state(state, device)


# Which there are -------------------------------------------------------------------------------


def found(run_dir: Path) -> list[Path]:
    """All of a run, oldest first."""
    return sorted(path for path in (run_dir / "checkpoints").glob("step-*") if path.is_dir())


def sweep(run_dir: Path) -> None:
    """Takes away what a trainer that was killed while saving has left."""
    for path in (run_dir / "checkpoints").glob(".step-*"):
        whole = path.with_name(path.name[1:].removesuffix(".old"))
        if path.suffix == ".old" and not whole.exists():
            os.rename(path, whole)  # it was about to be replaced
        else:
            shutil.rmtree(path, ignore_errors=True)


def prune(
    run_dir: Path, keep: int, accuracies: Sequence[Sequence[float]] = (), pending: int | None = None
) -> None:
    """The last `keep` stay, and the best by evaluation, and one that is being evaluated.
    `accuracies` are pairs of a version and what it reached; of equals the later is the better."""
    folders = found(run_dir)
    versions = {folder: _version(folder) for folder in folders}
    reached = {int(version): accuracy for version, accuracy in accuracies}
    kept = set(folders[-keep:])
    kept |= {folder for folder in folders if pending is not None and versions[folder] == pending}
    judged = [folder for folder in folders if versions[folder] in reached]
    if judged:
        kept.add(max(judged, key=lambda folder: (reached[versions[folder]], folder.name)))
    for folder in folders:
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _version(folder: Path) -> int:
    """-1 where it does not say."""
    try:
        return int(read_state(folder)["history"]["version"])
    except (OSError, ValueError, LookupError, TypeError):
        return -1


# Is one whole? -------------------------------------------------------------------------------


@contextmanager
def as_one_line(what: str) -> Iterator[None]:
    """Whatever a file that is not what it should be makes its reader raise."""
    try:
        yield
    except (OSError, SafetensorError, *MALFORMED) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise MinirlError(f"{what} cannot be read ({one_line(reason)})") from None


def newest_first(run_dir: Path) -> list[Path]:
    return found(run_dir)[::-1]


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
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("it is not a JSON object")
    return value


# Parts ----------------------------------------------------------------------------------------


def _parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return _contiguous(dict(module.named_parameters()))


@torch.no_grad()
def _copy_into(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
