"""The command line: parse, call, exit code. The only file that imports typer.

Imports stay inside the commands, so that `minirl --help` answers at once and loads no torch.
Every MinirlError ends as one line on stderr and its exit code; a traceback is always our bug.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minirl.errors import MinirlError, RecipeError, one_line

if TYPE_CHECKING:
    from minirl.config import Config

RUNS = Path("runs")
EXIT_CODES = """
\b
Exit codes:
  0    done
  1    the run failed (or doctor found something)
  2    wrong input: the one line on stderr names key, value, rule and remedy
  3    nothing moved for log.stall_s seconds; stacks are in the run directory
  130  stopped by Ctrl-C or SIGTERM: saved after one, not after two
"""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help=f"""Fully asynchronous reinforcement learning for language models, on one box.

\b
Start here:
  minirl doctor                                  is this machine ready?
  minirl train recipes/smoke.toml                a few minutes on 2 CPU cores, no download
  minirl train recipes/gsm8k.toml --dry-run      check a GPU recipe on any machine
  minirl plan recipes/gsm8k.toml --gpu 4090      does it fit, how fast, which split? No GPU needed
  minirl config recipes/smoke.toml               every value, and where it came from
{EXIT_CODES}""",
)


def _benches() -> str:
    from minirl.bench import BENCHES

    return "\n".join(f"  {name:<10} {bench.about}" for name, bench in BENCHES.items())


Recipe = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A TOML recipe, such as recipes/smoke.toml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Change one value; may be given many times. The value is TOML, a bare word a string.",
    ),
]


@app.command(
    help=f"""Train by a recipe.

\b
Examples:
  minirl train recipes/smoke.toml
  minirl train recipes/smoke.toml --set train.steps=10 --set buffer.max_staleness=0
  minirl train recipes/gsm8k.toml --dry-run
  minirl train recipes/gsm8k.toml --resume

\b
What it leaves behind, in runs/<recipe>-<time>/:
  recipe.toml      every value of this run
  metrics.jsonl    one line a step
  samples.jsonl    a few readable answers a step
  checkpoints/     Hugging Face folders that transformers and vLLM load as they are
  summary.json     accuracy before and after, steps, tokens, max staleness

Ctrl-C once: finish the step, save, exit. Twice: now.
{EXIT_CODES}"""
)
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the run goes. Default: runs/<recipe>-<time>."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with --run-dir, or with the recipe's last run.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check all that needs no GPU, show the plan, and stop."),
    ] = False,
) -> None:
    from minirl.recipe import load
    from minirl.rules import check_task

    loaded = load(recipe, overrides or [])
    check_task(loaded.config)
    plan = list(_plan(loaded.config))  # checks the model too, so also before a real run
    chosen = _choose_run_dir(recipe, run_dir, resume)
    if dry_run:
        notes = _machine_notes(loaded.config)
        _show(plan)
        typer.echo("".join(f"note: {note}\n" for note in notes) + "recipe ok")
        return
    from minirl.launch import train as launch

    raise typer.Exit(launch(loaded, recipe, chosen, resume))


@app.command(
    help="""What a recipe needs and would do, on GPUs that need not be here: memory, splits, scale.

Prints the memory bill of a rollout and of a training GPU, with the number to change if it is too
big; then throughput, idle shares and staleness of every split of the GPUs, from a simulation with
the real buffer and dispatcher, and the split to take. docs/planning.md says how far to trust it.

\b
Examples:
  minirl plan recipes/gsm8k.toml
  minirl plan recipes/gsm8k.toml --gpu 4090 --num 4 --mean 300
  minirl plan recipes/gsm8k.toml --gpus 8..512
  minirl plan recipes/gsm8k.toml --run runs/gsm8k-…   with the lengths of that run's answers
  minirl plan --check                                 the simulator against the paper
"""
)
def plan(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="A TOML recipe.")
    ] = None,
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option(help="H100, H800, A100-80, A100-40, L40S, 4090, 3090.")] = (
        "H100"
    ),
    num: Annotated[
        int, typer.Option(help="GPUs in all. Default: the recipe's rollout + train.")
    ] = 0,
    gpus: Annotated[
        str, typer.Option(metavar="FIRST..LAST", help="How it would scale, by doubling.")
    ] = "",
    mean: Annotated[
        float, typer.Option(help="Mean tokens of an answer. Default: 0.4 of the limit.")
    ] = 0.0,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Take the lengths of this run's answers.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the simulator with the paper, and stop.")
    ] = False,
) -> None:
    from minirl.plan import report
    from minirl.plan.gpus import gpu_named
    from minirl.recipe import load

    if check:
        _show(list(report.check_rows()))
        return
    if recipe is None:
        raise RecipeError("recipe", "", "is missing", "name one, such as recipes/gsm8k.toml")
    config = load(recipe, overrides or []).config
    total = num or config.devices.rollout + config.devices.train
    asked = report.Question(config, gpu_named(gpu), total, mean or None, run)
    _show(list(report.memory_rows(asked)))
    if gpus:
        _show(list(report.scale_rows(asked, *report.parse_range(gpus))))
    else:
        _show(list(report.split_rows(asked)))


@app.command(
    help="""Check this machine: Python, torch, vLLM, devices, memory, disk; each ok or its remedy.

