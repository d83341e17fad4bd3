"""`minirl report`: from run directories, whole or damaged, to one page and its figures."""

import re
import shutil
from pathlib import Path

import pytest
from run_dirs import make_config, write_run
from typer.testing import CliRunner

from minirl.cli import app
from minirl.errors import MinirlError, RecipeError
from minirl.run_dir import RunDir
from minirl.view import report
from minirl.view.charts import CHARTS, families

BY_NAME = {chart.name: chart for chart in CHARTS}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """Three seeds of one recipe, a synchronous run, and one that died while it wrote."""
    folder = tmp_path_factory.mktemp("runs")
    configs = {f"seed-{seed}": make_config(seed) for seed in range(3)}
    configs |= {"sync": make_config(eta=0), "died": make_config(lr=1e-5)}
    found = {n: RunDir(write_run(folder / n, c, n != "died")) for n, c in configs.items()}
    for path in (folder / "died").glob("*.jsonl"):
        with path.open("a") as file:
            file.write('{"step": 99, "reward/me')
    return found


@pytest.fixture(scope="module")
def page(runs: dict[str, RunDir], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(list(runs.values()), tmp_path_factory.mktemp("report"))[0]


def test_the_page_is_whole_without_network_and_figures_lie_beside_it(page: Path) -> None:
    text = page.read_text()
    for tag in ("details", "figure", "section", "svg", "table", "span"):
        assert len(re.findall(f"<{tag}[ >]", text)) == text.count(f"</{tag}>"), tag
    links = set(re.findall(r'(?:href|src|action)="([^#]*?)"', text))
    assert links == {"data:,"} and "@import" not in text and "<script" not in text
    for words in (
        *("Held-out accuracy", "Staleness", "Throughput", "Idle", "Timeline", "Tokens"),
        *("rollout-0", "buffer.max_staleness", "torch", "a CPU", "seed", "η = 2", "step 5"),
        *("seed-0, 3 seeds", ">sync<", ">died<", "<h1>tiny on ", "25.0% → 75.0%"),
        "95 % interval 4.6% to 69.9% at version 0, then 30.1% to 95.4% at version 6",
        *("finished, 6 steps in ", " min, 2026-01-01 12:00<br>\n<code>minirl train mine.toml<"),
        "Never changed, so not drawn: length of answers 3.5; cut 50.0%; entropy 1; clipped",
    ):
        assert words in text, words
    assert "as version 6 says: &lt;4&gt;" in text, "answers by version; what a model writes is text"
    assert "Is &lt;b&gt;2 &amp; 2" in text and "<b>2" not in text
    assert 'class="tok a3 out"' in text, "three versions behind, above η"
    assert 'class="tok a1"' in text and 'class="tok a0" title="version 5, logprob gap 0.02"' in text
    names = {path.name for path in page.parent.iterdir()}
    assert {"reward.png", "accuracy.png", "timeline.png", "timeline.svg"} <= names
    assert "gap.png" not in names, "it is flat"
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in page.parent.glob("*.png"))


def test_seeds_are_one_curve_with_a_band_and_one_run_has_its_interval(
    runs: dict[str, RunDir],
) -> None:
    found = families(list(runs.values()))
    assert {name: len(found[name]) for name in found} == {"seed-0": 3, "sync": 1, "died": 1}
    *_, last = BY_NAME["reward"].curve(found["seed-0"], "reward/mean")
    assert last == (6, pytest.approx(0.55), 0.5, 0.6)
    (_, accuracy, low, high), *_ = BY_NAME["accuracy_time"].curve([runs["sync"]], "accuracy")
    assert low < accuracy == 0.25 < high


def test_damaged_empty_and_foreign_runs_are_shown_as_far_as_they_go(
    tmp_path: Path, runs: dict[str, RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "save", lambda figure, path: "<svg></svg>")  # slow
    whole = runs["sync"].path
    assert len(runs["died"].metrics) == len(runs["died"].batches) == 6
    for name in sorted(path.name for path in whole.iterdir() if path.is_file()):
        torn = tmp_path / name.replace(".", "-")
        shutil.copytree(whole, torn)
        content = (torn / name).read_bytes()
        (torn / name).write_bytes(content[: len(content) // 2] + b"\xff\x00{[")
        assert report.write([RunDir(torn)], torn / "out")[0].is_file()
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "recipe.toml").write_text("seed = 0\n[train]\nste")
    text = report.write([RunDir(empty)], empty)[0].read_text()
    assert "No step was trained yet." in text and f"minirl train {empty}/recipe.toml" in text
    foreign = {
        "metrics": '{"step": 1, "reward/mean": 0.5, "seconds": "?"}',
        "evals": '{"step": 1, "version": 1, "answers": []}',
        "batches": '{"step": 1}\n{"step": 2, "groups": [{"id": 3}]}',
        "samples": '{"step": 1, "tokens": ["a"]}',
    }
    for name, text in foreign.items():
        (empty / f"{name}.jsonl").write_text(text)
    done = CliRunner().invoke(app, ["report", str(empty)])
    assert done.stdout.splitlines()[0] == str(empty / "report" / "report.html")


def test_what_it_cannot_do_is_one_line(
    runs: dict[str, RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "file"):
        with pytest.raises(RecipeError, match=r"RUN = .*; name another directory"):
            CliRunner().invoke(app, ["report", str(path)], catch_exceptions=False)
    with pytest.raises(RecipeError, match=r"--out .*cannot be written"):
        report.write([runs["sync"]], tmp_path / "file" / "in")
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    with pytest.raises(MinirlError, match=r"jinja2 and matplotlib: pip install \"minirl\[report\]"):
        report.write([runs["sync"]], tmp_path)
