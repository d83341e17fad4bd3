"""Figures as one table. Takes the JSON files of `python -m tests.bench … --json`, gives Markdown,
from which docs/benchmarks.md has its values.

    python -m tests.bench.table weights.json rollout.json …
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.bench import shown


def rows(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    machine = reports[0]["machine"]
    loads = [report["machine"]["load_1m"] for report in reports]
    yield (
        f"{machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}, vLLM "
        f"{machine['vllm']}; load before each bench {min(loads):.1f} to {max(loads):.1f}."
    )
    yield ""
    yield "| bench | model | figure | value | goal | |"
    yield "|---|---|---|---|---|---|"
    for report in reports:
        for figure in report["figures"]:
            verdict = "" if figure["goal"] is None else "ok" if figure["ok"] else "**missed**"
            yield (
                f"| {report['bench']} | {report['machine']['model']} | `{figure['figure']}` "
                f"| {shown(figure['value'])} | {_goal(figure)} | {verdict} |"
            )


def _goal(figure: dict[str, Any]) -> str:
    if figure["goal"] is None:
        return ""
    is_below = figure["value"] <= figure["goal"]
    return f"{'≤' if is_below == figure['ok'] else '≥'} {figure['goal']:g}"


if __name__ == "__main__":
    print("\n".join(rows([json.loads(Path(name).read_text()) for name in sys.argv[1:]])))
