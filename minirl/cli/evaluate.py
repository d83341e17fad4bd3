"""`minirl eval`: how good a model is, how sure that is, and what changed between two."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minirl.cli.app import Overrides, app, show
from minirl.errors import RecipeError

if TYPE_CHECKING:
    from minirl.tools.evaluate.compare import Comparison, Pair
    from minirl.tools.evaluate.run import Done
    from minirl.tools.evaluate.target import Options


@app.command(
    "eval",
    help="""Accuracy on held-out problems, with its interval; pass@k; or two models side by side.

MODEL_OR_RUN is a run directory (its recipe and last checkpoint), one of its checkpoints, or a
model: a Hugging Face folder, a hub name or "tiny", which needs --task or --recipe. It runs on all
GPUs, on a CPU in one process. Temperature is the recipe's eval.temperature; for --k above 1, where
that is 0, its rollout.temperature.

\b
Examples:
  minirl eval runs/smoke-…
  minirl eval Qwen/Qwen3-0.6B --task gsm8k --k 8 --problems 200
  minirl eval --compare tiny runs/smoke-…            before and after RL, problem by problem
  minirl eval --compare evals/a evals/b/results.jsonl   of results that are there already

\b
What it leaves behind, in RUN/evals/… or evals/…:
  results.jsonl    a line a problem: prompt, reference, each answer with reward, length, stop
  summary.json     the figures
