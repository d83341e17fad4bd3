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
from test_supervisor import STEPS, stage, stage_config

from minirl.messages import Stop
from minirl.records import Drop
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
            run.workers.stop(Stop())
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


def change(path: Path, how: Callable[[Any], object]) -> None:
    """The lines of a file, or the state in a checkpoint."""
    if path.suffix == ".json":
        state = json.loads(path.read_text())
        how(state)
        path.write_text(json.dumps(state))
    else:
        lines = lines_of(path.parent, path.name)
        how(lines)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def newest(state: dict[str, Any]) -> int:
    return max([state["consumed_below"] - 1, *state["consumed_above"], *state["in_flight"]])


def uncount(state: dict[str, Any]) -> None:
    state["history"]["drops"]["reward_error"] -= 1


def time_out_twice(state: dict[str, Any]) -> None:
    state["history"]["drops"]["reward_timeout"] = 2


def train_again(lines: list[dict[str, Any]]) -> None:
    lines[5]["groups"][0]["prompt"] = prompts(lines[2])[1]


def train_broken(lines: list[dict[str, Any]]) -> None:
    broken = next(i for i in range(1000) if bad_reward_at(SEED, SHARE, i) is BadReward.RAISES)
    lines[0]["groups"][0]["prompt"] = broken


def age(lines: list[dict[str, Any]]) -> None:
    lines[6].update(token_versions=[-9, *lines[6]["token_versions"][1:]], token_gaps=[0.1, 0.1])


def setting(index: int, **values: object) -> Callable[[list[dict[str, Any]]], object]:
    names = {name.replace("__", "/"): value for name, value in values.items()}
    return lambda lines: lines[index].update(names)


CHECKPOINT = f"checkpoints/step-{STEPS:06d}"
STATE = f"{CHECKPOINT}/trainer/state.json"
WRONG: list[tuple[str, Callable[[Any], object], str, str]] = [
    (METRICS, lambda lines: lines.pop(3), "steps", "metrics.jsonl has no step 4"),
    (TRAINED, lambda lines: lines.append(lines[-1]), "steps", "has steps twice or out of order"),
    (METRICS, setting(4, buffer__groups_submitted=0), "ledger", "step 5: the groups do not add up"),
    (TRAINED, train_again, "once", " was trained twice"),
    (TRAINED, train_again, "accounted", ""),  # and another was not trained at all
    # Consumed, but neither trained nor dropped; and so on.
    (STATE, lambda s: s["consumed_above"].append(newest(s) + 1), "accounted", "but not trained"),
    (STATE, lambda s: s["in_flight"].append(newest(s) + 2), "accounted", "neither consumed nor in"),
    (STATE, lambda s: s["in_flight"].append(0), "accounted", "prompt 0 is consumed and in flight"),
    (STATE, uncount, "accounted", "groups were dropped for good"),
    (STATE, uncount, "rewards", "groups dropped as reward_error, and"),
    (STATE, time_out_twice, "rewards", "2 more rewards failed than are broken"),
    (TRAINED, train_broken, "rewards", "was trained, and its reward is broken"),
    (SAMPLES, age, "staleness", " old"),
    (METRICS, setting(1, buffer__staleness_max=3), "staleness", "buffer/staleness_max is 3"),
    (METRICS, setting(3, version=1), "versions", "a version is not above the one before it"),
    (METRICS, setting(1, train__skipped_updates=1), "finite", "step 2 left an update out"),
]


def test_a_run_with_which_nothing_is_wrong_passes(run: Path) -> None:
    found = {finding.name: finding.detail for finding in prove(run)}
    assert violated(run) == {}
    names = {"steps", "ledger", "once", "accounted", "rewards"}
    assert found.keys() == names | {"staleness", "versions", "finite", "clean"}
    assert found["once"] == f"{3 * STEPS} prompts trained, none twice"
    assert "raises" in found["rewards"] and "none trained" in found["rewards"]


@pytest.mark.parametrize(("name", "how", "finding", "words"), WRONG)
def test_each_thing_that_is_wrong_is_found_by_name(
    name: str, how: Callable[[Any], object], finding: str, words: str, run: Path
) -> None:
    change(run / name, how)
    assert words in violated(run)[finding]
    if how is time_out_twice:
        excused = {finding.name: finding for finding in prove(run, num_verifier_faults=2)}
        assert excused["rewards"].is_held, "where verifiers had faults, it may be so"


def test_files_that_are_torn_not_finite_left_behind_or_gone(run: Path) -> None:
    with (run / SAMPLES).open("a") as file:
        file.write('{"step": 8, "gro')
    path = run / CHECKPOINT / "model.safetensors"
    tensors = {name: tensor.copy() for name, tensor in load_file(path).items()}
    tensors["w"][0] = float("nan")
    save_file(tensors, path)
    (run / "checkpoints" / ".step-000099.tmp").mkdir()
    found = violated(run)
    assert found["steps"] == "samples.jsonl ends with a torn line"
    assert found["finite"] == "model.safetensors: w is not finite"
    assert "left behind: checkpoints/.step-000099.tmp" in found["clean"]
    shutil.rmtree(run / "checkpoints")
    assert prove(run) == [Finding("checkpoint", False, f"{run}: there is no checkpoint")]
