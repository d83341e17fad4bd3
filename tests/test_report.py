"""`minirl report`: from run directories, whole or damaged, to a page that a real browser shows."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_dirs import make_config, write_run
from typer.testing import CliRunner

from minirl.cli import app
from minirl.errors import MinirlError, RecipeError
from minirl.run_dir import RunDir
from minirl.view import report
from minirl.view.charts import accuracy_points, charts, families, length_points, reward_points
from minirl.view.trace import Slice

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
VOID = {"meta", "link", "br", "input"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """Three seeds of one recipe, a synchronous run, and one that died while it wrote."""
    folder = tmp_path_factory.mktemp("runs")
    configs = {f"seed-{seed}": make_config(seed) for seed in range(3)}
    configs["sync"] = make_config(eta=0)
    found = {name: RunDir(write_run(folder / name, config)) for name, config in configs.items()}
    died = write_run(folder / "died", make_config(lr=1e-5), is_whole=False, is_traced=False)
    for path in died.glob("*.jsonl"):
        with path.open("a") as file:
            file.write('{"step": 99, "reward/me')
    return {**found, "died": RunDir(died)}


@pytest.fixture(scope="module")
def page(runs: dict[str, RunDir], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(list(runs.values()), tmp_path_factory.mktemp("report"))[0]


class Balance(HTMLParser):
    """Every tag that opens closes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = ("href", "xlink:href", "src", "action")
        self.links += [value or "" for name, value in attrs if name in names]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_network(page: Path) -> None:
    text = page.read_text()
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    assert {link for link in parser.links if not link.startswith("#")} == {"data:,"}
    assert "@import" not in text and "url(h" not in text and "<script" not in text


def test_the_page_says_all_of_it(page: Path) -> None:
    text = page.read_text()
    for words in (
        *("Reward", "Held-out accuracy", "Staleness and its bound", "Entropy", "Logprob gap"),
        *("Throughput", "Idle", "Length of answers", "Clipped and capped", "Timeline", "Tokens"),
        *("buffer.max_staleness", "3 seeds", "torch", "a CPU", "seed"),
    ):
        assert words in text, words
    assert "as version 6 says: &lt;4&gt;" in text, "answers by version; what a model writes is text"
    assert "Is &lt;b&gt;2 &amp; 2" in text and "<b>2" not in text
    assert 'class="tok a3 g0 out"' in text, "three versions behind, above η, no gap known"
    assert 'class="tok a1 g0"' in text and 'class="tok a0 g4"' in text, "a gap of 0.02"


def test_colours_follow_the_page_and_figures_lie_beside_it(page: Path) -> None:
    text = page.read_text()
    assert "fill: var(--dim)" in text and "stroke: var(--c0)" in text
    assert text.count(report.LIGHT["c0"]) == 1, "only where the variable is defined"
    names = {path.name for path in page.parent.iterdir()}
    assert {"reward.png", "accuracy.png", "staleness.png", "gap.png", "timeline.png"} <= names
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in page.parent.glob("*.png"))
    alone = (page.parent / "timeline.svg").read_text()
    assert "prefers-color-scheme:dark" in alone and "--training:" in alone


def test_runs_that_differ_in_their_seed_alone_are_one_curve_with_a_band(
    runs: dict[str, RunDir],
) -> None:
    found = families(list(runs.values()))
    assert [len(family.runs) for family in found] == [3, 1, 1]
    assert "3 seeds" in found[0].label
    assert "buffer.max_staleness = 0" in found[1].label and "train.lr = 1e-05" in found[2].label
    each = [reward_points(run) for run in found[0].runs]
    for at, point in enumerate(found[0].points(reward_points)):
        values = [points[at].y for points in each]
        assert (point.low, point.high) == (min(values), max(values))
        assert point.y == pytest.approx(sum(values) / 3)
    by_time = next(c for c in charts(found) if c.kind.name == "accuracy_time")
    assert [bool(curve.label) for curve in by_time.curves] == [True, False, False, True, True]


def test_one_run_has_bands_of_its_own(runs: dict[str, RunDir]) -> None:
    run = runs["seed-0"]
    assert all(point.low < point.y < point.high for point in reward_points(run))
    assert [point.x for point in accuracy_points(run)] == [0, 3, 6]
    assert all(0 <= p.low < p.y < p.high <= 1 for p in accuracy_points(run))
    assert any(point.low < point.high for point in length_points(run))
    staleness = next(c for c in charts(families([run])) if c.kind.name == "staleness")
    assert staleness.bounds == (2.0,) and [c.label for c in staleness.legend] == ["mean", "max"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("generating", "generating"),
        ("generating: prefill after a reload", "prefill"),
        ("waiting for prompts", ""),
        ("training: prox forward", "forward"),
        ("training: forward and backward", "training"),
        ("training: optimizer step", "optimizer"),
    ],
)
def test_each_state_has_its_colour(name: str, kind: str) -> None:
    assert report.kind_of(Slice(name, 0.0, 1.0)) == kind


