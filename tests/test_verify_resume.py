"""A run that was killed and resumed is the run that was not, to the last bit; and the command that
says so can also say no."""

import json
import shutil
from pathlib import Path

import pytest
from processes import RECIPES, SMALL, assert_accounted
from safetensors.torch import load_file, save_file

from minirl.errors import RecipeError
from minirl.recipe import load
from minirl.run_dir import read_lines
from tests.verify_resume import FORCED, compare, plan, verify


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tied_folder: Path) -> Path:
    """Both runs: whole/ and resumed/."""
    folder, smoke = tmp_path_factory.mktemp("verify"), RECIPES / "smoke.toml"
    task = Path(__file__).parent / "noisy_task.py"
    changes = {
        **SMALL,
        "model.path": tied_folder,
        "train.steps": 4,
        "train.lr": "2e-4",
        "eval.every": 1,
        "tasks.kind": f"{task}:Again",  # replies come in any order, from two verifiers
        "tasks.verifiers": 2,
        "buffer.drop_equal_rewards": "true",  # one group in eight: made up for in rounds
    }
    overrides = [f"{key}={value}" for key, value in changes.items()]
    config = load(smoke, [*overrides, *FORCED]).config
    findings = verify(smoke, overrides, config, folder, lambda text: None)
    assert all(finding.is_equal for finding in findings), findings
    names = {finding.what for finding in findings}
    assert {"metrics", "model.safetensors", "trainer/optimizer.safetensors"} <= names
    assert {"trainer/rng.safetensors", "prompts and counts"} <= names
    return folder


@pytest.mark.vllm
def test_eta_0_is_synchronous_and_one_seed_gives_one_run_killed_or_not(folder: Path) -> None:
    for name in ("whole", "resumed"):
        lines = read_lines(folder / name / "metrics.jsonl")
        assert_accounted(lines, max_staleness=0)
        assert all(line["buffer/staleness_max"] == 0 for line in lines)
        evals = read_lines(folder / name / "evals.jsonl")
        assert [line["version"] for line in evals] == [*range(5)]
        assert lines[-1]["buffer/dropped_equal_rewards"] >= 1
        assert all(line["rollout/turns_mean"] > 1 for line in lines)
        assert any(line["train/loss"] != 0 for line in lines), "nothing was learned: no test at all"
    assert "going on from" not in json.dumps(lines)
    logs = (folder / "resumed" / "logs" / "train-0.log").read_text()
    assert logs.count("Loading weights") > 1, "it was never started again"


@pytest.mark.vllm
def test_what_differs_is_found_and_named(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder / "resumed", other)

    def wrong() -> dict[str, str]:
        return {f.what: f.detail for f in compare(folder / "whole", other) if not f.is_equal}

    assert wrong() == {}
    last = sorted((other / "checkpoints").iterdir())[-1]
    tensors = load_file(last / "model.safetensors")
    name = next(iter(tensors))
    tensors[name].view(-1)[0] += 1e-6
    save_file(tensors, last / "model.safetensors")
    (last / "trainer" / "rng.safetensors").unlink()
    lines = read_lines(other / "metrics.jsonl")
    lines[2]["train/loss"] += 1e-9
    lines[1]["train/tokens_per_s"] = 1.0  # a clock's: left out
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = wrong()
    assert found.keys() == {"metrics", "model.safetensors", "trainer/rng.safetensors"}
    assert found["metrics"].startswith("step 3: train/loss is ")
    assert found["model.safetensors"] == f"{name} differs"
    (other / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert wrong()["metrics"] == "steps [1, 2, 3, 4] against [1]"


def test_the_kill_comes_after_a_checkpoint_and_before_the_end() -> None:
    for steps in (3, 4, 5, 6, 30, 1000):
        every, killed_at = plan(load(RECIPES / "smoke.toml", [f"train.steps={steps}"]).config)
        assert every < killed_at < steps
    with pytest.raises(RecipeError, match=r"train\.steps = 2: .*pass --set train\.steps=6"):
        plan(load(RECIPES / "smoke.toml", ["train.steps=2"]).config)
