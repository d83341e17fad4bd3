"""The proof of a soak can fail: each property, on the files of a run in which just that is wrong.
The run is a real one with scripted workers, and nothing is wrong with it.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from test_recovery import STEPS, stage, stage_config

from minirl.buffer import Drop
from minirl.rollout.worker import Stop
from tests.soak import task
from tests.soak.ledger import Finding, prove
from tests.soak.run_files import METRICS, SAMPLES, TRAINED, prompts
from tests.soak.run_files import lines as lines_of
from tests.soak.task import BadReward, bad_reward_at

SEED, SHARE = 1, 0.2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which some rewards always fail."""
    folder = tmp_path_factory.mktemp("whole")
    config = stage_config(every=3)
    config = replace(config, tasks=task.options(config.tasks, SEED, SHARE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "PARTS", {BadReward.RAISES: 1.0})
        with stage(folder, config) as run:
            run.loop.run()
            run.fleet.stop(Stop())
            assert run.buffer.drops[Drop.REWARD_ERROR] >= 2
    return folder


@pytest.fixture(autouse=True)
def only_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "PARTS", {BadReward.RAISES: 1.0})


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def violated(run: Path) -> dict[str, str]:
    return {finding.name: finding.detail for finding in prove(run) if not finding.is_held}


def change(path: Path, how: Callable[[list[dict[str, Any]]], object]) -> None:
    lines = lines_of(path.parent, path.name)
    how(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_state(run: Path, how: Callable[[dict[str, Any]], object]) -> None:
    path = run / "checkpoints" / f"step-{STEPS:06d}" / "trainer" / "state.json"
    state = json.loads(path.read_text())
    how(state)
    path.write_text(json.dumps(state))


def set_line(run: Path, name: str, index: int, **values: object) -> None:
    change(run / name, lambda lines: lines[index].update(values))


def newest(state: dict[str, Any]) -> int:
    return max([state["consumed_below"] - 1, *state["consumed_above"], *state["in_flight"]])


def uncount(state: dict[str, Any]) -> None:
    state["history"]["drops"]["reward_error"] -= 1


def test_a_run_with_which_nothing_is_wrong_passes(run: Path) -> None:
    found = {finding.name: finding.detail for finding in prove(run)}
    assert violated(run) == {}
    names = {"steps", "ledger", "once", "accounted", "rewards"}
    assert found.keys() == names | {"staleness", "versions", "finite", "clean"}
    assert found["once"] == f"{3 * STEPS} prompts trained, none twice"
    assert f"{3 * STEPS} trained + " in found["accounted"]
    assert "raises" in found["rewards"] and "none trained" in found["rewards"]


def test_a_step_that_is_missing_torn_or_there_twice(run: Path) -> None:
    change(run / METRICS, lambda lines: lines.pop(3))
    assert violated(run) == {"steps": "metrics.jsonl has no step 4"}
    change(run / METRICS, lambda lines: lines.insert(3, dict(lines[3], step=4)))
    assert "steps" not in violated(run)
    change(run / TRAINED, lambda lines: lines.append(lines[-1]))
    assert violated(run)["steps"] == f"{TRAINED} has steps twice or out of order"
    change(run / TRAINED, lambda lines: lines.pop())
    with (run / SAMPLES).open("a") as file:
        file.write('{"step": 8, "gro')
    assert violated(run)["steps"] == "samples.jsonl ends with a torn line"


def test_groups_that_do_not_add_up(run: Path) -> None:
    set_line(run, METRICS, 4, **{"buffer/groups_submitted": 0})
    assert violated(run)["ledger"].startswith("step 5: the groups do not add up (submitted ")


def test_a_prompt_that_is_trained_twice(run: Path) -> None:
    number = prompts(lines_of(run, TRAINED)[2])[1]

    def repeat(lines: list[dict[str, Any]]) -> None:
        lines[5]["groups"][0]["prompt"] = number

    change(run / TRAINED, repeat)
    found = violated(run)
    assert found["once"] == f"prompt {number} was trained twice"
    assert "accounted" in found, "and another was not trained at all"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        # Consumed, but neither trained nor dropped.
        (lambda s: s["consumed_above"].append(newest(s) + 1), "prompts are consumed but not train"),
        (lambda s: s["in_flight"].append(newest(s) + 2), "is neither consumed nor in flight"),
        (lambda s: s["in_flight"].append(0), "prompt 0 is consumed and in flight"),
        (uncount, "groups were dropped for good"),
    ],
    ids=["skipped", "unknown", "in flight too", "not counted"],
)
def test_a_prompt_that_is_not_accounted_for(run: Path, how: Any, words: str) -> None:
    change_state(run, how)
    assert words in violated(run)["accounted"]


def test_rewards_that_failed_and_a_broken_one_that_was_trained(run: Path) -> None:
    change_state(run, lambda state: state["history"]["drops"].update(reward_timeout=2))
    assert violated(run)["rewards"].startswith("2 more rewards failed than are broken")
    excused = {finding.name: finding for finding in prove(run, num_verifier_faults=2)}
    assert excused["rewards"].is_held, "where verifiers had faults, it may be so"
    change_state(run, uncount)
    assert "groups dropped as reward_error, and" in violated(run)["rewards"]
    broken = next(i for i in range(1000) if bad_reward_at(SEED, SHARE, i) is BadReward.RAISES)
    change(run / TRAINED, lambda lines: lines[0]["groups"][0].update(prompt=broken))
    assert violated(run)["rewards"] == f"prompt {broken} was trained, and its reward is broken"


def test_a_token_that_is_too_old(run: Path) -> None:
    def age(lines: list[dict[str, Any]]) -> None:
        lines[6]["token_versions"][0] = began[lines[6]["step"]] - 3
        lines[6]["token_gaps"][0] = 0.1

    began = {line["step"]: line["version"] for line in lines_of(run, TRAINED)}
    change(run / SAMPLES, age)
    assert violated(run)["staleness"].endswith("has a token 3 old")
    set_line(run, METRICS, 1, **{"buffer/staleness_max": 3})
    assert violated(run)["staleness"] == "step 2: buffer/staleness_max is 3"


def test_a_version_that_comes_again(run: Path) -> None:
    set_line(run, METRICS, 3, version=lines_of(run, METRICS)[2]["version"])
    assert violated(run)["versions"] == "a version is not above the one before it"


def test_weights_that_are_not_finite_and_updates_left_out(run: Path) -> None:
    set_line(run, METRICS, 1, **{"train/skipped_updates": 1})
    assert violated(run)["finite"] == "step 2 left an update out"
    path = run / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors"
    tensors = {name: tensor.copy() for name, tensor in load_file(path).items()}
    tensors["w"][0] = float("nan")
    save_file(tensors, path)
    assert violated(run)["finite"] == "model.safetensors: w is not finite"


def test_what_is_left_behind_and_what_is_gone(run: Path) -> None:
    (run / "checkpoints" / ".step-000099.tmp").mkdir()
    assert "left behind: checkpoints/.step-000099.tmp" in violated(run)["clean"]
    (run / TRAINED).write_text("[]\nnull\n")
    assert violated(run)["steps"].startswith(f"{TRAINED} has no step 1")
    shutil.rmtree(run / "checkpoints")
    assert prove(run) == [Finding("checkpoint", False, f"{run}: there is no checkpoint")]
