"""`minirl eval` and `minirl sample`: what they take, what they give, two results compared, and the
statistics behind it: known values and brute force."""

import itertools
import json
import shutil
import sys
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from test_cli import minirl, ran

from minirl import launch, supervisor
from minirl.config import Config
from minirl.errors import MinirlError, RecipeError, WorkerDied
from minirl.messages import Role
from minirl.recipe import to_toml
from minirl.run_dir import read_lines
from minirl.statistics import interval_of, mcnemar, pass_at, usual_ks, wilson
from minirl.tools import sweep
from minirl.tools.evaluate import Attempt, Result, resolve, sample, summarise
from minirl.tools.sweep import Sweep, folder_name, parse_vary


def test_wilson_s_interval_has_known_values() -> None:
    # Newcombe 1998, table I, method 3.
    table = [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)]
    for right, count, low, high in [*table, (1, 29, 0.0061, 0.1718)]:
        found = wilson(right / count, count)
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert interval_of([(1.0,)] * 81 + [(0.0,)] * 182) == wilson(81 / 263, 263)
    assert interval_of([(1.0,), ()]) == wilson(1.0, 1)
    copied = interval_of([(1.0,) * 8] * 81 + [(0.0,) * 8] * 182)
    assert copied == wilson(81 / 263, 263), "answers to one problem are not independent"
    assert interval_of([]) is interval_of([(), ()]) is None  # nothing was graded
    shared = interval_of([(0.0, 1.0), (1.0, 1.0)] * 50)  # the bootstrap: 0.75 ± 1.96 · 0.25 / 10
    assert shared == pytest.approx((0.75, 0.70, 0.80), abs=0.006)


