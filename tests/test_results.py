"""The pages: tables, plots and figures are what their files say, links lead somewhere, and they are
short."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from minirl.config import ALGORITHMS, KEYS, SECTIONS
from minirl.errors import toml_value
from minirl.metrics import METRICS
from tests.docs import metrics, reference
from tests.docs.results import PAGE, draw, render

ROOT = PAGE.parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted(PAGE.parent.glob("*.md"))]
MAX_WORDS = 12_000


def data_of(name: str) -> Any:
    return json.loads((PAGE.parent / "results" / f"{name}.json").read_text())


def test_the_page_is_what_its_files_say(tmp_path: Path) -> None:
    """Filled by `python -m tests.docs.results`."""
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


def test_algorithms_are_listed_with_what_they_set() -> None:
    text = (PAGE.parent / "algorithms.md").read_text()
    rows = dict(re.findall(r"^\| \[`(\S+)`\]\S+ \| (.*) \|$", text, re.MULTILINE))
    assert {name: re.findall("`([^`]+)`", row) for name, row in rows.items()} == {
        name: [f"{key.removeprefix('train.')} = {toml_value(v)}" for key, v in values.items()]
        for name, values in ALGORITHMS.items()
    }


def anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_lead_somewhere_and_the_readme_to_every_page() -> None:
    linked = set()
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            assert path.is_file(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(path), f"{page.name}: {target}"
            linked |= {path} if page == README else set()
    assert {*PAGES[1:]} <= linked


def test_the_pages_are_short_and_generated_ones_as_printed() -> None:
    assert sum(len(page.read_text().split()) for page in PAGES) <= MAX_WORDS
    assert (PAGE.parent / "recipe.md").read_text() == reference.document()
    assert (PAGE.parent / "metrics.md").read_text() == metrics.document()


@pytest.mark.parametrize("name", ["architecture.md", "troubleshooting.md"])
def test_documents_name_only_metrics_keys_and_files_that_there_are(name: str) -> None:
    words = re.findall(r"`([^`\n]+)`", (PAGE.parent / name).read_text())
    rooms = r"(reward|eval|rollout|buffer|weights|train)/\w+"
    assert {word for word in words if re.fullmatch(rooms, word)} <= METRICS.keys()
    keys = [re.fullmatch(rf"((?:{'|'.join(SECTIONS)})\.\w+)(?: = .*)?", word) for word in words]
    found = {match[1] for match in keys if match and not match[1].endswith((".py", ".jsonl"))}
    assert found and found <= KEYS.keys()
    files = {w.partition(":")[0] for w in words if re.fullmatch(r"[\w/]+\.py(:\w+)?", w)}
    missing = [f for f in files if not [*ROOT.glob(f"minirl/**/{f}"), *ROOT.glob(f"tests/**/{f}")]]
    assert not missing
