"""A soak's figures, for programs and for people. Takes an Outcome, gives JSON and the tables that
docs/faults.md shows: `python -m tests.soak.report docs/chaos.json` prints them from the JSON.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from minirl.devices import describe
from tests.soak.events import Event, Outcome
from tests.soak.schedule import BY_NAME, TEAR

MOMENTS = ("start", "save", "evaluation", "full disk", "other times")


def write(outcome: Outcome, setting: dict[str, Any], paths: Sequence[Path]) -> str:
    """The figures to each path, and beside the first one their tables, which it gives."""
    found = figures(outcome, setting, describe("cpu"))
    for path in paths:
        path.write_text(json.dumps(found, indent=2) + "\n")
    tables = as_markdown(found)
    paths[0].with_suffix(".md").write_text(tables)
    return tables


def figures(outcome: Outcome, setting: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    events = outcome.events
    names = [name for name in (*BY_NAME, TEAR.name) if any(e.fault == name for e in events)]
    moments = Counter(event.moment for event in events if event.moment)
    gone = [event.gone_s for event in events if event.gone_s is not None]
    return {
        **setting,
        "machine": facts,
        "disk": outcome.disk,
        "seconds": outcome.seconds,
        "controllers": outcome.controllers,
        "steps": outcome.steps,
        "steps_taken_back": outcome.steps_trained - outcome.steps,
        "faults": [_of_kind(name, [e for e in events if e.fault == name]) for name in names],
        "injected": len(events),
        "survived": sum(bool(event.survived) for event in events),
        "controller_killed_at": {moment: moments[moment] for moment in MOMENTS},
        "gone_s_max": max(gone, default=None),
        "properties": [asdict(finding) for finding in outcome.findings],
        "held": not outcome.violated,
    }


def _of_kind(name: str, events: list[Event]) -> dict[str, Any]:
    took = [event.recovered_s for event in events if event.recovered_s is not None]
    return {
        "fault": name,
        "injected": len(events),
        "survived": sum(bool(event.survived) for event in events),
        "recovered_s_median": round(median(took), 1) if took else None,
        "recovered_s_max": round(max(took), 1) if took else None,
    }


def as_markdown(found: dict[str, Any]) -> str:
    return "\n".join(_lines(found)) + "\n"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    machine, kills = found["machine"], found["controller_killed_at"]
    options = f"--minutes {found['minutes']:g} --seed {found['seed']}"
    yield (
        f"`python -m tests.soak {found['recipe']} {options}` "
        f"on {machine['cores']} cores ({machine['cpu']}), minirl {machine['packages']['minirl']}: "
        f"{found['seconds'] / 60:.1f} minutes, {found['injected']} faults, "
        f"{found['controllers']} controllers, {found['steps']} steps and "
        f"{found['steps_taken_back']} more that were rolled back. The disk: {found['disk']}."
    )
    yield from ("", "| fault | survived | trains again, median s (max) |", "|---|---|---|")
    for row in found["faults"]:
        survived, took = f"{row['survived']}/{row['injected']}", "–"
        if row["recovered_s_median"] is not None:
            took = f"{row['recovered_s_median']} ({row['recovered_s_max']})"
        yield f"| {row['fault']} | {survived} | {took} |"
    yield f"| all | {found['survived']}/{found['injected']} | |"
    yield ""
    if any(kills.values()):
        at = ", ".join(f"{kills[moment]} at {moment}" for moment in MOMENTS)
        yield (
            f"The controller was killed {sum(kills.values())} times: {at}, by what it left. "
            f"Nothing of it was left after {found['gone_s_max']:g} s at most."
        )
        yield ""
    yield from ("| property | holds | seen |", "|---|---|---|")
    for row in found["properties"]:
        detail = row["detail"].replace("|", "\\|")
        yield f"| {row['name']} | {'yes' if row['is_held'] else '**NO**'} | {detail} |"


if __name__ == "__main__":
    print(as_markdown(json.loads(Path(sys.argv[1]).read_text())), end="")
