"""`minirl data`: what the model will see of a recipe's task."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from minirl.cli.app import Overrides, Recipe, app, show

if TYPE_CHECKING:
    from minirl.config import Config


@app.command(
    help="""Show what the model will see: rendered prompts, their lengths, references, duplicates.

Reads the recipe's data and the model's tokenizer; loads no model and no torch. Also runs the task's
self-check: references score 1, shuffled ones less.

\b
Examples:
  minirl data recipes/smoke.toml
  minirl data recipes/gsm8k.toml --show 5
  minirl data recipes/gsm8k.toml --set tasks.data=my_rows.jsonl --set tasks.prompt_column=question
"""
)
def data(
    recipe: Recipe,
    overrides: Overrides = None,
    count: Annotated[
        int, typer.Option("--show", min=0, metavar="N", help="Prompts to print in full.")
    ] = 2,
    limit: Annotated[
        int, typer.Option(min=1, metavar="N", help="Training examples to look at, at most.")
    ] = 10_000,
) -> None:
    from minirl.recipe import check_task, load
    from minirl.tasks.registry import make_task, self_check
    from minirl.tools.data import survey

    config = load(recipe, overrides or []).config
    check_task(config)
    task = make_task(config)
    checked = self_check(task, config.tasks.kind)
    found = survey(config, task, tokenizer_of(config), limit)
    for heading, text, reference in found.shown(count):
        typer.echo(f"--- {heading}\n{text}\n--- reference: {reference}\n")
    source = config.tasks.data or getattr(task, "data", "") or "its own"
    show([("task", config.tasks.kind), ("data", source), ("self-check", str(checked))])
    show(list(found.rows()))


def tokenizer_of(config: "Config") -> Any:
    """The model's own, without its weights; the tiny model's needs no model at all."""
    from minirl import model
    from minirl.config import TINY
    from minirl.train.tiny import TinyTokenizer

    if config.model.path == TINY:
        return TinyTokenizer()
    return model.load_tokenizer_alone(config)
