"""A run that was killed and resumed equals the run that was not, to the last bit.

On CPU and at η = 0 one seed gives one run: once whole, once with its controller killed (SIGKILL)
after a checkpoint, so that a step is done twice. Compared: every metric of every step but those of
a clock, and all that the last checkpoint holds: weights, optimizer, generators, prompts.
"""

import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from plain_script import Weights
from processes import Run, assert_accounted
from ranks import are_equal
from safetensors.torch import load_file

from minirl.run_dir import read_lines
from minirl.train import checkpoint

STATE_KEYS = ("step", "history", "consumed_below", "consumed_above", "in_flight")
STEPS, KILLED_AT = 4, 2  # with a checkpoint at every step
HERE = Path(__file__).parent


@pytest.mark.vllm
def test_at_eta_0_one_seed_gives_one_run_killed_or_not(tmp_path: Path, tied_folder: Path) -> None:
    changes: dict[str, Any] = {
        "model__path": tied_folder,
        "devices__kind": "cpu",
        "buffer__max_staleness": 0,
        "checkpoint__every": 1,
        "checkpoint__every_s": 0,
        "checkpoint__keep": 2,
        "train__steps": STEPS,
        "train__lr": "2e-4",
        "eval__every": 1,
        "tasks__kind": f"{HERE / 'noisy_task.py'}:Again",  # replies in any order, of two verifiers
        "tasks__verifiers": 2,
        "buffer__drop_equal_rewards": "true",  # one group in eight: made up for in rounds
    }
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert Run(whole, **changes).end().code == 0
    killed = Run(resumed, **changes)
    killed.wait_for_step(KILLED_AT)
    killed.process.send_signal(signal.SIGKILL)
    killed.process.communicate()
    assert Run(resumed, **changes).end().code == 0
    (lines, tensors, state), again = outcome(whole), outcome(resumed)
    assert again[0] == lines and again[2] == state
    assert tensors and are_equal(again[1], tensors)
    for run_dir in (whole, resumed):
        lines = read_lines(run_dir / "metrics.jsonl")
        assert len(lines) == STEPS
        assert_accounted(lines, max_staleness=0)
        evals = read_lines(run_dir / "evals.jsonl")
        assert [line["version"] for line in evals] == [*range(5)]
        assert lines[-1]["buffer/dropped_equal_rewards"] >= 1
        assert all(1 < line["rollout/turns_mean"] <= 3 for line in lines)
        # The trainer's forward over all turns gives what the engine sampled from.
        assert max(line["train/logprob_gap"] for line in lines) < 1e-4
        for line in lines:  # not one token of a reply is trained
            assert line["train/tokens"] == pytest.approx(line["rollout/length_mean"] * 16)
        assert any(line["train/loss"] != 0 for line in lines), "nothing was learned: no test at all"


def outcome(run_dir: Path) -> tuple[list[dict[str, Any]], Weights, dict[str, Any]]:
    """Lines without what a clock says, all tensors of the last checkpoint, and its state."""
    lines = read_lines(run_dir / "metrics.jsonl") + read_lines(run_dir / "evals.jsonl")
    timed = ("seconds", "_per_s", "_s", "idle_frac")
    lines = [{k: v for k, v in line.items() if not k.endswith(timed)} for line in lines]
    folder, tensors = checkpoint.found(run_dir)[-1], {}
    for path in folder.rglob("*.safetensors"):
        found = load_file(path)
        tensors |= {f"{path.relative_to(folder)}: {name}": found[name] for name in found}
    state = asdict(checkpoint.read_state(folder))
    return lines, tensors, {key: state[key] for key in STATE_KEYS}
