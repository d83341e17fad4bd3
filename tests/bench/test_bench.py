"""The benches in miniature: that they run and report, never how fast anything is. Those with an
engine or a model are slow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minirl.run_dir import read_lines
from minirl.tools.sweep import parse_vary
from tests.bench import Figure, Options, Report, at_least, at_most, run, variants
from tests.bench.sweep import VARIANT, VariantSweep

ROOT = Path(__file__).parent.parent.parent
GOALS = {
    "queue": {"ring_over_mp_queue": 10},
    "simulator": {"group_events_a_minute": 10e6, "cost_growth": 1.5},
    "weights": {"publish_over_memcpy": 1.3, "pause_over_copy": 1.3},
    "rollout": {"worker_over_bare_vllm": 0.95},
    "rewards": {"generation_cost": 0.02},
    "train": {"step_over_bare_loop": 0.95, "shared_over_packed_smoke": 1.5},
    "shard": {"bill_over_counted": 1.05},
    "controller": {"efficiency": 0.97},
    "dashboard": {"dashboard_cost": 0.01},
    "async": {"async_over_sync": 1.7, "share_of_bound": 0.9},
}
QUICK = ("queue", "simulator")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in GOALS]
)
def test_a_bench_measures_what_it_promises(name: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    run(name, Options(is_quick=True), path)
    written = json.loads(path.read_text())
    assert written.keys() == {"bench", "machine", "figures"} and written["bench"] == name
    found = {figure.pop("figure"): figure for figure in written["figures"]}
    assert all(figure.keys() == {"value", "goal", "ok"} for figure in found.values())
    assert {name: values["goal"] for name, values in found.items()}.items() >= GOALS[name].items()


def test_a_figure_knows_whether_it_reached_its_goal() -> None:
    assert at_most("cost", 0.03, 0.03).ok and not at_most("cost", 0.04, 0.03).ok
    rows = Report("x", {}, (at_least("gain", 9.9, 10.0), Figure("speed", 1234.5))).rows()
    assert rows[1:] == [
        ("gain", "9.9", "at least 10", "MISSED", ""),
        ("speed", "1,234", "", "", ""),
    ]


@pytest.mark.parametrize(
    ("module", "args", "words"),
    [
        ("tests.bench", ["wieghts"], 'bench = "wieghts": no such bench; one of weights, queue'),
        ("tests.bench", ["queue", "--json", "no/such/x.json"], "cannot be written (No such file"),
        ("minirl.cli", ["bench", "x"], "No such command 'bench'; use python -m tests.bench"),
    ],
)
def test_wrong_input_is_one_line(module: str, args: list[str], words: str) -> None:
    command = [sys.executable, "-m", module, *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and words in done.stderr


def test_a_table_for_the_docs_has_steps_to_80_and_a_curve(tmp_path: Path) -> None:
    here = VariantSweep(ROOT / "recipes" / "smoke.toml", tmp_path, {VARIANT: ["behind"]}, 2)
    step = {"seconds": 1.0, "reward/mean": 0.1, "train/tokens": 9.0, "buffer/staleness_mean": 0.5}
    for seed, accuracy in enumerate((0.9, 0.7)):
        run_dir = here.run_dir(here.cells[0], seed)
        run_dir.mkdir(parents=True)
        (run_dir / "metrics.jsonl").write_text(json.dumps({"step": 1, **step}) + "\n")
        summary = {"finished": True, "accuracy_before": 0.2, "accuracy_after": accuracy}
        summary["accuracies"] = [(0, 0.2), (7, accuracy)]
        (run_dir / "summary.json").write_text(json.dumps(summary))
    here.write()
    whole = json.loads((tmp_path / "table.json").read_text())
    assert whole["command"].endswith("smoke.toml --vary variant=behind --seeds 2")
    row = whole["rows"][0]
    assert row["runs"] == 2 and row["steps_to_80"]["count"] == 1
    assert row["steps_to_80"]["mean"] == pytest.approx(6.0)
    assert [point["version"] for point in row["curve"]] == [0, 7]


@pytest.mark.slow
@pytest.mark.vllm
def test_a_sweep_over_variants_trains(tmp_path: Path) -> None:
    """With an evaluation at every step, which pins weights while others wait for them."""
    varied = parse_vary(["variant=waiting,fixed,keeping,behind"])
    overrides = ["train.steps=6", "train.batch_size=8", "eval.every=1", "eval.num_prompts=16"]
    overrides += ["buffer.target_staleness=2", "rollout.max_new_tokens=48"]
    here = VariantSweep(ROOT / "recipes" / "smoke.toml", tmp_path, varied, 1, overrides)
    here.go(print)
    assert [row["runs"] for row in here.rows()] == [1, 1, 1, 1]
    *_, keeping, behind = (here.run_dir(cell, 0) for cell in here.cells)
    kept = sorted((keeping / variants.KEPT).iterdir())
    assert [path.stem for path in kept] == [f"{v:06d}" for v in range(7)]
    ages = [line["buffer/staleness_mean"] for line in read_lines(behind / "metrics.jsonl")]
    assert ages == [0, 1, 2, 2, 2, 2], "every batch is as old as it may be"
