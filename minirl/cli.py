"""The command line: parse, call, exit code. The only module that imports typer.

Imports stay inside the commands, so that `minirl --help` answers at once. Every MinirlError, usage
error and path that cannot be used ends as one line on stderr. A command's docstring is its help.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, cast

import typer
from typer import Argument, Option

import minirl
from minirl.errors import MinirlError, RecipeError, Unreachable, one_line, removed, toml_value
from minirl.run_dir import RUNS, choose_run_dir, holds_run, new_run_dir, open_run
from minirl.view.runs import find_step, list_runs, run_rows, sample_texts, trajectory_rows

UsageError = cast(type[typer.BadParameter], typer.BadParameter.__base__)  # typer has no public name

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
Recipe = Annotated[Path, Argument(metavar="RECIPE", help="A TOML file, as recipes/smoke.toml.")]
Overrides = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Repeatable.")]
RunDirectory = Annotated[Path | None, Option("--run-dir", help="Default: runs/<recipe>-<time>.")]
Out = Annotated[Path | None, Option(metavar="DIR", help="Where the results go.")]


def main() -> None:
    try:
        sys.exit(app(args=sys.argv[1:] or ["-h"], prog_name="minirl", standalone_mode=False))
    except (MinirlError, UsageError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:  # not a path: a fault
            raise
        text = _usage(error) if isinstance(error, UsageError) else str(error)
        print(f"minirl: {one_line(text, limit=2000)}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        sys.exit(130)
    finally:  # output that cannot be written must not change the exit code
        try:
            sys.stdout.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: typer.BadParameter) -> str:
    command, option = sys.argv[1], getattr(error, "option_name", "")  # of an unknown option
    old = removed("commands")
    if use := old.get(f"{command} {option}".strip()) or old.get(option):
        return f"{error.message.partition('. ')[0].rstrip('.')}; use {use}"
    path = error.ctx.command_path if error.ctx else "minirl"
    return f"{error.format_message().rstrip('.')}; see {path} --help"


@contextmanager
def loading(what: str) -> Iterator[None]:
    """A sign of life while something loads: on a terminal a spinner with the seconds, else one
    line. It imports rich alone, so that it is there before anything heavy is imported."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(highlight=False, soft_wrap=True)
    if is_plain := not console.is_terminal:
        console.print(f"loading {what}", markup=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=is_plain) as progress:
        progress.add_task(f"loading {what}")
        yield


