"""The benches end to end, in miniature: that they run and report, never how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minirl.errors import WorkerDied
from tests.bench import BENCHES, Figure, Options, Report, at_least, at_most, run
from tests.bench.asynchronous import FULL, Run, Steady, bound_tokens_per_s, figures, steady
from tests.bench.processes import processes

ROOT = Path(__file__).parent.parent
GOALS = {
    "weights": {
        "publish_over_memcpy": 1.3,
        "pause_over_copy": 1.3,
        "keep_throughput_cost": 0.03,
        "recompute_throughput_cost": 0.15,
    },
    "queue": {"ring_over_mp_queue": 10},
    "rollout": {"worker_over_bare_vllm": 0.95, "interruptible_over_waiting": 1.1},
    "controller": {"efficiency": 0.97},
    "simulator": {"group_events_a_minute": 10e6, "cost_growth": 1.5},
    "rewards": {"generation_cost": 0.02},
    "async": {"async_over_sync": 1.7, "share_of_bound": 0.9},
    "dashboard": {"dashboard_cost": 0.01},
    "train": {
        "step_over_bare_loop": 0.95,
        "dynamic_over_fixed": 1.3,
        "chunked_over_full_memory": 0.25,
    },
}
SHORT = ("queue", "simulator")


@pytest.mark.vllm
@pytest.mark.parametrize(
    "name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.slow) for n in GOALS]
)
def test_a_bench_measures_what_it_promises(name: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    report = run(name, Options(is_quick=True), path)
    written = json.loads(path.read_text())
    assert written.keys() == {"bench", "machine", "figures"} and written["bench"] == name
    assert written["machine"]["cores"] >= 1 and written["machine"]["model"] == "tiny"
    found = {figure.pop("figure"): figure for figure in written["figures"]}
    assert len(found) == len(report.figures)
    for figure in found.values():
        assert figure.keys() == {"value", "goal", "ok"}
        assert isinstance(figure["value"], (int, float)) and isinstance(figure["ok"], bool)
    assert {name: values["goal"] for name, values in found.items()}.items() >= GOALS[name].items()


def test_a_figure_knows_whether_it_reached_its_goal() -> None:
    assert BENCHES.keys() == GOALS.keys()
    assert at_most("cost", 0.03, 0.03).ok and not at_most("cost", 0.04, 0.03).ok
    assert at_least("gain", 10.0, 10.0).ok and Figure("speed", 1.0).ok
    rows = Report("x", {}, (at_least("gain", 9.9, 10.0), Figure("speed", 1234.5))).rows()
    assert rows[1:] == [
        ("gain", "9.9", "at least 10", "MISSED", ""),
        ("speed", "1,234", "", "", ""),
    ]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["wieghts"], 'bench = "wieghts": no such bench; one of weights, queue, rollout'),
        (["queue", "--model", "huge"], '--model = "huge": no such model; one of tiny, 135m'),
        (["queue", "--json", "no/such/folder/x.json"], "cannot be written (No such file"),
        (["queue", "--json", "."], "cannot be written (Is a directory)"),
    ],
)
def test_wrong_input_is_one_line(args: list[str], words: str) -> None:
    command = [sys.executable, "-m", "tests.bench", *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and words in done.stderr


@pytest.mark.parametrize("name", ["bench", "chaos", "verify-resume"])
def test_a_command_that_is_gone_names_what_to_use(name: str) -> None:
    command = [sys.executable, "-m", "minirl.cli", name, "x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"No such command '{name}'" in done.stderr and "; use py" in done.stderr


def fall_over(pipe: object) -> None:
    raise ZeroDivisionError("fell over")


def test_a_part_that_dies_ends_the_bench() -> None:
    with processes(1) as here:
        part = here.part(here.train_place, fall_over)
        with pytest.raises(WorkerDied, match="ZeroDivisionError: fell over"):
            here.result(part)
    assert not here.folder.exists()


# -- the async bench: what its figures are made of, on runs with known answers


def line(step: int, seconds: float, tokens: float, rollout: float, train: float) -> dict:
    values = {"train/tokens": tokens, "rollout/idle_frac": rollout, "train/idle_frac": train}
    return {"step": step, "seconds": seconds, "buffer/staleness_mean": float(step), **values}


def test_rates_are_of_the_middle_and_shares_are_of_time() -> None:
    lines = [
        line(1, 50.0, 9e9, 1.0, 1.0),  # the first fill
        line(2, 51.0, 9e9, 1.0, 1.0),
        line(3, 52.0, 1000, 0.5, 0.0),
        line(4, 55.0, 3000, 0.1, 0.2),
        line(5, 99.0, 9e9, 1.0, 1.0),  # the end
    ]
    found = steady(lines, first=2, last=4)
    assert found.seconds == 4.0 and found.tokens == 4000 and found.tokens_per_s == 1000
    shares = (found.rollout_idle, found.train_idle, found.rollout_busy, found.staleness)
    assert shares == pytest.approx((0.2, 0.15, 0.8, 3.75))
    # All slots are filled before the first, and groups are begun as ever until the last.
    assert FULL.first > max(FULL.etas) and FULL.last < FULL.steps - max(FULL.etas)
    assert FULL.order(0) == FULL.order(1)[::-1] and FULL.order(0)[0] == 0


def a_run(rate: float, rollout: float, train: float, seconds: float | None, accuracy: float) -> Run:
    return Run(Steady(10.0, 10 * rate, rollout, train, 1.0), seconds, accuracy)


RUNS = {
    # The engine takes 0.6 s to 1,000 tokens, the trainer 0.4 s, one after the other.
    0: [a_run(1000, 0.4, 0.6, 20.0, 0.90), a_run(1000, 0.4, 0.6, 24.0, 0.92)],
    # Beside each other the engine takes 0.625 s.
    1: [a_run(1600, 0.0, 0.3, 12.0, 0.92), a_run(1500, 0.0, 0.3, 12.0, 0.90)],
    4: [a_run(1580, 0.0, 0.3, 12.0, 0.92), a_run(1400, 0.0, 0.3, 12.0, 0.90)],
    8: [a_run(1650, 0.0, 0.3, None, 0.92), a_run(1650, 0.0, 0.3, 12.0, 0.90)],
}


def test_figures_are_of_the_best_eta_up_to_4_and_paired_by_seed() -> None:
    found = {figure.name: figure for figure in figures(RUNS)}
    half = 12.706 * 0.02  # two seeds, 0.02 to either side
    expected = {
        "best_eta": 1,  # 8 is faster, and does not count
        "async_over_sync": 1.55,
        "bound_over_sync": 1 / 0.6,
        "share_of_bound": 1.55 * 0.6,
        "accuracy_gap": 0.0,
        "accuracy_gap_low": -half,
        "accuracy_gap_high": half,
        "sooner_by": (20 / 12 + 2) / 2,
        "eta_4_over_sync": 1.49,
        "eta_0_seconds_to_80": 22.0,
    }
    values = {name: found[name].value for name in expected}
    assert values == pytest.approx(expected, rel=1e-4)
    assert not found["async_over_sync"].ok and found["share_of_bound"].ok
    assert "eta_8_seconds_to_80" not in found, "one of its runs never got there"
    # A trainer that is slowed down by the engine beside it does not make the bound easier.
    slowed = {0: RUNS[0], 1: [a_run(1000, 0.5, 0.0, None, 0.9)] * 2}
    assert bound_tokens_per_s(slowed) == pytest.approx(1000 / 0.5)
    sync = [a_run(1000, 0.4, 0.6, 20.0, accuracy) for accuracy in (0.90, 0.91, 0.92)]
    worse = [a_run(1600, 0.0, 0.3, 12.0, accuracy) for accuracy in (0.85, 0.86, 0.86)]
    gap = {figure.name: figure for figure in figures({0: sync, 4: worse})}["accuracy_gap_high"]
    assert gap.value < 0 and not gap.ok, "lower in every seed: no noise"
