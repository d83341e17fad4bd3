"""Checkpoints: Hugging Face folders that transformers and vLLM load as they are.

    step-000040/          config.json, model.safetensors, tokenizer and chat template
    step-000040/trainer/  state.json (the controller's part), optimizer.safetensors,
                          master.safetensors where the model is saved in less than float32,
                          critic.safetensors and critic_optimizer.safetensors where there is one;
                          of what is sharded each rank's share: optimizer-0-of-2.safetensors
    step-000040/adapter/  with LoRA: the adapter alone, as peft reads it; the model above is merged

Written aside, flushed and renamed, so a folder of this name is whole. Only saving and loading
import torch: the controller looks at checkpoints without it.
"""

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open

from minirl.errors import MALFORMED, MinirlError, one_line
from minirl.messages import CheckpointState

if TYPE_CHECKING:
    from minirl.train.optimizer import Replica
    from minirl.train.policy import Policy

STATE = "trainer/state.json"
OPTIMIZERS = ("optimizer", "critic_optimizer")
MASTERS = ("master", "critic")
BESIDE_WEIGHTS = ("*token*", "chat_template*", "vocab*", "merges.txt", "generation_config.json")


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


def shares_of(folder: Path) -> Path:
    """Where ranks put what they hold before rank 0 saves the model."""
    return folder.with_name(f".{folder.name}.shares")


def save_share(folder: Path, replicas: "list[Replica]") -> None:
    """By each rank: its part of the optimizers' states, and of weights that the model's own file
    does not hold exactly."""
    import torch

    from minirl.train import lora

    learner, num = replicas[0], replicas[0].num_shares
    policy = cast(Any, learner.module)
    has_master = policy.dtype != torch.float32 and not lora.is_adapted(policy.model)
    end = f"-{learner.rank}-of-{num}" if num > 1 else ""
    if learner.rank >= num:
        return
    shares_of(folder).mkdir(parents=True, exist_ok=True)
    for name, replica in zip(OPTIMIZERS, replicas, strict=False):
        _write(shares_of(folder) / f"{name}{end}.safetensors", replica.state_by_name())
    for name, replica in zip(MASTERS, replicas, strict=False):
        must_save = learner.is_sharded or learner.rank == 0
        if must_save and (has_master or replica is not learner):
            path = f"{name}{end if learner.is_sharded else ''}.safetensors"
            _write(shares_of(folder) / path, replica.slices)


def _write(path: Path, tensors: "dict[str, Any]") -> None:
    from safetensors.torch import save_file

    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)


def gather(policy: "Policy", must_keep: bool) -> dict[str, Any]:
    """All weights of the model, merged, and those of adapters: in the memory of the one rank that
    keeps them. Where weights are sharded each is a collective: every rank calls this."""
    from minirl.train import lora

    kept = {}
    for name, weight in lora.merged(policy.model).items():
        tensor = weight()
        if must_keep:
            kept[name] = tensor.to(policy.dtype).cpu()
    return kept | lora.adapter(policy.model)


def save(
    folder: Path, policy: "Policy", weights: dict[str, Any], source: Path, state: CheckpointState
) -> None:
    """By rank 0, when all shares are saved. `weights` are from `gather`; `source` is the model
    folder whose tokenizer files are copied."""
    with written_aside(folder) as aside:
        save_model(aside, policy, weights, source)
        os.rename(shares_of(folder), aside / "trainer")
        (aside / STATE).write_text(json.dumps(asdict(state)))


def save_model(folder: Path, policy: "Policy", weights: dict[str, Any], source: Path) -> None:
    """Weights, config and tokenizer: what transformers and vLLM load; with LoRA, the adapter."""
    from minirl.train import lora

    own = {name: tensor for name, tensor in weights.items() if not lora.is_adapters(name)}
    policy.model.config.dtype = policy.dtype
    policy.model.save_pretrained(folder, state_dict=own, max_shard_size="1TB")
    copy_tokenizer(source, folder)
    if adapter := {name: tensor for name, tensor in weights.items() if lora.is_adapters(name)}:
        lora.save_adapter(policy.model, adapter, folder / "adapter", str(source))


def copy_tokenizer(source: Path, folder: Path) -> None:
    for path in (path for pattern in BESIDE_WEIGHTS for path in source.glob(pattern)):
        shutil.copy2(path, folder / path.name)


def load(folder: Path, replicas: "list[Replica]") -> None:
    """Optimizer states, and weights that the model in the same folder does not hold exactly."""
    from minirl.train import lora

    files = defaultdict(list)
    for path in (folder / "trainer").glob("*.safetensors"):
        files[path.stem.partition("-")[0]].append(path)
    if lora.is_adapted(replicas[0].named):
        lora.load_adapter(replicas[0].named, folder / "adapter")
    for master, optimizer, replica in zip(MASTERS, OPTIMIZERS, replicas, strict=False):
        if master in files:
            replica.load_weights(shares(files[master]))
        # The blocks of an 8-bit state are those of a rank's own slices.
        own = replica.rank if replica.is_8bit and replica.is_sharded else None
        replica.load_state(shares(files[optimizer], own))


def shares(paths: list[Path], only: int | None = None) -> "dict[str, Callable[[], Any]]":
    """Tensors that ranks saved (or one of them), each read when it is asked for."""
    in_order = sorted(paths, key=lambda path: int(f"{path.stem}-0".split("-")[1]))
    files = defaultdict(list)
    for path in in_order if only is None else [in_order[only]]:
        file = safe_open(path, framework="pt")
        for name in file.keys():  # noqa: SIM118
            files[name].append(file)
    return {name: partial(_joined, name, some) for name, some in files.items()}


def _joined(name: str, files: list[Any]) -> Any:
    """A whole tensor, or the slices of all ranks in order."""
    import torch

    first, *rest = [file.get_tensor(name) for file in files]
    return torch.cat([first, *rest]) if rest and first.ndim else first


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
            shutil.rmtree(path, ignore_errors=True)


def prune(run_dir: Path, keep: int, accuracies: Sequence[tuple[int, float]] = ()) -> None:
    """Keeps the last `keep`, and the best by its version's evaluation: of equals the later."""
    folders, scores = found(run_dir), {}
    for folder in folders:
        with suppress(MinirlError):  # it is broken
            scores[folder] = dict(accuracies).get(read_state(folder).history.version, -1.0)
    best = max(folders, key=lambda folder: (scores.get(folder, -1.0), folder))
    for folder in folders[:-keep]:
        if folder != best:
            shutil.rmtree(folder, ignore_errors=True)


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
