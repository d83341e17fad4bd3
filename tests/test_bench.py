"""The benches end to end, in miniature: that they run and report, never how fast anything is."""

import json
from pathlib import Path

import pytest
from test_cli import minirl

from minirl.errors import WorkerDied
from tests import bench
from tests.bench import BENCHES, Figure, Options, Report, at_least, at_most
from tests.bench.stage import stage

GOALS = {
    "weights": {
        "publish_over_memcpy": 1.3,
        "pause_over_copy": 1.3,
        "keep_throughput_cost": 0.03,
        "recompute_throughput_cost": 0.15,
    },
    "queue": {"ring_over_mp_queue": 10},
    "rollout": {"worker_over_bare_vllm": 0.95, "interruptible_over_waiting": 1.1},
    "rewards": {"generation_cost": 0.02},
    "async": {"async_over_sync": 1.7, "share_of_bound": 0.9},
}


LONG = ("weights", "rollout", "rewards", "async")


@pytest.mark.vllm
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in GOALS]
)
def test_a_bench_measures_what_it_promises(name: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    report = bench.run(name, Options(is_quick=True), path)
    written = json.loads(path.read_text())
    assert written.keys() == {"bench", "machine", "figures"}
    assert written["bench"] == name
    assert written["machine"]["cores"] >= 1 and written["machine"]["model"] == "tiny"
    figures = {figure.pop("figure"): figure for figure in written["figures"]}
    assert len(figures) == len(report.figures)
    for figure in figures.values():
        assert figure.keys() == {"value", "goal", "ok"}
        assert isinstance(figure["value"], (int, float)) and isinstance(figure["ok"], bool)
    goals = {figure: values["goal"] for figure, values in figures.items()}
    assert goals.items() >= GOALS[name].items()


def test_a_figure_knows_whether_it_reached_its_goal() -> None:
    assert at_most("cost", 0.03, 0.03).ok and not at_most("cost", 0.04, 0.03).ok
    assert at_least("gain", 10.0, 10.0).ok and not at_least("gain", 9.9, 10.0).ok
    assert Figure("speed", 1.0).ok
    rows = Report("x", {}, (at_least("gain", 9.9, 10.0), Figure("speed", 1234.5))).rows()
    assert rows[1:] == [
        ("gain", "9.9", "at least 10", "MISSED", ""),
        ("speed", "1,234", "", "", ""),
    ]


def test_help_lists_the_benches() -> None:
    shown = minirl("bench", "--help").stdout
    for words in (*BENCHES, "--model", "--json", "docs/benchmarks.md"):
        assert words in shown


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["wieghts"], 'bench = "wieghts": no such bench; one of weights, queue, rollout'),
        (["queue", "--model", "huge"], '--model = "huge": no such model; one of tiny, 135m'),
        (["queue", "--json", "no/such/folder/x.json"], "cannot be written (No such file"),
        (["queue", "--json", "."], "cannot be written (Is a directory)"),
    ],
)
def test_wrong_input_is_one_line(args: list[str], words: str, tmp_path: Path) -> None:
    done = minirl("bench", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr
    assert not list(tmp_path.iterdir())


def fall_over(pipe: object) -> None:
    raise ZeroDivisionError("fell over")


def test_a_part_that_dies_ends_the_bench() -> None:
    with stage(num_parts=1) as here:
        part = here.part(here.train_place, fall_over)
        with pytest.raises(WorkerDied, match="ZeroDivisionError: fell over"):
            here.result(part)
    assert not here.folder.exists()
