"""Ctrl-C and SIGTERM: once finishes the step and saves, twice ends now, early ends at once."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_supervisor import STEPS, stage, stage_config

from minirl.launch import _signals
from minirl.run_dir import read_lines
from minirl.train.checkpoint import newest_whole
from minirl.workers import SIGNALS


@pytest.mark.parametrize("number", SIGNALS)
def test_once_asks_and_twice_ends(number: signal.Signals) -> None:
    loop, notes = SimpleNamespace(is_interrupted=False, is_ready=True), []
    view = cast(Any, SimpleNamespace(note=notes.append))
    before = signal.getsignal(number)
    with _signals(cast(Any, loop), view):
        os.kill(os.getpid(), number)
        assert loop.is_interrupted and notes == [
            f"{number.name}: finishing the step and saving; again to end now"
        ]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("eta", [0, 2])
def test_an_interrupted_run_finishes_its_step_and_saves_it(eta: int, tmp_path: Path) -> None:
    with stage(tmp_path, stage_config(eta, every=0)) as run:
        run.notes.at_step[3] = lambda: setattr(run.loop, "is_interrupted", True)
        run.loop.run()
        assert 3 <= run.loop.step == run.loop.saved_step < STEPS
        run.loop.wait_for("nothing", lambda: True)
        waits = [text for text in run.notes.texts if text.startswith("waiting for ")]
        assert len(waits) == len(set(waits)) and "waiting for nothing" not in waits
        assert len(read_lines(tmp_path / "metrics.jsonl")) == run.loop.step
        _, state, _ = newest_whole(tmp_path)
        assert state is not None and state.step == run.loop.step
        assert state.recipe.startswith("seed = 0")
        consumed = {*range(state.consumed_below), *state.consumed_above}
        assert not consumed & {*run.loop.groups.prompts_in_flight, *state.in_flight}
