"""`minirl train --dry-run`: what a run would do, and what this machine lacks for it.

Takes a recipe, gives rows and notes. Checks the task, the loggers and a model that is on this
machine; a real run asks for the rows too. Leaves out: torch, and everything that needs a GPU.
"""

from minirl import recipe
from minirl.config import TINY, Config
from minirl.devices import find_devices, free_memory_bytes
from minirl.errors import RecipeError


def plan_rows(config: Config) -> list[tuple[str, str]]:
    recipe.check_task(config, "train.estimator", "train.objective")
    recipe.check_loggers(config)
    devices, size = config.devices, f"{config.train.batch_size} × {config.rollout.group_size}"
    return [
        ("model", f"{_model(config)}, {config.model.dtype}"),
        ("task", f"{config.tasks.kind} {config.tasks.data}"),
        ("devices", f"{devices.kind}: {devices.rollout} rollout + {devices.train} train"),
        ("slots", f"{config.num_slots} groups, staleness at most {config.buffer.max_staleness}"),
        ("steps", f"{config.train.steps} of {size} trajectories"),
        ("trajectory ring", f"{config.ring_bytes / 2**20:,.1f} MiB of shared memory"),
    ]


def _model(config: Config) -> str:
    path, folder = config.model.path, recipe.find_model(config)
    if folder is None:
        return path if path == TINY else f"{path} (not in the local cache: not checked)"
    recipe.check_model(config, folder)
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return f"{path}, {num_bytes / 2**20:,.1f} MiB of safetensors"


def machine_notes(config: Config) -> list[tuple[str, str]]:
    """Too few GPUs is a note: a GPU recipe can be checked anywhere."""
    kind, available = find_devices(config.devices.kind)
    try:
        recipe.check_devices(config, kind, available)
        recipe.check_memory(config, free_memory_bytes())
    except RecipeError as error:
        if kind == "cpu" and config.devices.kind != "cuda":
            raise
        return [("note", f"this machine cannot run it: {error}")]
    return []
