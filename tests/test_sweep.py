"""A sweep: what is run, what is not run again, and the table that comes of it."""

import json
import sys
from pathlib import Path

import pytest

from minirl.errors import MinirlError, RecipeError
from minirl.tools import sweep
from minirl.tools.sweep import Sweep, folder_name, parse_vary

RECIPE = Path(__file__).parent.parent / "recipes" / "smoke.toml"
VARIED = parse_vary(["buffer.max_staleness=0,4", "train.objective=decoupled,naive"])


def written(run_dir: Path, accuracy: float, finished: bool = True) -> None:
    """A run directory as `minirl train` leaves it, as far as a sweep looks into it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    same = {"train/tokens": 1000.0, "buffer/staleness_mean": 0.5}
    lines = [{"step": i, "seconds": 2.0 * i, "reward/mean": 0.1 * i, **same} for i in (1, 2, 3)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"finished": finished, "accuracy_before": 0.2, "accuracy_after": accuracy}
    (run_dir / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def here(tmp_path: Path) -> Sweep:
    return Sweep(RECIPE, tmp_path, VARIED, 2, ["train.steps=3"])


def test_values_are_split_at_commas_and_wrong_ones_refused_before_a_run(tmp_path: Path) -> None:
    assert parse_vary(['rollout.stop=["a,b", "c"], []']) == {"rollout.stop": ['["a,b", "c"]', "[]"]}
    assert parse_vary(["train.lr=1", "train.lr=2"]) == {"train.lr": ["1", "2"]}
    assert folder_name({"train.lr": "1e-4", "model.path": "a/b"}) == "lr=1e-4,path=a_b"
    wrong = {"train.lr": "is not KEY=A,B,C", "seed=1,2": "use --seeds N"}
    for text, words in {**wrong, "train.batch_size=32,-1": "batch_size"}.items():
        with pytest.raises(RecipeError, match=words):
            Sweep(RECIPE, tmp_path, parse_vary([text]), 1).go(print)
    assert not list(tmp_path.iterdir())


def test_what_is_finished_is_not_run_again(here: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    dirs = [here.run_dir(cell, seed) for seed in (0, 1) for cell in here.cells]
    written(dirs[0], 0.9)
    written(dirs[1], 0.5, finished=False)
    trained = []

    def train(recipe: Path, run_dir: Path, settings: list[str]) -> None:
        trained.append((run_dir, settings))
        if run_dir == dirs[6]:
            raise MinirlError("it died")
        written(run_dir, 0.8)

    monkeypatch.setattr(sweep, "train", train)
    with pytest.raises(MinirlError, match="it died"):
        here.go(print)
    assert [run_dir for run_dir, _ in trained] == dirs[1:7], "seed by seed"
    varied = ["buffer.max_staleness=0", "train.objective=naive"]
    assert trained[0][1] == ["train.steps=3", *varied, "seed=0"]
    head, first, *others = here.table()
    assert [row[2] for row in others] == ["2", "1", "1"], "the table is of what there is"
    shown = dict(zip(head, first, strict=True))
    assert shown["buffer.max_staleness"] == "0" and shown["seeds"] == "2"
    assert shown["accuracy_after"] == "85.0% ± 63.5%"  # t of one degree of freedom is 12.7
    assert shown["tokens_per_s"] == "500 ± 0"  # of steps 2 and 3: 2,000 tokens in 4 seconds


def test_a_run_is_a_process_with_a_log_and_its_failure_is_one_line(tmp_path: Path) -> None:
    """With another program, which says what it was asked and fails."""
    script, run_dir = tmp_path / "says.py", tmp_path / "cell" / "seed-0"
    script.write_text("import sys; print('before'); sys.exit(' '.join(sys.argv[1:]))")
    asked = f"ended with exit code 1: train r.toml --run-dir {run_dir}"
    for resume in ("", " --resume"):
        with pytest.raises(MinirlError, match=f"{asked}{resume} --set=seed=0; see "):
            sweep.train(Path("r.toml"), run_dir, ["seed=0"], (sys.executable, str(script)))
        run_dir.mkdir(exist_ok=True)
        (run_dir / "recipe.toml").touch()
    assert run_dir.with_suffix(".log").read_text().count("before") == 2
