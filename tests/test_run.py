"""Whole runs: the real command, real vLLM, real trainer ranks; an early SIGTERM. Dead and frozen
workers, broken rewards, full disks and a killed controller are in test_supervisor.py and the soak;
broken reloads, and weights that come in flight, are in test_engine.py.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from processes import Ended, Run, assert_accounted, listening_addresses

from minirl.run_dir import open_run, read_lines
from minirl.train import bad_batch
from minirl.view.dashboard import look
from minirl.view.report import write

pytestmark = pytest.mark.vllm
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
SECRET = "a-key-that-nobody-may-see"


def test_two_engines_and_two_ranks_train_and_leave_a_run_directory(
    tmp_path: Path, tied_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers have several turns. Batches are recorded, nothing listens but on loopback, and no
    secret is written."""
    for name in ("REWARD_API_KEY", "HF_TOKEN", "DB_PASSWORD"):
        monkeypatch.setenv(name, SECRET)
    before = os.umask(0)
    kind = f'"{Path(__file__).parent / "noisy_task.py"}:Talkative"'
    settings = {"model__path": tied_folder, "tasks__kind": kind, "rollout__temperature": 0.8}
    settings |= {"devices__rollout": 2, "devices__train": 2, "log__trace": "true"}
    settings |= {"train__num_minibatches": 2, "train__lr": 1e-3, "log__record": "true"}
    settings |= {"eval__every": 1, "checkpoint__every": 2, "checkpoint__keep": 9}
    run = Run(tmp_path / "run", **settings)
    os.umask(before)
    run.wait_for_step(1)
    addresses = listening_addresses(run.process.pid)
    pids = run.workers()
    environments = {name: Path(f"/proc/{pids[name]}/environ").read_text() for name in pids}
    ended = run.end(code=0)
    # Every worker has its track.
    names = {worker: {name for name, *_ in spans} for worker, spans in spans_of(run.dir).items()}
    assert sorted(names) == ["rollout-0", "rollout-1", "train-0", "train-1", "verify-0"]
    assert {"generating", "reloading", "waiting for prompts"} <= names["rollout-0"]
    assert {"training: forward and backward", "waiting for batch"} <= names["train-1"]
    assert {"publishing", "saving", "training: pack step 4"} <= names["train-0"]
    assert {"grading", "waiting for answers"} <= names["verify-0"]
    check_trajectories(run.dir)
    assert_accounted(lines := run.metrics(), max_staleness=2)
    evaluated = read_lines(run.dir / "evals.jsonl")
    assert evaluated[-1]["version"] == 4  # on both engines, or it would be void
    assert all(line["count"] == 8 for line in evaluated)
    assert "retrying" not in ended.out
    assert lines[0]["train/logprob_gap"] < 1e-3
    status = look(run.dir)
    assert (status.state, status.step) == ("finished", 4)
    assert [lane.name for lane in status.lanes] == ["rollout-0", "rollout-1", "train-0", "train-1"]
    assert sum(status.staleness) == run.summary()["trained_tokens"] and status.samples
    assert addresses and addresses <= LOOPBACK
    check_secrets(run, ended, environments)
    assert min(lines[-1][f"buffer/dropped_{what}_error"] for what in ("reward", "reply")) > 0
    assert all(1 < line["rollout/turns_mean"] <= 3 for line in lines)
    assert (run.dir / "samples.jsonl").read_text().count("again?") >= 4
    # One rank computes what two have trained; the first step needs no state of the optimizer.
    assert len([*(run.dir / "record").iterdir()]) == 4
    found = bad_batch.replay(run.dir / "record" / "step-000001")
    assert not found.bad
    for name in bad_batch.SHOWN:
        assert found.values[name] == pytest.approx(lines[0][name], rel=1e-3, abs=1e-7)


def check_secrets(run: Run, ended: Ended, environments: dict[str, str]) -> None:
    assert not [name for name, text in environments.items() if SECRET in text]
    assert "lo" in environments["rollout-0"].partition("GLOO_SOCKET_IFNAME=")[2].split("\0")
    assert SECRET not in ended.out + ended.err
    for path in run.dir.rglob("*"):
        assert not path.stat().st_mode & 0o022, f"{path} can be written by others"
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


Spans = dict[str, list[tuple[str, float, float]]]


def spans_of(run_dir: Path) -> Spans:
    """By worker: what each did, from when to when."""
    events = json.loads((run_dir / "trace.json").read_text().rstrip(",\n") + "]")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    spans: Spans = {name: [] for name in names.values()}
    for e in events:
        if e["ph"] == "X":
            spans[names[e["pid"]]].append((e["name"], e["ts"], e["ts"] + e["dur"]))
    return spans


