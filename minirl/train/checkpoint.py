"""Checkpoints: ordinary Hugging Face folders that transformers and vLLM load as they are.

    step-000040/          config.json, model.safetensors, tokenizer and chat template
    step-000040/trainer/  state.json (step, version, consumed prompts, …), optimizer.safetensors,
                          master.safetensors where the model is saved in less than float32,
                          critic.safetensors and critic_optimizer.safetensors where there is one,
                          rng.safetensors: each rank's random generator
    step-000040/adapter/  with LoRA: the adapter alone, as peft reads it; the model above is merged

Written aside, flushed and renamed, so a folder of this name is whole. Safetensors only: nothing is
pickled. The learning rate is a function of the step, so it has no state of its own.

`read_whole` says whether all of a checkpoint is there: one MinirlError names the file and what is
wrong with it. It reads only headers: a safetensors file says itself how long it is.

Loads torch only to save and to load: the controller looks at checkpoints without it.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from minirl.buffer import History
from minirl.errors import MALFORMED, MinirlError, one_line

if TYPE_CHECKING:
    from torch import Tensor, nn

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


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A folder to fill, which then takes the name: `folder` is the whole new one, or the old."""
    aside, before = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old"))
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in [*aside.rglob("*"), aside]:  # folders too: they hold the names
            _flush(path)
        if folder.exists():
            os.rename(folder, before)
        os.rename(aside, folder)
        _flush(folder.parent)
        shutil.rmtree(before, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def save(
    folder: Path,
    learner: "Replica",
    critic: "Replica | None",
    source: Path,
    state: dict[str, Any],
    generators: "dict[str, Tensor]",
) -> None:
    """`source` is the model folder whose tokenizer files go along."""
    import torch

    from minirl.train import lora

    policy = cast("Policy", learner.module)
    with written_aside(folder) as aside:
        trainer = aside / "trainer"
        trainer.mkdir()
        save_model(aside, policy, source)
        if policy.dtype != torch.float32 and not lora.is_adapted(policy.model):
            _write(trainer / "master.safetensors", dict(policy.model.named_parameters()))
        _write(trainer / "optimizer.safetensors", learner.state_by_name(policy.model))
        if critic is not None:
            _write(trainer / "critic.safetensors", dict(critic.module.named_parameters()))
            _write(trainer / "critic_optimizer.safetensors", critic.state_by_name(critic.module))
        _write(trainer / "rng.safetensors", generators)
        (trainer / "state.json").write_text(json.dumps(state))


def save_model(folder: Path, policy: "Policy", source: Path) -> None:
    """Weights, config and tokenizer: what transformers and vLLM load; with LoRA, the adapter."""
    from minirl.train import lora

    weights = {name: weight() for name, weight in lora.merged(policy.model).items()}
    parameters = lora.own_names(policy.model)
    policy.model.config.dtype = policy.dtype
    policy.model.save_pretrained(
        folder, state_dict={name: weights[name].to(policy.dtype) for name in parameters}
    )
    copy_tokenizer(source, folder)
    if lora.is_adapted(policy.model):
        lora.save_adapter(policy.model, folder / "adapter", str(source))


def copy_tokenizer(source: Path, folder: Path) -> None:
    for pattern in BESIDE_WEIGHTS:
        for path in source.glob(pattern):
            shutil.copy2(path, folder / path.name)


def load(folder: Path, learner: "Replica", critic: "Replica | None", rank: int) -> None:
    """Optimizer states, this rank's generator, and weights that the model in the same folder does
    not hold exactly. A rank that was not there when it was saved keeps the generator of the seed.
    """
    import torch
    from safetensors.torch import load_file

    from minirl.train import lora

    policy, trainer = cast("Policy", learner.module), folder / "trainer"
    if lora.is_adapted(policy.model):
        lora.load_adapter(policy.model, folder / "adapter")
    elif (trainer / "master.safetensors").is_file():
        _copy_into(policy.model, load_file(trainer / "master.safetensors"))
    learner.load_state(policy.model, load_file(trainer / "optimizer.safetensors"))
    if critic is not None:
        _copy_into(critic.module, load_file(trainer / "critic.safetensors"))
        critic.load_state(critic.module, load_file(trainer / "critic_optimizer.safetensors"))
    if (generator := load_file(trainer / "rng.safetensors").get(f"rank-{rank}")) is not None:
        torch.set_rng_state(generator)


def _write(path: Path, tensors: "dict[str, Tensor]") -> None:
    from safetensors.torch import save_file

    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)


def _copy_into(module: "nn.Module", tensors: "dict[str, Tensor]") -> None:
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].detach().copy_(tensor)


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


def prune(run_dir: Path, keep: int, accuracies: Sequence[Sequence[float]] = ()) -> None:
    """The last `keep` stay, and the best by evaluation. `accuracies` are pairs of a version and
    what it reached; of equals the later is the better."""
    folders, reached = found(run_dir), {int(version): value for version, value in accuracies}
    judged = [(reached[v], f) for f in folders if (v := _version(f)) in reached]
    kept = {*folders[-keep:], *([max(judged)[1]] if judged else [])}
    for folder in folders:
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _version(folder: Path) -> int:
    """-1 where it does not say."""
    try:
        return int(read_state(folder)["history"]["version"])
    except (OSError, *MALFORMED):
        return -1


# Is one whole? -------------------------------------------------------------------------------


@contextmanager
def as_one_line(path: Path, what: str = "cannot be read") -> Iterator[None]:
    """Whatever a file that is not what it should be makes its reader, or a model, raise."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, *MALFORMED) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise MinirlError(f"{path} {what} ({one_line(reason)})") from None


def newest_whole(run_dir: Path) -> tuple[Path | None, dict[str, Any] | None, list[str]]:
    """The newest checkpoint that is whole, its state, and what is wrong with each newer one. Where
    all are broken there is nothing to resume from, and starting over would bury them."""
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


def read_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "trainer" / "state.json").read_bytes())


def read_whole(folder: Path) -> dict[str, Any]:
    """The controller's state, of a checkpoint whose files are all there and as long as they say."""
    weights = sorted(folder.glob("*.safetensors"))
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing or not weights:
        name = missing[0] if missing else "model.safetensors"
        raise MinirlError(f"{folder} is not whole: it has no {name}")
    names: set[str] = set()
    for path in [*weights, *sorted(folder.glob("*/*.safetensors"))]:
        with as_one_line(path), safe_open(path, framework="np") as file:
            names |= set(file.keys()) if path in weights else set()
    for path in [folder / "config.json", *folder.glob("*.index.json")]:
        with as_one_line(path):
            listed = dict(json.loads(path.read_bytes())).get("weight_map", {})
            if missing := sorted(set(listed) - names):
                raise ValueError(f"no file holds {missing[0]}")
    with as_one_line(folder / "trainer" / "state.json"):
        state = dict(read_state(folder))
        _ = History(**state["history"])
        indices = [state["step"], state["consumed_below"], *state["consumed_above"]]
        if not all(type(index) is int and index >= 0 for index in indices):
            raise ValueError("its step or its consumed prompts are no numbers")
    return state
