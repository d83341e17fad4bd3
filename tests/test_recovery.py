"""The real loop, fleet, run log and buffer around workers that die, freeze or stand still: whatever
happens, steps come once each, every group is accounted for, and no version number comes twice.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fault_bodies
import pytest
from fault_bodies import Script
from fleet_bodies import place
from processes import assert_accounted

from minirl import faults
from minirl.buffer import Drop
from minirl.config import Config
from minirl.errors import Stalled, WorkerDied
from minirl.launch import make_buffer
from minirl.loop import Loop
from minirl.recipe import to_toml
from minirl.records import Example, Prompt
from minirl.resume import find_start
from minirl.rollout.worker import Stop
from minirl.run_dir import read_lines
from minirl.run_log import RunLog, RunTotals
from minirl.shm.board import State, Total
from minirl.shm.weights import TensorSpec, WeightStore
from minirl.tasks.prompts import PromptStream
from minirl.tasks.registry import make_task
from minirl.train.checkpoint import read_whole
from minirl.workers import Fleet, Role
from tests.soak.ledger import prove

STEPS, BATCH = 8, 3


class Numbers:
    """A tokenizer: a prompt is its own number."""

    def encode(self, text: str) -> list[int]:
        return [int(text.split()[2])]


class Notes:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.at_step: dict[int, Callable[[], None]] = {}

    def note(self, text: str) -> None:
        self.texts.append(text)

    def evaluated(self, version: int, accuracy: float) -> None: ...

    def step(self, line: dict[str, Any]) -> None:
        self.at_step.get(line["step"], lambda: None)()


class Stage:
    def __init__(
        self,
        folder: Path,
        config: Config,
        scripts: dict[Role, dict[str, Any]],
        is_resumed: bool = False,
    ):
        self.dir, self.config, self.notes = folder, config, Notes()
        start = find_start(Path(), folder, is_resumed)
        (folder / "recipe.toml").write_text(to_toml(config))
        self.fleet = Fleet(folder, 3)
        # Forked: these workers need nothing but what is loaded here, and torch takes 2 s to load.
        self.fleet._context = multiprocessing.get_context("fork")
        self.store = WeightStore((TensorSpec("w", (1,)),), "float32")
        bodies = {Role.TRAIN: "trainer", Role.ROLLOUT: "engine", Role.VERIFY: "verifier"}
        for role, body in bodies.items():
            script = Script(
                self.store,
                folder=str(start.folder),
                rendezvous=str(folder / "rendezvous"),
                is_resumed=start.state is not None,
                version=start.history.version,
                eta=config.buffer.max_staleness,
            )
            script = replace(script, **scripts.get(role, {}))
            self.fleet.spawn(role, 0, f"fault_bodies:{body}", script, place())
        task = make_task(config)
        self.stream = PromptStream(task, Numbers(), config.seed, start.consumed)
        self.buffer = make_buffer(config, start.history)
        totals = RunTotals.of(start.state)
        under_way = (start.state or {}).get("evaluating")
        self.log = RunLog(
            config, folder, self.fleet, self.notes, start.step, totals, evaluating=under_way
        )
        heldout = [Prompt(i, Example("Ann has 1 pear", "?"), (1,)) for i in range(2)]
        self.loop = Loop(config, self.fleet, self.stream, heldout, self.buffer, self.log)

    def pid(self, role: Role) -> int:
        return self.fleet.of(role)[0].pid

    def signal_at(self, step: int, role: Role, number: int) -> None:
        """In the loop's own thread, right after the step: no later one can come first."""
        self.notes.at_step[step] = lambda: os.kill(self.pid(role), number)

    @property
    def updates(self) -> float:
        found: list[float] = []
        self.store.read(lambda slot: found.append(float(dict(self.store.views(slot))["w"][0])))
        return found[-1]

    def check(self) -> list[dict[str, Any]]:
        """What must be true at the end of any run that got there."""
        lines = read_lines(self.dir / "metrics.jsonl")
        assert_accounted(lines, self.config.buffer.max_staleness)
        assert [line["buffer/groups_trained"] for line in lines] == [
            BATCH * line["step"] for line in lines
        ]
        assert len(lines) == STEPS == self.loop.step == self.updates
        assert [line["train/loss"] for line in lines] == [*range(1, STEPS + 1)]  # no update twice
        versions = [line["version"] for line in lines]
        assert versions == sorted(set(versions))
        assert len(self.stream.consumed) == self.buffer.ledger.trained + sum(
            count for reason, count in self.buffer.drops.items() if reason is not Drop.WORKER_DIED
        )
        for name in ("samples.jsonl", "batches.jsonl"):
            steps = [line["step"] for line in read_lines(self.dir / name)]
            assert steps == sorted(steps) and set(steps) == set(range(1, STEPS + 1))
        violated = [finding for finding in prove(self.dir) if not finding.is_held]
        assert not violated
        return lines