def test_pass_at_k_is_the_mean_over_all_choices_of_k() -> None:
    for n, c in [(1, 0), (1, 1), (4, 1), (8, 3), (8, 0), (8, 8)]:
        answers = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            chosen = list(itertools.combinations(answers, k))
            assert pass_at(k, n, c) == pytest.approx(fmean(any(part) for part in chosen))
    assert [usual_ks(k) for k in (0, 1, 2, 6, 8)] == [[], [1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def result(problem: int, *rewards: float | None) -> Result:
    same: Any = {"text": "", "length": 10, "stop": "stop"}
    answers = [Attempt(**same, reward=r, error="?" if r is None else "") for r in rewards]
    return Result(problem, f"prompt {problem}", "ref", answers)


def test_a_failed_reward_counts_nowhere_and_is_counted() -> None:
    found = summarise([result(0, 1.0, None), result(1, 0.0, 0.0), result(2, None, None)])
    assert found["accuracy"] == 0.5  # of two problems, not of three
    assert (found["answers_failed"], found["failures"]) == (3, ["?"])
    assert found["pass_at"] == {"1": 0.5, "2": 0.0}  # problem 0 has one graded answer only
    assert found["interval_95"][0] < 0.5 < found["interval_95"][1]
    assert summarise([result(0, None)])["accuracy"] is None


def test_results_are_compared_by_mcnemar(here: Path) -> None:
    assert mcnemar(8, 1) == pytest.approx(2 * (1 + 9) / 512) and mcnemar(0, 0) == 1.0
    (here / "b").mkdir()

    def shown(a: list[Result], b: list[Result]) -> str:
        for name, results in (("a.jsonl", a), ("b/results.jsonl", b)):
            lines = [json.dumps(result._asdict()) for result in results]
            (here / name).write_text("\n".join(lines))
        return "\n".join(ran("eval", "--compare", "a.jsonl", "b"))

    a = [result(i, float(i < 2)) for i in range(10)]
    found = shown(a, [result(i, float(i >= 1)) for i in range(11)])
    assert "20.0% (5.7% to 51.0%)" in found and "90.0% (59.6% to 98.2%)" in found
    assert "+70.0 points   95 % interval +" in found and "p           0.039   McNemar" in found
    assert "10: 8 gained, 1 lost; 1 left out" in found
    # Several answers each, by their mean.
    a = [result(i, 0.0, 1.0, 0.0, None) for i in range(12)]
    b = [result(i, None, 1.0, 0.0, 1.0) for i in range(12)]
    found = shown(a, [*b, result(12, None)])
    assert "B - A       +33.3 points" in found and " 0.00049   McNemar" in found
    assert "12: 12 gained, 0 lost; 0 left out" in found
    with pytest.raises(RecipeError, match="in common"):
        shown(a, [one._replace(reference="other") for one in b])


def test_a_run_has_its_recipe_and_a_model_needs_a_task(tmp_path: Path, tied_folder: Path) -> None:
    first, last = (tmp_path / "checkpoints" / f"step-{step:06d}" for step in (10, 20))
    for folder in (first, last):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (tmp_path / "recipe.toml").write_text(to_toml(Config()))
    for name, folder in ((tmp_path, last), (first, first)):
        assert resolve(str(name), None, ()).config.model.path == str(folder)
    assert resolve(str(tmp_path), None, ["seed=3"]).config.seed == 3
    # Several answers are sampled: greedy ones would be alike.
    for k, given, expected in ((1, (), 0.0), (4, (), 1.0), (4, (0.6,), 0.6), (4, (0,), 1.0)):
        sets = [f"eval.temperature={value}" for value in given]
        assert resolve(str(tmp_path), None, sets, k).config.eval.temperature == expected
    with pytest.raises(RecipeError, match="comes with no task"):
        resolve(str(tied_folder), None, ())
    config = resolve(str(tied_folder), None, ["tasks.kind=arithmetic"]).config
    assert config.model.path == str(tied_folder)


def test_a_log_an_error_names_is_there(tied_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_DEATHS", 1)
    monkeypatch.setitem(launch.BODIES, Role.ROLLOUT, "fault_bodies:engine")  # not with this set-up
    target = resolve(str(tied_folder), None, ["tasks.kind=arithmetic"])
    with pytest.raises(WorkerDied, match="its log is in ") as died:
        list(sample(target, "2 + 2", 1, True, False))
    folder = Path(str(died.value).rpartition("its log is in ")[2])
    assert "AttributeError" in (folder / "rollout-0.log").read_text()
    shutil.rmtree(folder)


@pytest.mark.vllm
@pytest.mark.parametrize("engines", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_model_is_evaluated_and_sampled(engines: int, tied_folder: Path, tmp_path: Path) -> None:
    """Two turns; of three answers to each problem, and of the replies to them, a few raise and a
    few hang."""
    task = f"{Path(__file__).parent / 'noisy_task.py'}:UnsureAgain"
    done = minirl(
        *("eval", str(tied_folder), "--task", task, "--k", "3", "--set=eval.num_prompts=12"),
        *("--set=rollout.max_new_tokens=24", f"--set=devices.rollout={engines}"),
        *("--set=tasks.timeout_s=5", "--set=rollout.kv_cache_gib=0.1"),
        *("--set=tasks.max_prompt_tokens=64", "--out", "out"),
        cwd=tmp_path,
    )
    assert "problems 12/12" in done.stderr and "95 % interval" in done.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    lines = read_lines(tmp_path / "out" / "results.jsonl", key="problem")
    found = summarise([Result(**line) for line in lines])
    assert summary.items() >= found.items() and sorted(x["problem"] for x in lines) == [*range(12)]
    answers = [SimpleNamespace(**answer) for line in lines for answer in line["answers"]]
    failed = [answer for answer in answers if answer.reward is None]
    assert len(answers) == 36 and summary["answers_failed"] == len(failed) > 0
    assert all(answer.error and answer.text for answer in failed)
    for answer in answers:
        first, *second = answer.text.split("⟦ again?⟧")
        kinds = [sum(text.encode()) for text in (first, *second)]
        is_reply_bad = kinds[0] % 7 == 6 or kinds[0] % 41 == 9
        if answer.stop == "stop" and not second:  # else it would have gone on
            assert is_reply_bad, answer
            assert "nothing to say" in answer.error or "tasks.timeout_s" in answer.error, answer
        else:
            assert not (second and is_reply_bad), answer
            assert (answer.reward is None) == (kinds[-1] % 7 == 3 or kinds[-1] % 41 == 5), answer
        assert answer.reward in (None, float(answer.length % 2 == 0)) and answer.length <= 24
    assert any("⟦" in answer.text for answer in answers if answer.reward is not None)
    assert any("nothing to say" in answer.error for answer in failed)
    # Greedy: both answers are alike. test_engine.py compares logprobs with a plain forward.
    done = minirl(
        *("sample", str(tied_folder), "Tom has 7.", "-n2", "--tokens", "--set=eval.temperature=0"),
        *("--set=rollout.max_new_tokens=8", "--set=rollout.kv_cache_gib=0.1"),
        cwd=tmp_path,
    )
    lines = done.stdout.splitlines()
    shown = [float(line.split()[0]) for line in lines if line[:1] == " "]
    assert len(shown) == 16 and shown[:8] == pytest.approx(shown[8:], abs=1e-3)
    mean = f"8 tokens, length, mean logprob {fmean(shown[:8]):.3f}"
    assert [line for line in lines if line[0] == "-"] == [f"--- {i}: {mean}" for i in (1, 2)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


# A sweep: what is run, what is not run again, and the table that comes of it ----------------------

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
def swept(tmp_path: Path) -> Sweep:
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


def test_what_is_finished_is_not_run_again(swept: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    dirs = [swept.run_dir(cell, seed) for seed in (0, 1) for cell in swept.cells]
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
        swept.go(print)
    assert [run_dir for run_dir, _ in trained] == dirs[1:7], "seed by seed"
    varied = ["buffer.max_staleness=0", "train.objective=naive"]
    assert trained[0][1] == ["train.steps=3", *varied, "seed=0"]
    head, first, *others = swept.table()
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