def test_a_damaged_run_directory_is_shown_as_far_as_it_goes(
    tmp_path: Path, runs: dict[str, RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_save_png", lambda figure, chart, path: path)  # slow
    whole = runs["sync"].path
    assert len(runs["died"].metrics) == len(runs["died"].batches) == 6
    for name in sorted(path.name for path in whole.iterdir() if path.is_file()):
        torn = tmp_path / name.replace(".", "-")
        shutil.copytree(whole, torn)
        content = (torn / name).read_bytes()
        (torn / name).write_bytes(content[: len(content) // 2] + b"\xff\x00{[")
        assert report.write([RunDir(torn)], torn / "out")[0].is_file()
        (torn / name).unlink()
        assert report.write([RunDir(torn)], torn / "out")[0].is_file()


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("seed = 0\n[train]\nste")
    assert "No step was trained yet." in report.write([RunDir(tmp_path)], tmp_path)[0].read_text()


def test_lines_of_another_release_and_a_rollback_are_no_error(tmp_path: Path) -> None:
    lines = [{"step": step, "reward/mean": 0.0, "seconds": "?"} for step in (1, 2, 3, 4)]
    lines += [{"rolled_back_to": 2}, *({"step": s, "reward/mean": 1.0} for s in (3, 4, 5))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "evals.jsonl").write_text('{"step": 1, "version": 1, "answers": []}\n')
    (tmp_path / "batches.jsonl").write_text('{"step": 1}\n{"step": 2, "groups": [{"id": 3}]}\n')
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "tokens": ["a"]}\n')
    run = RunDir(tmp_path)
    assert [(p.x, p.y) for p in reward_points(run)] == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert report.write([run], tmp_path)[0].is_file()


def test_without_its_libraries_one_line_says_what_to_install(
    runs: dict[str, RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    with pytest.raises(MinirlError, match=r"jinja2 and matplotlib: pip install \"minirl\[report\]"):
        report.write([runs["sync"]], tmp_path)


def test_the_command_says_where_it_went(
    runs: dict[str, RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_save_png", lambda figure, chart, path: path)
    shutil.copytree(runs["sync"].path, tmp_path / "run")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0] == str(tmp_path / "run" / "report" / "report.html")


@pytest.mark.parametrize("command", ["report", "inspect"])
def test_a_wrong_path_is_named(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "file"):
        with pytest.raises(RecipeError, match=r"RUN = .*; name a run directory"):
            CliRunner().invoke(app, [command, str(path)], catch_exceptions=False)


def test_a_wrong_path_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "minirl.cli", "report", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("minirl: RUN = ")


def test_a_folder_that_cannot_be_written_is_named(runs: dict[str, RunDir], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match=r"--out .*cannot be written"):
        report.write([runs["sync"]], tmp_path / "file" / "in")


# -- in a real browser


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, list[str]]]:
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    profile = tmp_path_factory.mktemp("profile")

    def browse(page: Path, *options: str) -> tuple[str, list[str]]:
        """The rendered page, and what went to the console."""
        words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu"]
        words += ["--enable-logging=stderr", f"--user-data-dir={profile}", *options, page.as_uri()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return browse


def test_a_browser_shows_it_without_a_word_on_the_console(
    page: Path, browse: Callable[..., tuple[str, list[str]]], tmp_path: Path
) -> None:
    dom, console = browse(page, "--dump-dom")
    assert console == []
    assert dom.count("<figure>") >= 12 and dom.count("<svg") == dom.count("<figure>") + 1
    picture = tmp_path / "page.png"
    browse(page, f"--screenshot={picture}", "--window-size=1200,2000")
    image = pytest.importorskip("matplotlib.image").imread(picture)
    colours = {tuple(c) for c in (image[::4, ::4, :3] * 255).astype(int).reshape(-1, 3).tolist()}
    assert len(colours) > 50, "an empty page"
    (tmp_path / "bad.html").write_text("<script>console.error('heard')</script>")
    assert browse(tmp_path / "bad.html", "--dump-dom")[1], "the console would have been heard"