@contextmanager
def stage(
    folder: Path,
    eta: int = 2,
    stall_s: float = 60.0,
    every: int = 3,
    is_resumed: bool = False,
    **scripts: dict[str, Any],
) -> Iterator[Stage]:
    with staged(folder, stage_config(eta, stall_s, every), is_resumed, **scripts) as built:
        yield built


def stage_config(eta: int = 2, stall_s: float = 60.0, every: int = 3) -> Config:
    base, kind = Config(), f"{Path(__file__).parent / 'noisy_task.py'}:Endless"
    return replace(
        base,
        tasks=replace(base.tasks, kind=kind, timeout_s=min(10.0, stall_s / 2)),
        rollout=replace(base.rollout, group_size=2),
        buffer=replace(base.buffer, max_staleness=eta),
        train=replace(base.train, steps=STEPS, batch_size=BATCH),
        eval=replace(base.eval, every=2, num_prompts=2),
        checkpoint=replace(base.checkpoint, every=every),
        log=replace(base.log, stall_s=stall_s, samples=1),
    )


@contextmanager
def staged(
    folder: Path, config: Config, is_resumed: bool = False, **scripts: dict[str, Any]
) -> Iterator[Stage]:
    roles = {Role(name): script for name, script in scripts.items()}
    built = Stage(folder, config, roles, is_resumed)
    try:
        yield built
    finally:
        built.fleet.kill()
        built.log.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "FIRST_DELAY_S", 0.02)


@pytest.mark.parametrize("eta", [0, 2])
@pytest.mark.parametrize(
    ("bad", "redone"),
    [
        ({"die_at_step": 6}, 2),  # from 5 back to 3
        ({"die_after_publishing": 5}, 1),  # version 5 was out, and nobody had heard of it
        ({"die_in_save": 6}, 3),
        ({"die_at_step": 2}, 1),  # there is no checkpoint yet: from the beginning
    ],
)
def test_a_trainer_that_dies_goes_back_and_the_run_is_whole(
    eta: int, bad: dict[str, int], redone: int, tmp_path: Path
) -> None:
    with stage(tmp_path, eta, train={"bad": bad}) as run:
        run.loop.run()
        run.fleet.stop(Stop())
        lines = run.check()
        assert lines[-1]["faults/steps_redone"] == redone
        assert lines[-1]["faults/workers_replaced"] == 1
        least = BATCH * redone + (0 if "die_in_save" in bad else BATCH)
        assert run.buffer.drops[Drop.WORKER_DIED] >= least
        assert any("going back from step" in note for note in run.notes.texts)
        assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_trainer_that_always_dies_at_one_step_ends_the_run(tmp_path: Path) -> None:
    with stage(tmp_path, train={"bad": {"die_at_step": 5, "always": 1}}) as run:
        with pytest.raises(WorkerDied, match=r"train-0 was killed by SIGKILL \(start 4\)"):
            run.loop.run()
        assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_rank_that_dies_at_once_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    with stage(tmp_path, train={"bad": {"dies": 1}}) as run:
        with pytest.raises(WorkerDied, match=r"train-0 RuntimeError: no luck \(start 4\)"):
            run.loop.run()
        assert any("the last words of a rank" in note for note in run.notes.texts)


def test_a_rank_that_does_not_fit_says_what_to_change_and_is_not_tried_again(
    tmp_path: Path,
) -> None:
    said = r"\(start 1\).*change train\.max_tokens from 16384"
    with stage(tmp_path, train={"bad": {"dies": 2}}) as run, pytest.raises(WorkerDied, match=said):
        run.loop.run()


