"""`minirl eval`: how good a model is, how sure that is, and what changed between two."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minirl.cli.app import Overrides, app, show
from minirl.errors import RecipeError

if TYPE_CHECKING:
    from minirl.tools.evaluate import Options


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
  results.jsonl    one line per problem: prompt, reference, each answer with reward, length, stop
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
    checkpoint: Annotated[str, typer.Option(metavar="last|best", help="Of a run directory.")] = "",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where results go; must be empty.")
    ] = None,
    examples: Annotated[
        int, typer.Option("--show", help="With --compare: changed problems to print of each kind.")
    ] = 2,
    overrides: Overrides = None,
) -> None:
    from minirl.tools import evaluate as tool

    given = {
        "tasks.kind": task or None,
        "tasks.data": data or None,
        "eval.num_prompts": problems,
        "seed": seed,
        "eval.temperature": temperature,
        "rollout.max_new_tokens": max_new_tokens,
        "devices.rollout": devices,
    }
    values = (*(overrides or ()), *tool.as_overrides(given))
    options = tool.Options(recipe, checkpoint, k, values)
    if (compare is None) == (target is None):
        remedy = "minirl eval MODEL_OR_RUN, or minirl eval --compare A B"
        raise RecipeError("MODEL_OR_RUN", target or "", "one target, or --compare", remedy)
    if compare is not None:
        compare_two(compare, options, out, examples)
        return
    assert target is not None
    done = tool.evaluate(tool.resolve(target, options), options, out)
    show(list(rows(done.summary, done.folder)))
    raise typer.Exit(0 if done.summary["accuracy"] is not None else 1)


def rows(found: dict[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
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
        yield "answers that failed", f"{found['answers_failed']}, left out ({why})"
    if found["prompts_too_long"]:
        yield "prompts too long", f"{found['prompts_too_long']}, left out"
    yield "speed", f"{found['tokens_per_s']:,.0f} tokens/s, {found['seconds']:.0f} s"
    yield "results", str(folder)


def compare_two(
    names: tuple[str, str], options: "Options", out: Path | None, num_shown: int
) -> None:
    import json
    from dataclasses import replace

    from minirl.tools import evaluate as tool

    runs = [run for name in names if (run := tool.run_of(name)) and not tool.is_results(name)]
    if runs and not options.names("tasks.kind") and options.recipe is None:
        options = replace(options, recipe=runs[0] / "recipe.toml")  # both: the same problems
    sides = []
    for name, letter in zip(names, "ab", strict=True):
        if tool.is_results(name):
            sides.append(tool.read(Path(name)))
            continue
        own = options if tool.run_of(name) else replace(options, checkpoint="")
        done = tool.evaluate(tool.resolve(name, own), own, out / letter if out else None)
        sides.append(done.results)
        typer.echo(f"{letter.upper()}: {name}")
        show(list(rows(done.summary, done.folder)))
    found = tool.compare(sides[0], sides[1], num_shown)
    show(list(comparison_rows(names, found)))
    for pair in found["shown"]:
        kind = "gained: better in B" if pair["problem"] in found["gained"] else "lost: worse in B"
        typer.echo(f"\n--- problem {pair['problem']}, {kind}\n{pair['question']}")
        typer.echo(f"reference: {pair['reference']}")
        for letter in "ab":
            typer.echo(f"{letter.upper()} ({pair[f'{letter}_reward']:g}): {pair[letter].strip()}")
    if out is not None:
        (out / "compare.json").write_text(json.dumps(found, indent=2) + "\n")


def comparison_rows(names: tuple[str, str], found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for letter, name, (mean, low, high) in zip("AB", names, found["accuracies"], strict=True):
        yield letter, f"{name}: {mean:.1%} ({low:.1%} to {high:.1%})"
    low, high = (f"{100 * bound:+.1f}" for bound in found["interval_95"])
    yield "B - A", f"{100 * found['difference']:+.1f} points   95 % interval {low} to {high}"
    yield "p", f"{found['p']:.2g}   {found['test']}"
    num_gained, num_lost = len(found["gained"]), len(found["lost"])
    same = found["problems"] - num_gained - num_lost
    yield "problems", f"{num_gained} gained, {num_lost} lost, {same} as before"
    if found["unmatched"]:
        yield "left out", f"{found['unmatched']} that only one side has, or could not grade"
