"""Checkpoints: ordinary Hugging Face folders that transformers and vLLM load as they are.

    step-000040/          config.json, model.safetensors, tokenizer and chat template
    step-000040/trainer/  state.json (step, version, consumed prompts, …), optimizer.safetensors,
                          master.safetensors where the model is saved in less than float32

Written aside and renamed, so a folder of this name is whole. Safetensors only: nothing is pickled.
"""

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from minirl.train.policy import Policy  # the controller reads checkpoints without a model

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
    policy: "Policy",
    optimizer: torch.optim.Optimizer,
    source: Path,
    state: dict[str, Any],
) -> None:
    """`source` is the model folder whose tokenizer files go along."""
    aside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    (aside / "trainer").mkdir(parents=True)
    masters = {name: p.detach() for name, p in policy.model.named_parameters()}
    policy.model.config.dtype = policy.dtype
    policy.model.save_pretrained(
        aside, state_dict={name: p.to(policy.dtype) for name, p in masters.items()}
    )
    for pattern in BESIDE_WEIGHTS:
        for path in source.glob(pattern):
            shutil.copy2(path, aside / path.name)
    if policy.dtype != torch.float32:
        save_file(_contiguous(masters), aside / "trainer" / "master.safetensors")
    save_file(_contiguous(_flat(policy, optimizer)), aside / "trainer" / "optimizer.safetensors")
    (aside / "trainer" / "state.json").write_text(json.dumps(state))
    for path in aside.rglob("*"):
        if path.is_file():
            _flush(path)
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(aside, folder)
    _flush(folder.parent)


def load(folder: Path, policy: "Policy", optimizer: torch.optim.Optimizer) -> None:
    """Optimizer state and master weights; the model itself was loaded from the same folder."""
    masters = folder / "trainer" / "master.safetensors"
    parameters = dict(policy.model.named_parameters())
    if masters.is_file():
        with torch.no_grad():
            for name, tensor in load_file(masters).items():
                parameters[name].copy_(tensor)
    for key, tensor in load_file(folder / "trainer" / "optimizer.safetensors").items():
        name, _, field = key.rpartition("/")
        # `step` too: a fused AdamW keeps it where the weights are.
        optimizer.state[parameters[name]][field] = tensor.to(parameters[name].device)


def read_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "trainer" / "state.json").read_text())


def latest(run_dir: Path) -> Path | None:
    """The newest whole checkpoint of a run."""
    found = sorted((run_dir / "checkpoints").glob("step-*/trainer/state.json"))
    return found[-1].parent.parent if found else None


def sweep(run_dir: Path) -> None:
    """Takes away what a trainer that was killed while saving has left."""
    for path in (run_dir / "checkpoints").glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def prune(run_dir: Path, keep: int) -> None:
    for path in sorted((run_dir / "checkpoints").glob("step-*"))[:-keep]:
        shutil.rmtree(path, ignore_errors=True)


def _flat(policy: "Policy", optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's state by parameter name: what a pickle would hold, without the pickle."""
    return {
        f"{name}/{field}": torch.as_tensor(value)
        for name, parameter in policy.model.named_parameters()
        for field, value in optimizer.state.get(parameter, {}).items()
    }


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