def test_killed_and_frozen_engines_and_verifiers_are_replaced(tmp_path: Path) -> None:
    with stage(tmp_path, eta=0, stall_s=3.0) as run:  # at η = 0 each step needs all of them
        run.signal_at(1, Role.VERIFY, signal.SIGKILL)
        run.signal_at(2, Role.ROLLOUT, signal.SIGKILL)
        run.signal_at(4, Role.VERIFY, signal.SIGSTOP)
        run.signal_at(6, Role.ROLLOUT, signal.SIGSTOP)
        run.loop.run()
        run.check()
        assert run.log.totals.workers_replaced == 4
        assert run.buffer.drops[Drop.REWARD_ERROR] == run.buffer.drops[Drop.REWARD_TIMEOUT] == 0
        report = (tmp_path / "stall.txt").read_text()
        assert "without a sign of life" in report and "slots" in report and "--- train-0" in report


def test_a_prompt_that_kills_every_engine_is_dropped_in_the_end(tmp_path: Path) -> None:
    with stage(tmp_path, rollout={"bad": {"deadly_prompt": 4}}) as run:
        run.loop.faults.restarts.delay_s = lambda name: 0.0  # type: ignore[method-assign]
        run.loop.run()
        run.check()
        assert run.buffer.drops[Drop.REFUSED] >= 1


def test_when_all_beat_and_nothing_moves_it_is_told_and_ends(tmp_path: Path) -> None:
    with stage(tmp_path, stall_s=2.0, rollout={"bad": {"deaf": 1}}) as run:
        with pytest.raises(Stalled, match=r"nothing has moved for \d s") as stalled:
            run.loop.run()
        assert stalled.value.exit_code == 3 and str(tmp_path / "stall.txt") in str(stalled.value)
        report = (tmp_path / "stall.txt").read_text()
        assert "rollout-0    waiting for prompts for" in report
        assert "train-0      waiting for batch for" in report
        assert "evaluation   under way" in report and "--- rollout-0" in report


def test_generation_goes_on_while_a_checkpoint_is_saved(tmp_path: Path) -> None:
    with stage(tmp_path, train={"save_s": 0.6}) as run:
        board, tokens = run.fleet.board, {True: 0.0, False: 0.0}

        def watch() -> None:
            before = 0.0
            while run.loop.step < STEPS:
                now = board.total(run.fleet.of(Role.ROLLOUT)[0].row, Total.TOKENS)
                is_saving = board.row(run.fleet.of(Role.TRAIN)[0].row).state is State.SAVING
                tokens[is_saving] += now - before
                before = now
                time.sleep(0.005)

        thread = threading.Thread(target=watch)
        thread.start()
        run.loop.run()
        thread.join()
        run.check()
        assert tokens[True] > 0


def test_a_disk_that_is_full_costs_a_checkpoint_and_not_the_run(tmp_path: Path) -> None:
    with stage(tmp_path, train={"bad": {"unsaved": 3}}) as run:
        run.loop.run()
        run.check()
        assert any("no checkpoint of step 3: No space left" in text for text in run.notes.texts)
        names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert names == ["step-000006", "step-000008"]


def test_the_last_step_that_cannot_be_saved_is_told(tmp_path: Path) -> None:
    with stage(tmp_path, train={"bad": {"unsaved": STEPS}}) as run:
        run.loop.run()
        assert run.loop.unsaved == "No space left on device" and run.loop.saved_step == 6


def test_restarts_are_spaced_bounded_and_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "FIRST_DELAY_S", 1.0)
    restarts = faults.Restarts()
    assert [restarts.delay_s("a") for _ in range(4)] == [1.0, 2.0, 4.0, None]
    assert restarts.delay_s("b") == 1.0
    restarts.proved("a")
    assert restarts.delay_s("a") == 1.0


def test_the_scripted_checkpoint_is_one_that_the_real_reader_takes(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-000003"
    folder.parent.mkdir()
    state = {"step": 3, "history": {}, "consumed_below": 0, "consumed_above": []}
    fault_bodies.write_checkpoint(folder, state, 5)
    assert read_whole(folder) == state and fault_bodies.read_updates(folder) == 5