docs/evaluation.md says how intervals and tests are computed. A reward that fails is counted and
left out, never a 0.""",
)
def evaluate(
    target: Annotated[
        str | None, typer.Argument(metavar="[MODEL_OR_RUN]", help="What to evaluate.")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Two models, runs or results, on the same problems."),
    ] = None,
    task: Annotated[str, typer.Option(metavar="KIND", help="As tasks.kind in a recipe.")] = "",
    recipe: Annotated[
        Path | None, typer.Option(metavar="RECIPE", help="Task and sampling for a model.")
    ] = None,
    k: Annotated[int, typer.Option("--k", help="Answers to each problem.")] = 1,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    problems: Annotated[int | None, typer.Option(help="How many. Default: eval.num_prompts.")] = (
        None
    ),
    seed: Annotated[int | None, typer.Option(help="Of sampling, and of a generated task.")] = None,
    data: Annotated[str, typer.Option(metavar="PATH", help="As tasks.data in a recipe.")] = "",
    max_new_tokens: Annotated[int | None, typer.Option(help="An answer is cut here.")] = None,
    devices: Annotated[int | None, typer.Option(help="GPUs (on CPU: processes). Default: all.")] = (
        None
    ),
    checkpoint: Annotated[
        str, typer.Option(metavar="last|best|STEP", help="Of a run directory.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where results go; must be empty.")
    ] = None,
    examples: Annotated[
        int, typer.Option("--show", help="With --compare: changed problems to print of each kind.")
    ] = 2,
    overrides: Overrides = None,
) -> None:
    from minirl.tools.evaluate.target import Options

    asked = Options(
        recipe=recipe,
        task=task,
        data=data,
        checkpoint=checkpoint,
        num_problems=problems,
        seed=seed,
        k=k,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        num_devices=devices,
        overrides=tuple(overrides or ()),
    )
    if compare is not None and target is None:
        compare_two(compare, asked, out, examples)
    elif target is not None and compare is None:
        done = one(target, asked, out)
        show(list(rows(done)))
        raise typer.Exit(0 if done.summary["accuracy"] is not None else 1)
    else:
        remedy = "minirl eval MODEL_OR_RUN, or minirl eval --compare A B"
        raise RecipeError("MODEL_OR_RUN", target or "", "one target, or --compare", remedy)


def one(name: str, asked: "Options", out: Path | None) -> "Done":
    from minirl.tools.evaluate.run import examine
    from minirl.tools.evaluate.target import Kind, kind_of, resolve

    if kind_of(name) is Kind.RESULTS:
        remedy = "put two side by side with --compare"
        raise RecipeError("MODEL_OR_RUN", name, "is a file of results already", remedy)
    return examine(resolve(name, asked), asked.k, asked.num_devices, out)


def rows(done: "Done") -> Iterator[tuple[str, str]]:
    found: dict[str, Any] = done.summary
    each = f" × {found['k']} answers" if found["k"] > 1 else ""
    yield "problems", f"{found['problems']}{each}, temperature {found['temperature']:g}"
    if found["accuracy"] is None:
        yield "accuracy", "unknown: not one answer could be graded"
    else:
        low, high = found["interval_95"]
        yield "accuracy", f"{found['accuracy']:.1%}   95 % interval {low:.1%} to {high:.1%}"
        for number, value in found["pass_at"].items():
            if value is not None:
                yield f"pass@{number}", f"{value:.1%}"
    if found["length_mean"] is not None:
        cut = f"{found['truncated_frac']:.1%} cut at {found['max_new_tokens']}"
        yield "length", f"{found['length_mean']:.1f} tokens, {cut}"
    if found["answers_failed"]:
        why = "; ".join(found["failures"])
        yield "rewards that failed", f"{found['answers_failed']}, left out ({why})"
    for name in ("prompts_too_long", "prompts_refused"):
        if found[name]:
            yield name.replace("_", " "), f"{found[name]}, left out"
    yield "speed", f"{found['tokens_per_s']:,.0f} tokens/s, {found['seconds']:.0f} s"
    yield "results", str(done.folder)


# Two of them --------------------------------------------------------------------------------------


def compare_two(names: tuple[str, str], asked: "Options", out: Path | None, num_shown: int) -> None:
    from dataclasses import replace

    from minirl.tools.evaluate import results
    from minirl.tools.evaluate.compare import compare
    from minirl.tools.evaluate.target import Kind, kind_of, run_of

    runs = [Path(name) for name in names if kind_of(name) is Kind.RUN]
    if runs and not asked.task and asked.recipe is None:  # both by one recipe: the same problems
        run = run_of(runs[0]) or runs[0]
        asked = replace(asked, recipe=run / "recipe.toml")
    sides = []
    for name, letter in zip(names, "ab", strict=True):
        if kind_of(name) is Kind.RESULTS:
            sides.append(results.read(Path(name)))
            continue
        is_run = kind_of(name) is Kind.RUN
        own = asked if is_run else replace(asked, checkpoint="")
        done = one(name, own, out / letter if out else None)
        sides.append(done.results)
        typer.echo(f"{letter.upper()}: {name}")
        show(list(rows(done)))
    found = compare(*sides)
    show(list(comparison_rows(names, found)))
    for pairs, what in ((found.gained, "gained: better in B"), (found.lost, "lost: worse in B")):
        for pair in pairs[:num_shown]:
            typer.echo(readable(pair, what))
    if out is not None:
        import json

        (out / "compare.json").write_text(json.dumps(found.as_json(), indent=2) + "\n")


def comparison_rows(names: tuple[str, str], found: "Comparison") -> Iterator[tuple[str, str]]:
    for letter, name, interval in zip("AB", names, found.intervals, strict=True):
        yield letter, f"{name}: {interval}"
    change = found.difference
    yield (
        "B - A",
        f"{100 * change.mean:+.1f} points   95 % interval "
        f"{100 * change.low:+.1f} to {100 * change.high:+.1f}",
    )
    yield "p", f"{found.p:.2g}   {found.test}"
    same = len(found.pairs) - len(found.gained) - len(found.lost)
    yield "problems", f"{len(found.gained)} gained, {len(found.lost)} lost, {same} as before"
    if found.num_unmatched:
        yield "left out", f"{found.num_unmatched} that only one side has, or could not grade"


def readable(pair: "Pair", what: str) -> str:
    lines = [f"\n--- problem {pair.a.problem}, {what}", pair.a.question]
    lines.append(f"reference: {pair.a.reference}")
    for letter, result, shown in zip("AB", (pair.a, pair.b), pair.answers(), strict=True):
        num = len(result.rewards)
        mean = f"{result.mean:g}" + (f" of {num}" if num > 1 else "")
        lines.append(f"{letter} ({mean}):{' ' if shown.text[:1] != ' ' else ''}{shown.text}")
    return "\n".join(lines)
