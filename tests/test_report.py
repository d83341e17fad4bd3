"""`minirl report`: from run directories, whole or damaged, to one page and its figures. And `minirl
runs` and `inspect`, from files alone."""

import os
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import cases
from run_dirs import make_config, write_run
from test_cli import ran

from minirl.config import Config
from minirl.errors import RecipeError
from minirl.run_dir import RunDir
from minirl.view import loggers, report
from minirl.view.loggers import Logger, Loggers
from minirl.view.report import CHARTS, families

SEEDS = "seed-0, 3 seeds"
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


def half_written(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text("seed = 0\n[train]\nste")
    return folder


def test_the_page_is_whole_without_network(runs: dict[str, RunDir], tmp_path: Path) -> None:
    text = report.write(list(runs.values()), tmp_path)[0].read_text()
    for tag in ("details", "figure", "section", "svg", "table", "span"):
        assert len(re.findall(f"<{tag}[ >]", text)) == text.count(f"</{tag}>"), tag
    links = set(re.findall(r'(?:href|src|action)="([^#]*?)"', text))
    assert links == {"data:,"} and "@import" not in text and "<script" not in text
    for words in (
        *("Held-out accuracy", SEEDS, "25.0% → 75.0%", "0 (allowed: 2)"),
        "95 % interval 4.6% to 69.9% at version 0, then 30.1% to 95.4% at version 6",
        "Never changed, so not drawn: staleness 0; largest staleness 0; length of answers 3.5",
        "1,200 equal rewards, 3 reward error",
    ):
        assert words in text, words
    assert "as version 6 says: &lt;4&gt;" in text, "answers by version; what a model writes is text"
    assert "Is &lt;b&gt;2 &amp; 2" in text and "<b>2" not in text
    assert 'class="tok a3 out"' in text, "three versions behind, above η"
    names = {path.name for path in tmp_path.iterdir()}
    assert {"reward.png", "accuracy.png"} <= names and "gap.png" not in names, "it is flat"


def test_seeds_are_one_curve_with_a_band_and_a_run_has_an_interval(runs: dict[str, RunDir]) -> None:
    found = families(list(runs.values()))
    assert {name: len(found[name]) for name in found} == {SEEDS: 3, "sync": 1, "died": 1}
    *_, last = BY_NAME["reward"].curve(found[SEEDS])
    assert last == (6, pytest.approx(0.55), 0.5, 0.6)
    (_, accuracy, low, high), *_ = BY_NAME["accuracy_time"].curve([runs["sync"]])
    assert low < accuracy == 0.25 < high


def test_damaged_runs_are_shown_as_far_as_they_go(
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
    empty = half_written(tmp_path / "empty")
    text = report.write([RunDir(empty)], empty)[0].read_text()
    assert "No step was trained yet." in text and f"minirl train {empty}/recipe.toml" in text
    for name, lines in (case.values() for case in cases("half_lines")):
        (empty / name).write_text(lines)
    assert ran("report", empty)[0] == str(empty / "report" / "report.html")
    assert "7 stale" in (empty / "report" / "report.html").read_text()  # of a run that failed


def test_runs_are_listed_with_what_they_came_to(tmp_path: Path) -> None:
    assert ran("runs", tmp_path) == [f"no runs in {tmp_path}"]
    (tmp_path / "recipe.toml").touch()  # of a person who works there
    write_run(tmp_path / "eta-0", make_config(eta=0))
    nested = half_written(tmp_path / "smoke" / "lr=1e-3" / "seed-0")  # of a sweep
    half_written(nested / "eval")  # an evaluation in it, which is no run
    os.utime(nested / "recipe.toml", (0, 0))
    rows = [re.split(r"  +", line) for line in ran("runs", tmp_path)]
    assert rows[1][:5] == ["eta-0", "finished", "6/6", "0.500", "75.0%"]
    assert rows[2][:5] == ["smoke/lr=1e-3/seed-0", "failed", "0/?", "—", "—"] and len(rows) == 3


def test_inspect_prints_all_of_a_step(runs: dict[str, RunDir], tmp_path: Path) -> None:
    run = runs["seed-0"].path
    lines = ran("inspect", run, "--step", 4)
    assert lines[0] == "step 4, from version 3" and "  answer: <i>4</i>" in lines
    assert lines.index("  answer: <i>4</i>") < len(lines) - 5, "answers come first"
    rows = [row.split() for row in lines[-4:-2]]
    assert rows == [["8", "0", "1", "3", "3", "stop"], ["8", "1", "0", "2–3", "4", "length"]]
    assert ran("inspect", run)[0].startswith("step 6"), "the last by default"
    with pytest.raises(
        RecipeError, match=r"--step = 99: .*/seed-0 has no such step; it has 1 to 6"
    ):
        ran("inspect", run, "--step", 99)
    with pytest.raises(RecipeError, match="let it train a step"):
        ran("inspect", half_written(tmp_path / "new"))


# Loggers follow a run in threads of their own; one that fails costs a note ------------------------

ANSWER = {"prompt": "2 + 2?", "reference": "4", "answer": "four", "reward": 1.0}


def log_of(folder: Path, step: int, *names: str) -> Any:
    """A RunLog that resumes at a step, as far as a logger looks at it."""
    notes: list[str] = []
    config = replace(Config(), log=replace(Config().log, to=names))
    given = {"config": config, "run_dir": folder, "note": notes.append}
    log = SimpleNamespace(**given, step=step, notes=notes, metrics=[], evals=[])
    train(log, *range(1, step + 1))
    return log


def train(log: Any, *steps: int) -> None:
    for step in steps:
        log.metrics.append({"step": step, "reward/mean": step / 10})
        log.evals.append({"step": step, "accuracy": 0.5, "low": None, "answers": [ANSWER]})


def test_a_logger_may_raise_or_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []

    def raises(*_: object) -> Logger:
        raise ValueError("no such project")

    table = lambda columns, data: (columns, data)  # noqa: E731
    keeps = Logger(lambda *line: written.append(line), lambda: written.append("over"), table)
    monkeypatch.setattr(loggers, "LOGGERS", {"tensorboard": lambda *_: keeps, "wandb": raises})
    monkeypatch.setattr(loggers, "POLL_S", 600.0)
    monkeypatch.setattr(loggers, "END_S", 120.0)
    log = log_of(tmp_path, 2, "wandb", "tensorboard")
    several = Loggers(log)
    train(log, 3)
    several.close()
    evaluation = {"eval/accuracy": 0.5, "answers": ([*ANSWER], [["2 + 2?", "4", "four", "1.0"]])}
    assert written == [(3, {"reward/mean": 0.3}), (2, evaluation), (3, evaluation), "over"]
    assert log.notes == ["wandb is off, training continues: ValueError: no such project"]
    monkeypatch.setattr(loggers, "END_S", 0.0)
    hangs = threading.Event().wait  # until the process ends
    monkeypatch.setattr(loggers, "LOGGERS", {"tensorboard": lambda *_: hangs()})
    log = log_of(tmp_path, 0, "tensorboard")
    Loggers(log).close()
    assert log.notes == ["tensorboard is left behind: no end within 0 s"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_real_logger_keeps_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(loggers, "END_S", 600.0)
    pytest.importorskip(name)  # the extra `dev` has tensorboard
    for last_step in (0, 2):
        log = log_of(tmp_path, last_step, name)
        several = Loggers(log)
        train(log, *range(last_step + 1, last_step + 4))
        several.close()
        assert not log.notes
    assert any((tmp_path / name).rglob("*"))
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        found = [(e.step, e.value) for e in events.Scalars("reward/mean")]
        assert found == [(step, pytest.approx(step / 10)) for step in (1, 2, 3, 4, 5)]
