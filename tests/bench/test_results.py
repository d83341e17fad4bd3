"""docs/results.md and figures in other pages are what the files in docs/results/ say."""

import json
from pathlib import Path
from typing import Any

from tests.bench.results import PAGE, draw, render

README = PAGE.parents[1] / "README.md"


def data_of(name: str) -> Any:
    return json.loads((PAGE.parent / "results" / f"{name}.json").read_text())


def test_the_page_is_what_its_files_say(tmp_path: Path) -> None:
    """Filled by `python -m tests.bench.results`."""
    text, plots = render(PAGE.read_text(), PAGE.parent)
    assert text == PAGE.read_text() and all(path.is_file() for path in plots)
    path = PAGE.parent / "results" / "staleness-naive.svg"
    draw(tmp_path / path.name, "naive", plots[path])
    assert (tmp_path / path.name).read_text() == path.read_text(), "the same curves, the same file"


def test_figures_in_the_text_are_those_of_the_files() -> None:
    page, readme = (" ".join(path.read_text().split()) for path in (PAGE, README))
    for name in ("fixed", "waiting", "on_update", "proximal"):
        speed = data_of(name)["rows"][1]["speed"]
        assert f"{speed['mean']:.2f} ± {speed['half']:.2f}" in page
    found = {figure["figure"]: figure["value"] for figure in data_of("async")["figures"]}
    eta = found["best_eta"]
    ratio = found[f"eta_{eta}_tokens_per_s"] / found["eta_0_tokens_per_s"]
    assert f"reaches {ratio:.2f} of the {found['bound_over_sync']:.2f} of" in page
    by_seed, share = found["async_over_sync"], found["share_of_bound"]
    assert f"{ratio:.2f} × trained tokens/s at η = {eta} by medians" in readme
    assert f"(seed by seed {by_seed:.2f} ×), which is {share:.0%}".replace("%", " %") in readme
    benchmarks = (PAGE.parent / "benchmarks.md").read_text()
    for figure in data_of("rollout")["figures"] + data_of("train")["figures"]:
        if figure["goal"] is not None:
            assert f"| `{figure['figure']}` | {figure['value']:.3g} " in benchmarks
    (before, *_), (after, *_) = data_of("smollm2-compare")["accuracies"]
    assert f"{100 * before:.1f} % to {100 * after:.1f} % of 192 held-out" in readme
