"""`minirl train`: check the recipe, choose the run directory, launch."""

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minirl.cli.app import EXIT_CODES, Overrides, Recipe, app, show, size
from minirl.errors import RecipeError

if TYPE_CHECKING:
    from minirl.config import Config

RUNS = Path("runs")


@app.command(
    help=f"""Train by a recipe.

\b
Examples:
  minirl train recipes/smoke.toml
  minirl train recipes/smoke.toml --set train.steps=10 --set buffer.max_staleness=0
  minirl train recipes/gsm8k.toml --dry-run
  minirl train recipes/gsm8k.toml --resume
  minirl train recipes/gsm8k.toml --run-dir runs/mine    # again: goes on with it

\b
What it leaves behind, in runs/<recipe>-<time>/:
  recipe.toml      every value of this run
  metrics.jsonl    one line a step
  samples.jsonl    a few readable answers a step
  checkpoints/     Hugging Face folders that transformers and vLLM load as they are
  summary.json     accuracy before and after, steps, tokens, max staleness

In a terminal it shows a dashboard (q finish and save, p another sample, s save now); elsewhere, or
with --plain, one line a step. `minirl watch` shows the same from another terminal.

Ctrl-C once: finish the step, save, exit. Twice: now.
{EXIT_CODES}"""
)
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the run goes; one that is there already goes on. "
            "Default: runs/<recipe>-<time>.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with --run-dir, or with the recipe's last run.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="One plain line a step instead of the dashboard.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check all that needs no GPU, show the plan, and stop."),
    ] = False,
) -> None:
    from minirl.recipe import check_loggers, check_task, load

    loaded = load(recipe, overrides or [])
    check_task(loaded.config)
    check_loggers(loaded.config)
    plan = list(plan_rows(loaded.config))  # checks the model too, so also before a real run
    chosen = choose_run_dir(recipe, run_dir, resume)
    resume = resume or holds_run(chosen)
    if dry_run:
        notes = machine_notes(loaded.config)
        show(plan)
        typer.echo("".join(f"note: {note}\n" for note in notes) + "recipe ok")
        return
    from minirl.launch import train as launch

    raise typer.Exit(launch(loaded, recipe, chosen, resume, plain))


def choose_run_dir(recipe: Path, run_dir: Path | None, resume: bool) -> Path:
    """Where the run goes: a new directory, or the one to go on with."""
    if resume:
        return existing_run_dir(recipe, run_dir)
    if run_dir is None:
        return RUNS / f"{recipe.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    if run_dir.is_file():
        raise RecipeError("--run-dir", str(run_dir), "is a file", "name a new directory")
    if run_dir.is_dir() and any(run_dir.iterdir()):
        check_holds_run(run_dir)
    return run_dir


def holds_run(run_dir: Path) -> bool:
    """The first thing that a run leaves behind is its recipe."""
    return (run_dir / "recipe.toml").is_file()


def check_holds_run(run_dir: Path) -> None:
    if not holds_run(run_dir):
        rule = "is not empty and holds no run (there is no recipe.toml in it)"
        raise RecipeError("--run-dir", str(run_dir), rule, "name another directory")


def existing_run_dir(recipe: Path, run_dir: Path | None) -> Path:
    if run_dir is not None:
        if not run_dir.is_dir():
            remedy = "name a run directory, or leave --resume out to start one"
            raise RecipeError("--run-dir", str(run_dir), "no such directory to resume", remedy)
        check_holds_run(run_dir)
        return run_dir
    # By name, not by glob: runs/gsm8k-* would also match the runs of gsm8k-2gpu.
    name = re.compile(rf"{re.escape(recipe.stem)}-\d{{8}}-\d{{6}}")
    found = sorted(p for p in RUNS.glob("*") if p.is_dir() and name.fullmatch(p.name))
    if not found:
        remedy = "leave --resume out to start one, or name it with --run-dir"
        raise RecipeError("--resume", f"{RUNS}/{recipe.stem}-*", "no run of this recipe", remedy)
    return found[-1]


def plan_rows(config: "Config") -> Iterator[tuple[str, str]]:
    """What a run would do, row by row; checks the model where it is on this machine."""
    from minirl.config import TINY
    from minirl.recipe import check_model, find_model, read_model_config

    folder = find_model(config)
    weights = "unknown before the model is here"
    if config.model.path == TINY:
        model, weights = "tiny (minirl builds it at first use)", "a few MiB"
    elif folder is None:
        model = f"{config.model.path} (hub name: not looked up, not in the local cache)"
    else:
        check_model(config, read_model_config(config, folder))
        model = config.model.path
        with suppress(OSError):
            num_bytes = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
            weights = size(num_bytes) if num_bytes else "no safetensors beside config.json"
    devices = config.devices
    parallel = f", {devices.tensor_parallel} to an engine" if devices.tensor_parallel > 1 else ""
    per_step = config.train.batch_size * config.rollout.group_size
    yield "model", f"{model}, {config.model.dtype}"
    yield "weights", weights
    yield "task", config.tasks.kind + (f" ({config.tasks.data})" if config.tasks.data else "")
    yield "devices", f"{devices.kind}: {devices.rollout} rollout{parallel} + {devices.train} train"
    yield "slots", f"{config.num_slots} groups, staleness at most {config.buffer.max_staleness}"
    yield (
        "step",
        f"{per_step} trajectories ({config.train.batch_size} prompts × {config.rollout.group_size})"
        f", {config.train.steps} steps",
    )
    yield "trajectory ring", f"{size(config.ring_bytes)} of shared memory"


def machine_notes(config: "Config") -> list[str]:
    """What this machine lacks for the recipe. Too few GPUs is a note: a dry run is for anywhere."""
    from minirl.devices import find_devices, free_memory_bytes
    from minirl.recipe import check_devices, check_memory

    notes = []
    kind, available = find_devices(config.devices.kind)
    try:
        check_devices(config, kind, available)
    except RecipeError as error:
        if kind == "cpu" and config.devices.kind != "cuda":
            raise
        notes.append(f"this machine cannot run it: {error}")
    try:
        check_memory(config, free_memory_bytes() or config.ring_bytes)
    except RecipeError as error:
        notes.append(f"this machine cannot run it: {error}")
    return notes
