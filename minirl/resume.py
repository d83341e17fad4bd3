"""Where a run begins: at nothing, or where it was left. Takes a run directory, gives a Start.

A key of the recipe may change where it cannot change what is learned (number of devices, memory,
how often something is saved or shown); any other change is refused.
"""

from pathlib import Path
from typing import NamedTuple

from minirl.buffer import History
from minirl.config import KEYS, Config, get
from minirl.errors import RecipeError
from minirl.messages import CheckpointState
from minirl.recipe import load
from minirl.train import checkpoint

MAY_CHANGE = (
    *("devices.", "eval.", "checkpoint.", "log.", "sft.", "buffer.target_staleness"),
    *("rollout.max_num_seqs", "rollout.memory_fraction", "rollout.kv_cache_gib"),
    *("train.steps", "train.max_tokens", "train.gradient_checkpointing", "train.compile"),
    *("train.shard", "tasks.verifiers", "tasks.timeout_s", "buffer.max_faults"),
)


class Start(NamedTuple):
    folder: Path | None = None  # the checkpoint; None: the run begins with the recipe's model
    state: CheckpointState = CheckpointState(0, History(), consumed_below=0, evaluating=0)
    notes: tuple[str, ...] = ()  # what a person should be told


def find_start(run_dir: Path) -> Start:
    """At the newest checkpoint that is whole."""
    checkpoint.sweep(run_dir)
    found, state, broken = checkpoint.newest_whole(run_dir)
    notes = [f"passed over: {problem}" for problem in broken]
    if state is None:
        return Start(notes=(*notes, "no checkpoint yet: starting from the beginning"))
    return Start(found, state, (*notes, f"going on from {found}"))


def check_changes(config: Config, run_dir: Path) -> list[str]:
    """The changes that are accepted, one each; a RecipeError that names all where any is not."""
    before = load(run_dir / "recipe.toml").config
    pairs = {key: (get(before, key), get(config, key)) for key in KEYS}
    changed = {key: f"{key} {old} → {new}" for key, (old, new) in pairs.items() if old != new}
    # Under a schedule the learning rate of every step depends on train.steps.
    fixed: tuple[str, ...] = () if config.train.schedule == "constant" else ("train.steps",)
    # The blocks of an 8-bit state are those of a rank's own slices.
    if config.train.optimizer == "adamw8bit" and "full" in (before.train.shard, config.train.shard):
        fixed = (*fixed, "train.shard", "devices.train")
    accepted = [key for key in changed if key.startswith(MAY_CHANGE) and key not in fixed]
    if refused := [shown for key, shown in changed.items() if key not in accepted]:
        rule = f"the run was begun with another recipe: {', '.join(refused)}"
        remedy = "set these back, or start a new run"
        raise RecipeError("--resume", str(run_dir), rule, remedy)
    return [changed[key] for key in accepted]


def check_steps(config: Config, step: int) -> None:
    if step > config.train.steps:
        rule = f"the run is at step {step} already"
        raise RecipeError("train.steps", config.train.steps, rule, f"raise it to {step}")
