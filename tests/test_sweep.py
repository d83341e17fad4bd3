"""A sweep: what is run, what is not run again, and the table that comes of it."""

import json
import math
from pathlib import Path

import pytest

from minirl import sweep
from minirl.errors import MinirlError, RecipeError
from minirl.sweep import Sweep, cells, estimate, parse_vary

RECIPE = Path(__file__).parent.parent / "recipes" / "smoke.toml"


def written(run_dir: Path, accuracy: float, finished: bool = True) -> None:
    """A run directory as `minirl train` leaves it, as far as a sweep looks into it."""
    run_dir.mkdir(parents=True)
    lines = [
        {
            "step": step,
            "seconds": 2.0 * step,
            "reward/mean": 0.1 * step,
            "train/tokens": 1000.0,
            "buffer/staleness_mean": 0.5,
            "rollout/idle_frac": 0.25,
            "train/idle_frac": 0.0,
        }
        for step in (1, 2, 3)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "finished": finished,
        "accuracy_before": 0.2,
        "accuracy_after": accuracy,
        "staleness_max": 1,
    }
    (run_dir / "summary.json").write_text(json.dumps(summary))


def a_sweep(folder: Path, seeds: int = 2) -> Sweep:
    varied = parse_vary(["buffer.max_staleness=0,4", "train.objective=decoupled,naive"])
    return Sweep(RECIPE, folder, tuple(varied), tuple(range(seeds)), ("train.steps=3",))


def test_values_are_split_at_commas_but_lists_are_values() -> None:
    (vary,) = parse_vary(['rollout.stop=["a,b", "c"], []'])
    assert vary.values == ('["a,b", "c"]', "[]")
    assert [c.name for c in cells(parse_vary(["train.lr=1e-4,3e-4"]))] == ["lr=1e-4", "lr=3e-4"]
    assert [c.name for c in cells([])] == ["as-is"]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["train.lr"], "is not KEY=A,B,C"),
        (["=1"], "is not KEY=A,B,C"),
        (["seed=1,2"], "use --seeds N"),
        (["train.lr=1", "train.lr=2"], "is given twice"),
    ],
)
def test_a_wrong_vary_is_one_clear_line(texts: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        parse_vary(texts)


def test_every_combination_is_read_before_the_first_is_run(tmp_path: Path) -> None:
    varied = parse_vary(["train.batch_size=32,-1"])
    with pytest.raises(RecipeError, match="batch_size"):
        Sweep(RECIPE, tmp_path, tuple(varied), (0,)).check()
    a_sweep(tmp_path).check()


def test_what_is_finished_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = a_sweep(tmp_path)
    runs = list(here.runs())
    assert [seed for _, seed, _ in runs] == [0] * 4 + [1] * 4, "seed by seed"
    written(runs[0][2], 0.9)
    written(runs[1][2], 0.5, finished=False)
    trained = []

    def train(recipe: Path, run_dir: Path, settings: list[str]) -> None:
        trained.append((run_dir, settings))
        if run_dir == runs[6][2]:
            raise MinirlError("it died")
        (run_dir / "summary.json").unlink(missing_ok=True)
        (run_dir / "metrics.jsonl").unlink(missing_ok=True)
        run_dir.rmdir() if run_dir.is_dir() else None
        written(run_dir, 0.8)

    monkeypatch.setattr(sweep, "train", train)
    said: list[str] = []
    with pytest.raises(MinirlError, match="it died"):
        here.go(said.append)
    assert [run_dir for run_dir, _ in trained] == [run_dir for _, _, run_dir in runs[1:7]]
    assert trained[0][1] == [
        "train.steps=3",
        "buffer.max_staleness=0",
        "train.objective=naive",
        "seed=0",
    ]
    assert "done before" in said[0]
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [row["runs"] for row in rows] == [2, 2, 1, 1], "the table is of what there is"


def test_the_table_has_means_and_intervals(tmp_path: Path) -> None:
    here = a_sweep(tmp_path)
    for _, seed, run_dir in here.runs():
        written(run_dir, 0.8 + 0.1 * seed)
    head, first, *others = here.table()
    assert len(others) == 3
    row = dict(zip(head, first, strict=True))
    assert row["buffer.max_staleness"] == "0" and row["seeds"] == "2"
    assert row["accuracy_after"] == "85.0 % ± 63.5 %"  # t of one degree of freedom is 12.7
    assert row["tokens_per_s"] == "500 ± 0"  # of steps 2 and 3: 2,000 tokens in 4 seconds
    assert row["rollout_idle"] == "25.0 % ± 0.0 %"
    here.write()
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert len(lines) == 6 and lines[1].startswith("| --- |")


def test_an_interval_is_students() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.303 * 1.0 / math.sqrt(3))
    assert estimate([5.0]).half is None
    assert estimate([0.0, 1.0] * 50).half == pytest.approx(1.96 * 0.5025 / 10, rel=1e-3)
