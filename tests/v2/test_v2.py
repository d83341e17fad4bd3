"""A whole asynchronous run by the model runner that vLLM takes on CUDA: `make v2`."""

from pathlib import Path

import pytest
from processes import Run, assert_accounted

pytestmark = pytest.mark.v2


def test_a_run_is_exact_under_model_runner_v2(tmp_path: Path, tied_folder: Path) -> None:
    run = Run(tmp_path / "run", model__path=tied_folder, train__lr=1e-3, eval__every=0)
    ended = run.end()
    assert ended.code == 0, ended
    lines = run.metrics()
    assert_accounted(lines, max_staleness=2)
    assert run.summary()["logprob_gap_max"] < 1e-5
    assert run.summary()["multi_version_trajectories"] > 0