def check_trajectories(run_dir: Path) -> None:
    """All that was trained; tokens of two answers, with the gap between both sides' logprobs."""
    run = open_run(run_dir)
    assert [line["step"] for line in run.batches] == [1, 2, 3, 4]
    samples = iter(run.samples)
    for metrics, line in zip(run.metrics, run.batches, strict=True):
        assert len(line["groups"]) == 4 and line["version"] == metrics["version"] - 1
        rewards = [reward for group in line["groups"] for reward in group["rewards"]]
        assert sum(rewards) / len(rewards) == pytest.approx(metrics["reward/mean"])
        for group in line["groups"][:2]:
            shown = next(samples)
            columns = [shown[name] for name in ("tokens", "token_versions", "token_gaps")]
            assert shown["group"] == group["id"]
            assert {len(column) for column in columns} == {group["lengths"][0]}
            assert [columns[1][0], columns[1][-1]] == group["versions"][0]
            pairs = zip(*columns[1:], strict=True)
            fresh = [gap for version, gap in pairs if version == line["version"]]
            assert all(gap < 1e-3 for gap in fresh), "the same weights, on either rank"
    assert {len(line["answers"]) for line in run.evals} == {2}
    assert [run.evals[0]["version"], run.evals[-1]["version"]] == [0, 4]
    assert len(write([run], run_dir / "report")) > 10


@pytest.mark.parametrize("eta", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_shares_its_cores_and_trains_only_while_the_engine_sleeps(
    eta: int, tmp_path: Path, tied_folder: Path
) -> None:
    shared = {"devices__share": "true", "buffer__max_staleness": eta, "log__trace": "true"}
    run = Run(tmp_path / "run", model__path=tied_folder, eval__every=2, **shared)
    assert "both on the same cores: engines idle" in run.end(code=0).out
    assert_accounted(run.metrics(), max_staleness=eta)
    assert run.summary()["logprob_gap_max"] < 1e-3
    spans = spans_of(run.dir)
    asleep = [at for name, *at in spans["rollout-0"] if name == "sleeping"]
    training = [at for name, *at in spans["train-0"] if name.startswith("training")]
    assert bool(asleep) == (eta == 0) and len(training) >= 4
    if eta == 0:
        assert all(any(a <= x and y <= b for a, b in asleep) for x, y in training)


@pytest.mark.slow
def test_a_tensor_parallel_engine_and_ranks_that_keep_slices_train_and_resume(
    tmp_path: Path, tied_folder: Path
) -> None:
    split = {"devices__rollout": 2, "devices__tensor_parallel": 2, "devices__train": 2}
    split |= {"train__shard": '"full"', "eval__every": 2, "checkpoint__every": 2}
    for steps, options in ((2, ()), (4, ("--resume",))):
        changes = {"model__path": tied_folder, "train__steps": steps, **split}
        run = Run(tmp_path / "run", options=options, **changes)
        run.end(code=0)
        assert run.summary()["logprob_gap_max"] < 1e-3
        assert [line["step"] for line in run.metrics()] == [*range(1, steps + 1)]
        assert_accounted(run.metrics(), max_staleness=2)
    assert (run.dir / "checkpoints/step-000004/trainer/optimizer-1-of-2.safetensors").exists()


def test_smoke_recipe_learns(tmp_path: Path) -> None:
    """Sixteen of its thirty steps; `make learn` makes them all."""
    run = Run(tmp_path / "run", small=False, train__steps=16, eval__every=16)
    check_learned(run, 600, 0.75)
    assert run.summary()["logprob_gap_max"] < 1e-4, "KV was not computed anew under new weights"
    rewards = [line["reward/mean"] for line in run.metrics()]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


# Whole runs that must learn: `make learn`, about two minutes each on 2 cores.
LEARNERS: dict[str, dict[str, Any]] = {
    "smoke": {},
    "shared cores": {"devices__share": "true"},
    "shared cores in turns": {"devices__share": "true", "buffer__max_staleness": 0},
    "lora": {"train__lora_rank": 16, "train__lr": 3e-3},
    "ppo with a critic": {"train__algorithm": "ppo"},
    "gspo": {"train__algorithm": "gspo"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_it_learns(name: str, tmp_path: Path) -> None:
    """The smoke recipe with one thing changed, from a sampled accuracy near 20 %."""
    run = Run(tmp_path / "run", small=False, eval__every=30, **LEARNERS[name])
    check_learned(run, 1800, 0.85 if name == "smoke" else 0.80)  # the first is README's promise
    assert run.summary()["logprob_gap_max"] < 1e-3


def check_learned(run: Run, limit_s: float, goal: float) -> None:
    ended = run.end(limit_s, code=0)
    summary = run.summary()
    assert summary["accuracy_after"] >= goal, ended
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.40
    assert_accounted(run.metrics(), max_staleness=2)


# Faults -------------------------------------------------------------------------------------------


def test_sigterm_while_workers_start(tmp_path: Path, tied_folder: Path) -> None:
    run = Run(tmp_path / "run", model__path=tied_folder)
    run.wait_until(lambda: "rollout-0" in run.workers())
    os.killpg(run.process.pid, signal.SIGTERM)
    ended = run.end(code=130)
    assert ended.err == "", ended
    assert ended.out == "stopped before anything was saved\n" or (
        "SIGTERM: ending, while workers start" in ended.out and "killed by" not in ended.out
    )
    assert (run.dir / "recipe.toml").is_file() and not (run.dir / "tmp").exists()
