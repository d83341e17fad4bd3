"""`minirl chaos`: do everything to a run, and prove that nothing was lost."""

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minirl.cli.app import Overrides, Recipe, app
from minirl.errors import RecipeError

if TYPE_CHECKING:
    from minirl.config import Config
    from tests.soak.events import Outcome

ROOM_BYTES, ROOM_MODELS = 256 << 20, 24  # of the small disk: for logs, and for checkpoints


@app.command(
    help="""Soak a recipe in faults, and prove from what it wrote that nothing was lost.

Runs `minirl train`, and from a seed kills workers, freezes and delays them, breaks and delays
rewards, tears files, fills a small disk, kills the controller at any moment and starts it again.
After the minutes are over the run is left alone to finish, and the recipe is run once more with as
many steps and nothing done to it: that takes about as long again.

\b
Examples:
  minirl chaos recipes/smoke.toml --minutes 20
  minirl chaos recipes/smoke.toml --minutes 5 --seed 7 --faults kill-rank,kill-at-save,fill-disk

\b
What is proved (docs/faults.md says how):
  every fault was survived, and every process was gone within seconds of its controller;
  every prompt was trained exactly once, or dropped with a reason, or is in flight;
  no broken reward was trained as a 0; no trained token is staler than buffer.max_staleness;
  weights are finite; accuracy is within noise of the undisturbed run.

\b
What it leaves behind, in runs/chaos-<recipe>-<time>/:
  chaos.json, chaos.md   the figures        events.jsonl   every fault
  run/, undisturbed/     the two runs       lives/         what each controller printed

Exits with 1 if a property is violated, and names it."""
)
def chaos(
    recipe: Recipe,
    minutes: Annotated[float, typer.Option(metavar="N", help="For how long faults come.")],
    seed: Annotated[int, typer.Option(metavar="S", help="Of the faults.")] = 0,
    overrides: Overrides = None,
    faults: Annotated[
        str, typer.Option(metavar="A,B,…", help="Only these. Default: all there are.")
    ] = "",
    most: Annotated[int, typer.Option(metavar="N", help="At most so many faults.")] = 10**6,
    bad_rewards: Annotated[
        float, typer.Option(metavar="SHARE", help="Of training prompts, whose reward misbehaves.")
    ] = 0.06,
    problems: Annotated[
        int, typer.Option(metavar="N", help="Held-out problems for the accuracy.")
    ] = 1024,
    reference: Annotated[
        bool, typer.Option(help="Run it undisturbed too, for the accuracy.")
    ] = True,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Also write the figures here, as JSON."),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where it goes. Default: runs/chaos-<recipe>-<time>."),
    ] = None,
) -> None:
    from minirl.recipe import check_task, load
    from tests.soak.deck import Deck
    from tests.soak.disk import small_disk

    for option, value, low, high, remedy in (
        ("--minutes", minutes, 0.01, 10_000, "20 is a good soak"),
        ("--bad-rewards", bad_rewards, 0, 0.5, "0.06 is usual"),
        ("--problems", problems, 1, 10**6, "1024 is usual"),
        ("--most", most, 1, 10**6, "leave it out"),
    ):
        if not low <= value <= high:
            raise RecipeError(option, value, f"must be {low:,} to {high:,}", remedy)
    config = load(recipe, overrides or []).config
    check_task(config)
    chosen = tuple(name.strip() for name in faults.split(",") if name.strip())
    Deck(seed, chosen)
    folder = run_dir or Path("runs") / f"chaos-{recipe.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    if folder.is_dir() and any(folder.iterdir()):
        raise RecipeError("--run-dir", str(folder), "is not empty", "name a new directory")
    disk = small_disk(folder.absolute() / "disk", ROOM_BYTES + ROOM_MODELS * _model_bytes(config))
    from tests.soak.soak import Options, Soak  # not before: libraries start threads

    options = Options(minutes, seed, chosen, most, bad_rewards, problems, reference)
    typer.echo(f"faults for {minutes:g} minutes; the disk: {disk.what}; all is in {folder}")
    outcome = Soak(config, options, folder.absolute(), disk, typer.echo).go()
    setting = {"recipe": str(recipe), "minutes": minutes, "seed": seed}
    raise typer.Exit(_report(outcome, setting, folder, json_file))


def _model_bytes(config: "Config") -> int:
    from minirl.recipe import find_model

    found = find_model(config)
    return sum(path.stat().st_size for path in found.glob("*.safetensors")) if found else 0


def _report(
    outcome: "Outcome", setting: dict[str, Any], folder: Path, json_file: Path | None
) -> int:
    from minirl.devices import describe
    from tests.soak.report import as_markdown, figures

    found = figures(outcome, setting, describe("cpu"))
    text, table = json.dumps(found, indent=2) + "\n", as_markdown(found)
    for path in (folder / "chaos.json", json_file):
        if path is not None:
            path.write_text(text)
    (folder / "chaos.md").write_text(table)
    typer.echo(f"\n{table}")
    violated = [finding for finding in outcome.findings if not finding.is_held]
    for finding in violated:
        typer.echo(f"VIOLATED: {finding.name}: {finding.detail}")
    typer.echo(f"{'nothing was lost' if not violated else 'see'}: {folder}")
    return 1 if violated else 0
