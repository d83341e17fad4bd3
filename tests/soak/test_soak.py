"""`python -m tests.soak`: its parts, and a short soak of a real run."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import RECIPES, SMALL

from minirl.buffer import History
from minirl.config import Config
from minirl.messages import CheckpointState
from minirl.tasks.registry import make_task, self_check
from tests.soak import run_files, task
from tests.soak.accuracy import RUN_SD, compare
from tests.soak.follower import RunFollower
from tests.soak.report import as_markdown
from tests.soak.run_files import Z95, Evaluated, tear
from tests.soak.schedule import FAULTS, Schedule
from tests.soak.task import BadExample, BadReward, bad_reward_at

HERE = Path(__file__).parent.parent
ROOT = HERE.parent


def test_one_seed_gives_one_order_and_every_fault_comes() -> None:
    one, two, other = Schedule(3), Schedule(3), Schedule(4)
    size = sum(fault.count for fault in FAULTS)
    draws = [one.draw() for _ in range(2 * size)]
    assert draws == [two.draw() for _ in range(2 * size)]
    assert [d.fault for d in draws] != [other.draw().fault for _ in range(2 * size)]
    for start in (0, size):
        given = Counter(draw.fault for draw in draws[start : start + size])
        assert given == {fault.name: fault.count for fault in FAULTS}
    some = Schedule(0, ("kill-rank", "fill-disk"))
    assert {some.draw().fault for _ in range(20)} == {"kill-rank", "fill-disk"}


def test_files_are_torn_as_by_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = '{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n'
    for seed in range(20):
        (tmp_path / "metrics.jsonl").write_text(whole)
        assert tear(tmp_path, random.Random(seed)) == ["metrics.jsonl"]
        text = (tmp_path / "metrics.jsonl").read_text()
        assert text.startswith('{"step": 1, "a": 1}\n{') and not text.endswith("\n")
    # What a checkpoint vouches for stays whole.
    saved = CheckpointState(step=2, history=History(), consumed_below=0)
    monkeypatch.setattr(run_files, "newest_whole", lambda run_dir: (run_dir, saved, []))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").write_text(whole)
    assert tear(tmp_path, random.Random(0)) == ["metrics.jsonl"]
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.startswith(whole + "{") and not text.endswith("}\n")


def line_of(step: int, seconds: float, **values: Any) -> str:
    counts = {"submitted": 5, "trained": 3, "dropped": 1, "in_flight": 1}
    ledger = {f"buffer/groups_{name}": count for name, count in counts.items()}
    line = {"step": step, "version": step, "seconds": seconds, "buffer/staleness_max": 1}
    return json.dumps({**line, **ledger, **values}) + "\n"


def test_every_line_is_seen_once_through_cuts_and_replacements(tmp_path: Path) -> None:
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "aside"
    follower = RunFollower(tmp_path, max_staleness=2)
    assert follower.look() == 0
    path.write_text(line_of(1, 1.0) + line_of(2, 2.0) + line_of(3, 3.0)[:20])
    assert follower.look() == 2
    with path.open("a") as file:
        file.write(line_of(3, 3.0, **{"buffer/staleness_max": 3})[20:])
    assert follower.look() == 3
    aside.write_text(
        line_of(1, 1.0) + "no line\n" + line_of(2, 5.0, **{"buffer/groups_dropped": 2})
    )
    aside.rename(path)  # as a controller does that goes back to step 1
    assert follower.look() == 4 and follower.last_step == 2 and follower.furthest == 3
    os.truncate(path, len(line_of(1, 1.0)))  # cut, and longer than before when it is seen again
    with path.open("a") as file:
        file.write("".join(line_of(step, 7.0) for step in range(2, 9)))
    assert follower.look() == 11 and follower.furthest == 8
    assert follower.violations == [
        "step 3: buffer/staleness_max is 3",
        "step 2: the groups do not add up (submitted 5, trained 3, dropped 2, in_flight 1)",
    ]


def test_a_torn_batch_is_not_taken_for_that_of_an_earlier_attempt(tmp_path: Path) -> None:
    """A controller that was killed gives its successor the same ids of groups."""
    batch = {"step": 3, "version": 130, "groups": [{"id": 9}]}
    torn = json.dumps({**batch, "step": 4, "version": 129})[:30]
    (tmp_path / "batches.jsonl").write_text(f"{json.dumps(batch)}\n{torn}\n")
    sample = {"step": 4, "group": 9, "versions": [127, 127]}
    sample |= {"token_versions": [127], "token_gaps": [0.0]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    follower = RunFollower(tmp_path, max_staleness=2)
    follower.look()
    assert follower.num_tokens == 1 and follower.violations == []


def test_bad_rewards_are_as_many_as_asked_for_and_a_task_stays_what_it_is() -> None:
    counts = Counter(bad_reward_at(5, 0.06, place) for place in range(20_000))
    assert 0.05 < 1 - counts[None] / 20_000 < 0.07
    assert all(counts[bad] > 50 for bad in BadReward)
    base = Config()
    tasks = replace(base.tasks, kind="arithmetic", options={"step_weights": [1.0]})
    made = make_task(replace(base, tasks=task.options(tasks, seed=5, share=0.3)))
    bad = [example for i in range(100) if isinstance(example := made.train(i), BadExample)]
    assert 15 < len(bad) < 45 and bad[0].prompt and made.train(3) == made.train(3)
    assert not any(isinstance(example, BadExample) for example in made.heldout(100))
    assert self_check(made, "soak").startswith("32 "), "its answers are not sampled"


# -- accuracy and the command


def evaluated(share: float, steps: int = 40) -> Evaluated:
    half = Z95 * (share * (1 - share) / 1024) ** 0.5
    return Evaluated(share, share - half, share + half, 1024, steps)


def test_accuracy_is_within_noise_or_not() -> None:
    noise = 1.96 * (2 * 0.9 * 0.1 / 1024 + 2 * RUN_SD**2) ** 0.5
    for off, is_held in ((0.01, True), (-0.95, True), (-1.1, False), (1.5, False)):
        assert compare(evaluated(0.90 + off * noise), evaluated(0.90)).is_held == is_held
    assert not compare(evaluated(0.9, steps=41), evaluated(0.9)).is_held, "not to be compared"
    assert not compare(None, evaluated(0.9)).is_held


def test_the_docs_show_what_the_command_wrote() -> None:
    """docs/chaos.json is what `python -m tests.soak … --json` wrote; the page has its figures."""
    found = json.loads((ROOT / "docs" / "chaos.json").read_text())
    text = " ".join((ROOT / "docs" / "faults.md").read_text().split())
    took = {f["fault"]: (f["recovered_s_median"], f["recovered_s_max"]) for f in found["faults"]}
    for target in ("engine", "verifier", "rank"):
        times = [took[f"{kind}-{target}"] for kind in ("kill", "freeze", "pause")]
        assert f"| {target} | {' | '.join(f'{a} ({b})' for a, b in times)} |" in text
    details = {row["name"]: row["detail"] for row in found["properties"]}
    injected, again = found["injected"], found["steps_taken_back"]
    for shown in (
        f"{found['seconds'] / 60:.1f} minutes {injected} of {injected} faults survived",
        f"{found['controllers']} controllers, {found['steps']} steps and {again} more",
        details["accounted"],
        details["staleness"].partition(";")[0],
    ):
        assert shown in text
    assert found["held"] and found["minutes"] >= 20 and as_markdown(found)
    assert {row["fault"] for row in found["faults"]} >= {fault.name for fault in FAULTS}


PATHS = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE, ROOT)))}


def soak(folder: Path, *extra: str, **changes: object) -> subprocess.CompletedProcess[str]:
    settings = {**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}}
    overrides = [f"--set={key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "tests.soak", str(RECIPES / "smoke.toml"), *overrides]
    command += ["--run-dir", str(folder), *extra]
    return subprocess.run(command, capture_output=True, text=True, env=PATHS)


def test_wrong_input_is_one_line(tmp_path: Path) -> None:
    done = soak(tmp_path / "soak", "--minutes=1", "--faults", "x")
    line = 'soak: --faults = "x": no such fault; there are kill-engine'
    assert done.returncode == 2 and done.stderr.startswith(line)
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "soak").exists()


@pytest.mark.vllm
def test_a_short_soak_loses_nothing(tmp_path: Path, tied_folder: Path) -> None:
    """A real run: its engine and its trainer rank are killed, then the controller while it saves;
    lines are torn, and rewards raise, hang, exit and are slow all along. Then it finishes by
    itself."""
    done = soak(
        tmp_path / "soak",
        *("--minutes=9", "--most=2", "--seed=835", "--bad-rewards=0.12", "--problems=32"),
        *("--faults=kill-two,kill-at-save", f"--json={tmp_path / 'figures.json'}"),
        "--no-reference",
        model__path=tied_folder,
        tasks__kind=f"{HERE / 'noisy_task.py'}:Endless",
        checkpoint__every=2,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["held"] and found["injected"] == found["survived"] == 3
    events = run_files.lines(tmp_path / "soak", "events.jsonl")
    assert [event["fault"] for event in events] == ["kill-two", "kill-at-save", "tear-files"]
    assert events[0]["target"] == "rollout-0, train-0"
    assert found["controllers"] == 2 and found["controller_killed_at"]["save"] == 1
    names = {row["name"] for row in found["properties"]}
    assert names >= {"survived", "watched", "ended", "steps", "ledger", "once", "accounted"}
    assert names >= {"rewards", "staleness", "versions", "finite", "clean"}
    assert as_markdown(found) in done.stdout and "nothing was lost: " in done.stdout
