"""`python -m tests.soak RECIPE --minutes N`: inject faults into a run, and prove that nothing was
lost. Takes a recipe and options, gives an exit code: 1 if a property is violated.
"""

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from minirl.config import Config
from minirl.errors import MinirlError, RecipeError
from minirl.recipe import check_task, find_model, load
from tests.soak.disk import small_disk
from tests.soak.schedule import Schedule

DISK_BYTES, DISK_MODELS = 256 << 20, 24  # of the small disk: for logs, and for checkpoints
ABOUT = """Soak a recipe in faults, and prove from what it wrote that nothing was lost.

Runs `minirl train`, and from a seed kills workers, freezes and delays them, breaks and delays
rewards, tears files, fills a small disk, kills the controller at any moment and starts it again.
After the minutes are over the run finishes without faults, and the recipe is run once more for as
many steps and without any fault: that takes about as long again.

Examples:
  python -m tests.soak recipes/smoke.toml --minutes 20
  python -m tests.soak recipes/smoke.toml --minutes 5 --seed 7 --faults kill-rank,fill-disk
  python -m tests.soak recipes/smoke.toml --minutes 20 --boxes 2 --faults kill-box,kill-engine

What is proved (tests/soak/ledger.py says how):
  every fault was survived, and every process was gone within seconds of its controller;
  every prompt was trained exactly once, or dropped with a reason, or is in flight;
  no broken reward was trained as a 0; no trained token is staler than buffer.max_staleness;
  weights are finite; accuracy is within noise of the undisturbed run.

What it leaves behind, in runs/soak-<recipe>-<time>/:
  soak.json, soak.md     the figures        events.jsonl   every fault
  run/, undisturbed/     the two runs       controllers/   what each controller printed

Exits with 1 if a property is violated, and names it."""


def parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser("python -m tests.soak", description=ABOUT, formatter_class=form)
    add = made.add_argument
    add("recipe", type=Path, help="a TOML recipe, such as recipes/smoke.toml")
    add("--minutes", type=float, required=True, metavar="N", help="for how long faults come")
    add("--seed", type=int, default=0, metavar="S", help="of the faults")
    add("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    add("--faults", default="", metavar="A,B,…", help="only these; default: all there are")
    add("--boxes", type=int, default=1, metavar="N", help="on Ray; one of the faults is kill-box")
    add("--most", type=int, default=10**6, metavar="N", help="at most so many faults")
    add("--bad-rewards", type=float, default=0.06, metavar="SHARE", help="of training prompts")
    add("--problems", type=int, default=1024, metavar="N", help="held out, for the accuracy")
    add("--no-reference", action="store_true", help="no undisturbed run, and so no accuracy")
    add("--json", type=Path, metavar="FILE", help="also write the figures here")
    add("--run-dir", type=Path, metavar="DIR", help="default: runs/soak-<recipe>-<time>")
    return made


def check(asked: argparse.Namespace) -> None:
    for option, value, low, high, remedy in (
        ("--minutes", asked.minutes, 0.01, 10_000, "20 is a good soak"),
        ("--bad-rewards", asked.bad_rewards, 0, 0.5, "0.06 is usual"),
        ("--problems", asked.problems, 1, 10**6, "1024 is usual"),
        ("--most", asked.most, 1, 10**6, "leave it out"),
    ):
        if not low <= value <= high:
            raise RecipeError(option, value, f"must be {low:,} to {high:,}", remedy)


def soak(asked: argparse.Namespace) -> int:
    check(asked)
    config = load(asked.recipe, asked.overrides).config
    check_task(config)
    faults = tuple(name.strip() for name in asked.faults.split(",") if name.strip())
    Schedule(asked.seed, faults)
    name = f"soak-{asked.recipe.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = (asked.run_dir or Path("runs") / name).absolute()
    if folder.is_dir() and any(folder.iterdir()):
        raise RecipeError("--run-dir", str(folder), "is not empty", "name a new directory")
    disk = small_disk(folder / "disk", DISK_BYTES + DISK_MODELS * model_bytes(config))
    from tests.boxes import boxes
    from tests.soak.report import write  # not before the disk: libraries start threads
    from tests.soak.soak import PROGRAM, Options, Soak

    options = Options(
        asked.minutes,
        asked.seed,
        faults,
        asked.most,
        asked.bad_rewards,
        asked.problems,
        has_reference=not asked.no_reference,
    )
    print(f"faults for {asked.minutes:g} minutes; the disk: {disk.what}; all is in {folder}")
    with ExitStack() as stack:
        made = None
        if asked.boxes > 1:
            made = stack.enter_context(boxes(asked.boxes))
            os.environ.update(made.env)
            config = replace(config, devices=replace(config.devices, nodes=asked.boxes))
            options = replace(options, program=tuple(made.inside(0, [*PROGRAM])))
        outcome = Soak(config, options, folder, disk, say, made).go()
    setting = {"recipe": str(asked.recipe), "minutes": asked.minutes, "seed": asked.seed}
    say("\n" + write(outcome, setting, [folder / "soak.json", *filter(None, [asked.json])]))
    for finding in outcome.violated:
        say(f"VIOLATED: {finding.name}: {finding.detail}")
    say(f"{'see' if outcome.violated else 'nothing was lost'}: {folder}")
    return 1 if outcome.violated else 0


def say(text: str) -> None:
    print(text, flush=True)


def model_bytes(config: Config) -> int:
    found = find_model(config)
    return sum(path.stat().st_size for path in found.glob("*.safetensors")) if found else 0


if __name__ == "__main__":
    try:
        sys.exit(soak(parser().parse_args()))
    except MinirlError as error:
        print(f"soak: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