def _show(rows: Sequence[Sequence[str]]) -> None:
    """In columns. Not through rich, which would cut names and figures to a narrow terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(map(str.ljust, row, widths)).rstrip())


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, Option("--version", help="Print it.")] = False) -> None:
    """Fully asynchronous reinforcement learning for language models, on one box.

    \b
    minirl doctor                               is this machine ready?
    minirl train recipes/smoke.toml             a minute on 2 CPU cores, no download
    minirl train recipes/gsm8k.toml --dry-run   check a GPU recipe on any machine

    Exit codes: 0 done; 1 the run failed, or doctor found something; 2 wrong input, said in one
    line; 3 nothing moved for log.stall_s seconds; 130 stopped by Ctrl-C or SIGTERM.
    """
    if version:
        typer.echo(minirl.__version__)


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    run_dir: RunDirectory = None,
    resume: Annotated[bool, Option("--resume", help="--run-dir or the recipe's last run.")] = False,
    plain: Annotated[bool, Option("--plain", help="One line per step, no dashboard.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Check, show the plan, stop.")] = False,
) -> None:
    """Train by a recipe. It leaves checkpoints/ (which transformers and vLLM load as they are),
    recipe.toml, metrics.jsonl, evals.jsonl, samples.jsonl, batches.jsonl and summary.json. Ctrl-C
    once: finish the step, save, exit. Twice: now.

    minirl train recipes/smoke.toml --set train.steps=10 --run-dir runs/mine    # again: resumes it
    """
    from minirl.recipe import find_model, load

    loaded = load(recipe, overrides or [])
    config = loaded.config
    shown = nullcontext() if dry_run else loading(f"{config.model.path}, checking the task")
    from minirl.tasks.check import checking
    from minirl.tools import doctor

    # The task is checked while the rest is, and while what follows is imported.
    with shown, checking(config, find_model(config)) as check:
        rows = doctor.plan_rows(config)  # checks loggers and model
        chosen = choose_run_dir(recipe, run_dir, resume)
        if dry_run:
            rows += doctor.machine_notes(config)
            try:
                found = check().shown
            except Unreachable as error:
                found = f"not run: {error}"
            _show([*rows, ("self-check", found), ("recipe ok", "")])
            return
        from minirl.launch import train as launch

        checked = check()
    if checked.warning:
        typer.echo(f"warning: {checked.warning}; `minirl data {recipe}` shows one")
    raise typer.Exit(launch(loaded, recipe, chosen, resume or holds_run(chosen), plain))


@app.command("eval")
def evaluate(
    target: Annotated[str | None, Argument(metavar="[MODEL_OR_RUN]")] = None,
    compare: Annotated[tuple[Path, Path] | None, Option(metavar="A B", help="Two results.")] = None,
    task: Annotated[str | None, Option(metavar="KIND", help="As tasks.kind in a recipe.")] = None,
    recipe: Annotated[Path | None, Option(help="Task and sampling for a model.")] = None,
    k: Annotated[int, Option("--k", min=1, max=1024, help="Answers to each problem.")] = 1,
    out: Out = None,
    overrides: Overrides = None,
) -> None:
    """Measure accuracy on held-out problems, or compare two results. MODEL_OR_RUN is a run (its
    last checkpoint), a checkpoint, or a model: a Hugging Face folder, a hub name or "tiny", which
    needs --task or --recipe. It leaves results.jsonl and summary.json in RUN/evals/… or evals/….

    minirl eval Qwen/Qwen3-0.6B --task gsm8k --k 8 --set eval.num_prompts=200
    """
    from minirl.tools import evaluate as tool

    if (compare is None) == (target is None):
        remedy = "minirl eval MODEL_OR_RUN, or minirl eval --compare A B"
        raise RecipeError("MODEL_OR_RUN", target or "", "one target, or --compare", remedy)
    if compare is not None:
        _show(tool.compare(compare))
        return
    values = [*(overrides or ()), *([f"tasks.kind={toml_value(task)}"] if task else ())]
    found = tool.evaluate(tool.resolve(cast(str, target), recipe, values, k), out)
    _show(tool.summary_rows(found))
    raise typer.Exit(0 if found["accuracy"] is not None else 1)


@app.command()
def sample(
    model: Annotated[str, Argument(metavar="MODEL", help="As MODEL_OR_RUN of minirl eval.")],
    prompt: Annotated[str, Argument(metavar="PROMPT")],
    num: Annotated[int, Option("-n", min=1, max=1024, help="How many answers.")] = 4,
    raw: Annotated[bool, Option("--raw", help="Use no chat template.")] = False,
    tokens: Annotated[bool, Option("--tokens", help="Print each token and its logprob.")] = False,
    overrides: Overrides = None,
) -> None:
    """Print answers of a model to one prompt, with their logprobs. They are sampled at
    eval.temperature (here 1.0) and cut at rollout.max_new_tokens (here 256).

    minirl sample runs/smoke-… "Tom has 7 apples. Tom buys 5 more. How many has Tom?" --tokens
    """
    from minirl.tools import evaluate as tool

    given = ("tasks.kind=arithmetic", "eval.temperature=1", "rollout.max_new_tokens=256")
    target = tool.resolve(model, None, (*given, *(overrides or ())))
    for line in tool.sample(target, prompt, num, raw, tokens):
        typer.echo(line)


@app.command()
def sft(recipe: Recipe, overrides: Overrides = None, run_dir: RunDirectory = None) -> None:
    """Train a model on its task's worked answers, before RL. It leaves model/ (a Hugging Face
    folder), metrics.jsonl and summary.json (held-out loss) in runs/<recipe>-sft-<time>/.

    minirl sft recipes/gsm8k.toml --set sft.steps=300
    """
    from minirl.recipe import load

    config = load(recipe, overrides or []).config
    from minirl.tools.sft_run import sft as learn

    raise typer.Exit(learn(config, run_dir or new_run_dir(f"{recipe.stem}-sft")))


@app.command()
def data(
    recipe: Recipe,
    overrides: Overrides = None,
    count: Annotated[int, Option("--show", min=0, help="Prompts to print in full.")] = 2,
) -> None:
    """Show what the model will see: prompts, lengths, duplicates. It runs the task's self-check
    (references score 1, shuffled ones less) and loads no model.

    minirl data recipes/gsm8k.toml --set tasks.data=my_rows.jsonl --show 5
    """
    from minirl.model import local_folder, tokenizer_of
    from minirl.recipe import load
    from minirl.tasks.check import checking
    from minirl.tasks.prompts import render
    from minirl.tasks.registry import make_task
    from minirl.tools.data import data_rows

    config = load(recipe, overrides or []).config
    with checking(config, None) as check:  # prompts that are too long are shown
        tokenizer = tokenizer_of(config, local_folder(config, weights=False))
        checked, task = check().shown, make_task(config)
    for example in map(task.train, range(min(count, task.num_train))):
        typer.echo(f"{render(example, tokenizer)}\n--- reference: {example.reference}\n")
    source = f"{config.tasks.kind} {config.tasks.data or getattr(task, 'data', '')}"
    _show([("task", source), ("self-check", checked), *data_rows(config, task, tokenizer)])


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    gpu: Annotated[str, Option(help="H100, 4090, …; default: gpu.json, if here.")] = "",
    gpus: Annotated[int, Option(help="How many. Default: the recipe's rollout + train.")] = 0,
    nodes: Annotated[int, Option(min=0, help="Boxes; --gpus are the head's.")] = 0,
    price: Annotated[float, Option(min=0, help="Of one GPU for one hour.")] = 0.0,
    mean: Annotated[float, Option(min=0, help="Tokens of an answer; 0: 0.4 of the limit.")] = 0.0,
) -> None:
    """Say whether a recipe fits on GPUs, how fast, at what cost. No GPU is needed: memory is
    computed, every split is simulated. Exit code 2: it does not fit, and what to change is shown.
    docs/planning.md says how far to trust it.

    minirl plan recipes/gsm8k.toml --gpu 4090 --gpus 4 --price 0.4 --mean 300
    """
    from minirl.recipe import load
    from minirl.tools.plan import Plan, gpu_for, tables, usual_lengths

    boxes = [f"devices.nodes={nodes}"] if nodes else []
    config = load(recipe, [*(overrides or []), *boxes]).config
    planned = Plan(config, gpu_for(gpu), usual_lengths(config, mean or None))
    fits, shown = tables(planned, gpus or config.num_devices, price)
    for table in shown:
        _show(table)
    raise typer.Exit(0 if fits else 2)


@app.command()
def sweep(
    recipe: Recipe,
    vary: Annotated[list[str] | None, Option(metavar="KEY=A,B,C", help="May be repeated.")] = None,
    seeds: Annotated[int, Option(min=1, max=100, help="Seeds 0, 1, … of each combination.")] = 1,
    overrides: Overrides = None,
    out: Out = None,
) -> None:
    """Train with some keys varied, over several seeds, into one table. The same command resumes a
    sweep, or shows it again. It leaves the runs in sweeps/<recipe>/.

    minirl sweep recipes/smoke.toml --vary buffer.max_staleness=0,2,8 --seeds 3
    """
    from minirl.tools.sweep import Sweep, parse_vary

    folder = out or Path("sweeps") / recipe.stem
    planned = Sweep(recipe, folder, parse_vary(vary or []), seeds, overrides or [])
    planned.go(typer.echo)
    _show(planned.table())
    typer.echo(f"try next  minirl report {folder}/*/seed-*")


@app.command()
def config(recipe: Recipe, overrides: Overrides = None) -> None:
    """Print the whole recipe as TOML, with the origin of each value.

    minirl config recipes/smoke.toml --set train.lr=1e-4 > mine.toml
    """
    from minirl.recipe import load, to_toml

    loaded = load(recipe, overrides or [])
    typer.echo(to_toml(loaded.config, loaded.origins), nl=False)


@app.command()
def doctor(
    recipe: Annotated[Path | None, Argument(metavar="[RECIPE]")] = None,
    gpu: Annotated[bool, Option("--gpu", help="Measure the GPUs, by RECIPE's model.")] = False,
    overrides: Overrides = None,
) -> None:
    """Check this machine: packages, devices, sandbox, boxes. Each is ok or comes with its remedy.
    --gpu measures speeds and memory too, and writes gpu.json, which minirl plan then uses.

    minirl doctor --gpu recipes/gsm8k.toml
    """
    from minirl.tools.doctor import diagnose

    findings = diagnose()
    if gpu:
        from minirl.tools.measure import examine

        findings += examine("cuda", recipe, overrides or [])
    for found in findings:
        remedy = "" if found.ok else f"; remedy: {found.remedy}"
        typer.echo(f"{'ok' if found.ok else 'NOT OK':<8}{found.name:<16}{found.detail}{remedy}")
    raise typer.Exit(0 if all(found.ok for found in findings) else 1)


@app.command()
def watch(
    run: Annotated[Path | None, Argument(metavar="[RUN]", help="Default: the newest run.")] = None,
) -> None:
    """Show the dashboard of a run that was started elsewhere. Keys: q leaves (the run continues),
    p shows another sample. Without a terminal it is printed once.

    minirl watch runs/smoke-… > now.txt
    """
    from minirl.view import dashboard

    found = run or next((newest.path for newest in list_runs(RUNS)), RUNS)
    if not (found / dashboard.FILE).exists():
        raise RecipeError("RUN", str(found), "has no status.json", "name a run that has started")
    dashboard.watch(found)


@app.command()
def runs(folder: Annotated[Path, Argument(metavar="[DIR]")] = RUNS) -> None:
    """List runs: state, step, reward, accuracy, age. `minirl train --resume` continues a run that
    stopped (by a signal, and saved) or failed (without a result).

    minirl runs sweeps/smoke
    """
    _show(run_rows(found) if (found := list_runs(folder)) else [(f"no runs in {folder}",)])


@app.command()
def inspect(
    run: Annotated[Path, Argument(metavar="RUN", help="A run directory.")],
    step: Annotated[int | None, Option(help="Default: the last.")] = None,
) -> None:
    """Print what a step trained: answers, rewards, versions, lengths.

    minirl inspect runs/smoke-… --step 12
    """
    opened = open_run(run)
    line = find_step(opened, step)
    typer.echo(f"step {line['step']}, from version {line.get('version', '?')}")
    for text in sample_texts(opened, line["step"]):
        typer.echo(f"{text}\n")
    _show(trajectory_rows(line))


@app.command()
def report(runs: Annotated[list[Path], Argument(metavar="RUN…")], out: Out = None) -> None:
    """Write one HTML page and PNGs about one run, or several. They go to RUN/report, for several
    runs to ./report. Runs that differ only in their seed are one curve with a band.

    minirl report runs/seed-* runs/other-seed-* --out comparison
    """
    from minirl.view.report import write

    opened = [open_run(path) for path in dict.fromkeys(runs)]
    folder = out or (opened[0].path / "report" if len(opened) == 1 else Path("report"))
    for path in write(opened, folder):
        typer.echo(path)


@app.command()
def replay(path: Annotated[Path, Argument(metavar="PATH")]) -> None:
    """Compute a batch that went bad again. PATH is a folder of a run's bad_batches/. Prints loss
    and gradient norm, and names what is not finite: then the exit code is 1.

    minirl replay runs/smoke-20260101-120000/bad_batches/step-000012
    """
    from minirl.train import bad_batch

    found = bad_batch.replay(path)
    typer.echo("\n".join(found.lines))
    raise typer.Exit(1 if found.bad else 0)


if __name__ == "__main__":
    main()