Uses no network. Exits with 0 if all is ok, else with 1."""
)
def doctor() -> None:
    from minirl.doctor import diagnose

    findings = diagnose()
    remedies = ["" if f.ok else f"\nremedy: {f.remedy}" for f in findings]
    rows = zip(findings, remedies, strict=True)
    _show([("ok" if f.ok else "NOT OK", f.name, f.detail + remedy) for f, remedy in rows])
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)


@app.command(
    help="""Print the resolved recipe as TOML, each value with where it came from.

\b
Examples:
  minirl config recipes/gsm8k-2gpu.toml
  minirl config recipes/smoke.toml --set train.lr=1e-4 > mine.toml
"""
)
def config(recipe: Recipe, overrides: Overrides = None) -> None:
    from minirl.recipe import load, to_toml_with_origins

    typer.echo(to_toml_with_origins(load(recipe, overrides or [])), nl=False)


@app.command(
    help="""Compute the loss of a batch again that a run could not train.

A loss or gradient that is not finite is left out, counted (train/skipped_updates) and saved.

\b
Example:
  minirl replay runs/smoke-20260101-120000/nonfinite/step-000012-0

Exits with 1 if the loss is not finite here either."""
)
def replay(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder of a run's nonfinite/.")],
) -> None:
    from minirl.train.replay import replay as compute

    found = compute(path)
    _show([("step", str(found.step)), ("loss", f"{found.loss:.6g}")])
    _show([("gradient norm", f"{found.grad_norm:.6g}")])
    for bad in found.bad_trajectories:
        typer.echo(
            f"rank {bad.rank}, micro-batch {bad.micro_batch}, sequence {bad.sequence}: "
            f"{bad.what} is not finite from token {bad.token} on"
        )
    if found.bad_gradients:
        typer.echo(f"gradients that are not finite: {', '.join(found.bad_gradients[:5])}, …")
    raise typer.Exit(0 if isfinite(found.loss) and isfinite(found.grad_norm) else 1)


@app.command(
    help=f"""Measure a part of minirl against the bare part it is made of, in the same run.

\b
Benches:
{_benches()}

\b
Examples:
  minirl bench queue
  minirl bench weights --model 135m
  minirl bench rollout --json rollout.json

Each figure is a median of interleaved repeats; processes are pinned to their cores. A figure with
a goal is "ok" or "MISSED"; both exit with 0. docs/benchmarks.md says what each figure means."""
)
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which bench; see above.")],
    model: Annotated[
        str,
        typer.Option(metavar="tiny|135m", help="Random weights; tiny takes about a minute."),
    ] = "tiny",
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Also write the figures here, as JSON."),
    ] = None,
) -> None:
    from minirl.bench import Options, run

    rows = run(name, Options(model), json_file).rows()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:  # not through rich, which would cut figures' names to a narrow terminal
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


def main() -> None:
    """The console entry."""
    try:
        app(prog_name="minirl")
    except MinirlError as error:
        print(f"minirl: {one_line(str(error), limit=2000)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _choose_run_dir(recipe: Path, run_dir: Path | None, resume: bool) -> Path:
    """Where the run goes: a new directory, or the one to go on with."""
    if resume:
        return _existing_run_dir(recipe, run_dir)
    if run_dir is None:
        return RUNS / f"{recipe.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    if run_dir.is_file():
        raise RecipeError("--run-dir", str(run_dir), "is a file", "name a new directory")
    if run_dir.is_dir() and any(run_dir.iterdir()):
        remedy = "pass --resume to go on with it, or name another directory"
        raise RecipeError("--run-dir", str(run_dir), "is not empty", remedy)
    return run_dir


def _existing_run_dir(recipe: Path, run_dir: Path | None) -> Path:
    if run_dir is not None:
        if not run_dir.is_dir():
            remedy = "name a run directory, or leave --resume out to start one"
            raise RecipeError("--run-dir", str(run_dir), "no such directory to resume", remedy)
        return run_dir
    # By name, not by glob: runs/gsm8k-* would also match the runs of gsm8k-2gpu.
    name = re.compile(rf"{re.escape(recipe.stem)}-\d{{8}}-\d{{6}}")
    found = sorted(p for p in RUNS.glob("*") if p.is_dir() and name.fullmatch(p.name))
    if not found:
        remedy = "leave --resume out to start one, or name it with --run-dir"
        raise RecipeError("--resume", f"{RUNS}/{recipe.stem}-*", "no run of this recipe", remedy)
    return found[-1]


def _plan(config: "Config") -> Iterator[tuple[str, str]]:
    """What a run would do, row by row; checks the model where it is on this machine."""
    from minirl.config import TINY
    from minirl.rules import check_model, find_model, read_model_config

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
            weights = _size(num_bytes) if num_bytes else "no safetensors beside config.json"
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
    yield "trajectory ring", f"{_size(config.ring_bytes)} of shared memory"


def _machine_notes(config: "Config") -> list[str]:
    """What this machine lacks for the recipe. Too few GPUs is a note: a dry run is for anywhere."""
    from minirl.doctor import find_devices, free_memory_bytes
    from minirl.rules import check_devices, check_memory

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


def _show(rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    # Values are the user's: a path such as "[old]" is no markup.
    Console(markup=False, highlight=False, emoji=False).print(table)


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"


if __name__ == "__main__":
    main()
