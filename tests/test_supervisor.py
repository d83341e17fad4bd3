"""The real loop, run log and buffer around workers that die, freeze or stand still, a controller
that is killed, and signals: whatever happens, steps come once each, every group is accounted for,
and no version number comes twice.
"""

import itertools
import multiprocessing
import os
import re
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cases import each_case
from fault_bodies import Script
from processes import LIMIT_S, RECIPES, TRAINER_PLACE, wait_until
from run_dirs import NO_SAVER, Notes

from minirl import supervisor
from minirl.buffer import make_buffer
from minirl.config import Config
from minirl.errors import CannotTrain, MinirlError, Stalled
from minirl.launch import _signals
from minirl.loop import Loop
from minirl.messages import Role, Stop
from minirl.recipe import build, load, to_toml
from minirl.records import Drop, Example, Prompt
from minirl.resume import Start, find_start
from minirl.run_dir import read_lines
from minirl.run_log import RunLog
from minirl.shm.board import Board, Row
from minirl.shm.weights import TensorSpec, WeightStore
from minirl.supervisor import memory_hint
from minirl.tasks.prompts import Consumed, PromptStream
from minirl.tasks.registry import make_task
from minirl.train.checkpoint import newest_whole, read_whole
from minirl.workers import SIGNALS, Workers
from tests.soak.controller_process import living, orphaned_memory
from tests.soak.ledger import prove

STEPS, BATCH = 8, 3


class Stage:
    def __init__(
        self, folder: Path, config: Config, is_resumed: bool, scripts: dict[str, dict[str, Any]]
    ):
        self.dir, self.config = folder, config
        self.notes, self.at_step = Notes(), dict[int, Callable[[], object]]()
        self.notes.step = lambda line: self.at_step.get(line["step"], bool)()
        start = find_start(folder) if is_resumed else Start()
        (folder / "recipe.toml").write_text(to_toml(config))
        self.workers = Workers(folder, 3)
        # Forked: these workers need nothing but what is loaded here, and torch takes 2 s to load.
        self.workers._context = multiprocessing.get_context("fork")
        self.workers.board.row = self.row
        self.store = WeightStore((TensorSpec("w", (1,)),), "float32")
        given: Any = {"folder": str(start.folder), "rendezvous": str(folder / "rendezvous")}
        given |= {"is_resumed": start.folder is not None, "eta": config.buffer.max_staleness}
        script = Script(self.store, version=start.state.history.version, **given)
        for role, body in BODIES.items():
            its = replace(script, **scripts.get(role.value, {}))
            self.workers.spawn(role, 0, body, its, TRAINER_PLACE)
        consumed = Consumed(start.state.consumed_below, start.state.consumed_above)
        numbers = SimpleNamespace(encode=lambda text: [int(text.split()[2])])  # its own number
        stream = PromptStream(make_task(config), numbers, config.seed, consumed)
        self.buffer = make_buffer(config, start.state.history)
        args = (config, folder, self.workers, self.notes, NO_SAVER, start.state.step)
        self.log = RunLog(*args, start.state.evaluating)
        heldout = [Prompt(i, Example("Ann has 1 pear", "?"), (1,)) for i in range(2)]
        self.loop = Loop(config, self.workers, stream, heldout, self.buffer, self.log)

    def signal_at(self, step: int, role: Role, number: int) -> None:
        """In the loop's own thread, right after the step: no later one can come first."""
        self.at_step[step] = lambda: os.kill(self.workers.of(role)[0].process.pid, number)

    def run_and_check(self) -> list[dict[str, Any]]:
        """To its end, and what must be true then of any run that gets there."""
        self.loop.run()
        self.workers.stop(Stop())
        assert [finding for finding in prove(self.dir) if not finding.is_held] == []
        updates, lines = list[float](), read_lines(self.dir / "metrics.jsonl")
        self.store.read(lambda slot: updates.append(float(dict(self.store.views(slot))["w"][0])))
        assert len(lines) == STEPS == self.loop.step == updates[-1]
        assert [line["train/loss"] for line in lines] == [*range(1, STEPS + 1)]  # no update twice
        return lines

    def row(self, number: int) -> Row:
        """As the board has it, but however busy the machine is, only a stopped worker is late."""
        row = Board.row(self.workers.board, number)
        worker = next(worker for worker in self.workers.all if worker.row == number)
        return row if self.workers.is_stopped(worker) else row._replace(since_s=0.0, beat_s=0.0)


BODIES = {
    Role.TRAIN: "fault_bodies:trainer",
    Role.ROLLOUT: "fault_bodies:engine",
    Role.VERIFY: "tests.bench.scripted:verifier",
}


def stage_config(eta: int = 2, stall_s: float = 60.0, every: int = 3) -> Config:
    values = {"tasks.kind": f"{Path(__file__).parent / 'noisy_task.py'}:Endless"}
    values |= {"tasks.timeout_s": min(10.0, stall_s / 2), "log.stall_s": stall_s, "log.samples": 1}
    values |= {"rollout.group_size": 2, "buffer.max_staleness": eta, "train.steps": STEPS}
    values |= {"train.batch_size": BATCH, "eval.every": 2, "eval.num_prompts": 2}
    return build({**values, "checkpoint.every": every})


@contextmanager
def stage(
    folder: Path, config: Config | None = None, is_resumed: bool = False, **scripts: dict[str, Any]
) -> Iterator[Stage]:
    """`scripts`: what is different about the worker of a role."""
    built = Stage(folder, config or stage_config(), is_resumed, scripts)
    try:
        yield built
    finally:
        built.workers.kill()
        built.log.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", 0.02)


@each_case("rollbacks")
def test_a_dead_rank_rolls_back(case: dict[str, Any], tmp_path: Path) -> None:
    eta, bad, redone, why = case.values()
    with stage(tmp_path, stage_config(eta), train={"bad": bad}) as run:
        if "breaks" in bad:
            newest = tmp_path / "checkpoints" / "step-000006" / "model.safetensors"
            run.at_step[7] = lambda: newest.write_bytes(b"")
        lines = run.run_and_check()
        assert lines[-1]["faults/steps_redone"] == redone, why
        assert lines[-1]["faults/workers_replaced"] == 1 + ("die_in_load" in bad)
        least = BATCH * redone + (0 if "die_in_save" in bad else BATCH)
        assert run.buffer.drops[Drop.WORKER_DIED] >= least
        assert any("rollback from step" in note for note in run.notes)
        assert not list((tmp_path / "checkpoints").glob(".*"))


@each_case("always_dies")
def test_a_worker_that_always_dies_ends_the_run_with_a_reason(
    case: dict[str, Any], tmp_path: Path
) -> None:
    """What does not fit says what to change, and is not tried again."""
    role, bad, said, num_steps = case.values()
    (tmp_path / f"{role}-0.log").write_text("of an earlier run: CUDA out of memory\n")
    with stage(tmp_path, **{role: {"bad": bad}}) as run:
        delays, replace_now = list[float](), run.workers.replace
        run.workers.replace = lambda worker, s=0.0: delays.append(s) or replace_now(worker)
        with pytest.raises(MinirlError, match=said):
            run.loop.run()
        num_restarts = 3 if "start 4" in said else 0
        assert delays == [supervisor.FIRST_DELAY_S * 2**i for i in range(num_restarts)]
        steps = [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")]
        assert num_steps is None or steps == [*range(1, num_steps + 1)]
        assert "dies" not in bad or any("the last words of a rank" in note for note in run.notes)


def test_killed_and_frozen_engines_and_verifiers_are_replaced(tmp_path: Path) -> None:
    with stage(tmp_path, stage_config(eta=0, stall_s=3.0)) as run:  # each step needs all of them
        run.signal_at(1, Role.VERIFY, signal.SIGKILL)
        run.signal_at(2, Role.ROLLOUT, signal.SIGKILL)
        run.signal_at(4, Role.VERIFY, signal.SIGSTOP)
        run.signal_at(6, Role.ROLLOUT, signal.SIGSTOP)
        run.run_and_check()
        assert run.log.workers_replaced == 4
        assert not run.loop.supervisor.deaths, "each did its work again"
        assert run.buffer.drops[Drop.REWARD_ERROR] == run.buffer.drops[Drop.REWARD_TIMEOUT] == 0
        report = (tmp_path / "stall.txt").read_text()
        assert "without a heartbeat" in report and "slots" in report and "--- train-0" in report


@pytest.mark.parametrize(
    ("fault", "num_starts", "change"),
    [("too_large", 1, "from 4.0 to 8.0"), ("oom_killed", 2, "from 4.0 to 2.0")],
)
def test_a_reward_that_needs_too_much_memory_costs_its_group(
    fault: str, num_starts: int, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "num_oom_kills", itertools.count().__next__)
    with stage(tmp_path, verify={"bad": {fault: 4}}) as run:
        run.run_and_check()
        assert run.buffer.drops[Drop.REWARD_ERROR] == 1
        assert run.log.workers_replaced == num_starts
        hints = [note for note in run.notes if note.startswith("verify-0 ")]
        assert f"change tasks.memory_gib {change}" in hints[0]


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_frozen_rank_or_run_ends_with_a_report(is_frozen: bool, tmp_path: Path) -> None:
    bad = {} if is_frozen else {"deaf": 1}
    said = "train-0 has been " if is_frozen else r"nothing has moved for \d s"
    with stage(tmp_path, stage_config(stall_s=2.0), rollout={"bad": bad}) as run:
        run.signal_at(1, Role.TRAIN, signal.SIGSTOP)
        with pytest.raises(Stalled, match=said) as stalled:
            run.loop.run()
        assert stalled.value.exit_code == 3 and str(tmp_path / "stall.txt") in str(stalled.value)
        report = (tmp_path / "stall.txt").read_text()
        assert "--- rollout-0" in report
        if not is_frozen:
            assert "rollout-0    waiting for prompts for" in report
            assert "train-0      waiting for batch for" in report
            assert "evaluation   under way" in report


@pytest.mark.parametrize("version", [0, 4])
def test_a_run_without_rewards_saves_what_there_is_and_stops(version: int, tmp_path: Path) -> None:
    config = stage_config(every=0)
    with stage(tmp_path, config, verify={"bad": {"broken_from": version}}) as run:
        with pytest.raises(CannotTrain) as stopped:
            run.loop.run()
        said, step = str(stopped.value), run.loop.step
        assert stopped.value.exit_code == 3 and "\n" not in said
        assert re.match(r"no reward for \d+ groups in a row: reward error \d+ times", said)
        assert "ValueError: no number (my_task.py, line 12, in reward); mend that" in said
        assert step == run.loop.saved_step == find_start(tmp_path).state.step
        assert bool(step) is bool(version) and step in (0, *range(version, STEPS))
        told = [text for text in run.notes if text.startswith("no reward for")]
        assert 1 <= len(told) <= 3, "the 1st, 10th, 100th"


def test_a_deadly_prompt_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_DEATHS", 99)
    with stage(tmp_path, rollout={"bad": {"deadly_prompt": 4}}) as run:
        run.run_and_check()
        assert run.buffer.drops[Drop.REFUSED] >= 1


@pytest.mark.parametrize("step", [3, STEPS])
def test_a_disk_that_is_full_costs_a_checkpoint_and_not_the_run(step: int, tmp_path: Path) -> None:
    with stage(tmp_path, train={"bad": {"unsaved": step}}) as run:
        run.loop.run()
        said = f"no checkpoint of step {step}: No space left"
        assert any(said in text for text in run.notes)
        saved = {int(path.name[-6:]) for path in (tmp_path / "checkpoints").iterdir()}
        assert saved == {3, 6, STEPS} - {step} and run.loop.saved_step == max(saved)
        assert run.loop.save_error == ("No space left on device" if step == STEPS else "")


def test_an_evaluation_that_loses_its_engine_is_retried(tmp_path: Path) -> None:
    """Training continues meanwhile."""
    with stage(tmp_path, rollout={"bad": {"long_evaluation": 2}}) as run:
        run.signal_at(4, Role.ROLLOUT, signal.SIGKILL)  # that of version 2 has not ended
        run.run_and_check()
        assert any("not of one version" in text for text in run.notes)
        assert any(text.startswith("step 4 is not evaluated, since") for text in run.notes)
        versions = [line["version"] for line in read_lines(tmp_path / "evals.jsonl")]
        assert versions[0] == 0 and versions[-1] == STEPS and 2 not in versions


def test_groups_are_begun_while_a_checkpoint_is_saved(tmp_path: Path) -> None:
    config = stage_config()
    config = replace(config, buffer=replace(config.buffer, target_staleness=2.0))  # in every slot
    with stage(tmp_path, config, train={"bad": {"held_save": 3}}) as run:
        feed = run.loop.feed

        def watched() -> None:
            before = run.buffer.ledger.submitted
            feed()
            if run.loop.is_saving and run.buffer.ledger.submitted > before:
                (tmp_path / "begun").touch()  # else it is saved for ever

        run.loop.feed = watched
        run.run_and_check()


# kill -9 of the controller: every worker ends with it, nothing half written is in the way, and the
# next controller resumes. It is a fork of this process, so that a run takes a second. ------------


def controller(folder: Path, **settings: Any) -> int:
    """A run in a session of its own, which resumes what is in the folder. Its exit code is 0 only
    if all that `run_and_check` asks for is true at the end."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        with stage(folder, is_resumed=True, **settings) as run:
            run.run_and_check()
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@contextmanager
def killed(
    folder: Path, is_so: Callable[[int], bool], config: Config | None = None, **scripts: Any
) -> Iterator[None]:
    """Kills a controller when it is so; the next one resumes. Nothing is left of either."""
    pid = controller(folder, config=config, **scripts)
    wait_until(lambda: is_so(pid))
    before = orphaned_memory()
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    wait_until(lambda: not living(pid) and not orphaned_memory() - before)
    yield
    before, pid = orphaned_memory(), controller(folder, config=config)
    assert os.waitpid(pid, 0)[1] == 0
    assert living(pid) == [] and list(folder.rglob("*.tmp")) == []
    wait_until(lambda: not orphaned_memory() - before)


def test_a_controller_killed_while_workers_start(tmp_path: Path) -> None:
    one_never_will = {"start_s": LIMIT_S}
    with killed(tmp_path, lambda pid: len(living(pid)) == 4, rollout=one_never_will):
        assert read_lines(tmp_path / "metrics.jsonl") == []


def test_a_controller_killed_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    half = tmp_path / "checkpoints" / ".step-000006.tmp"
    with killed(tmp_path, lambda _: half.is_dir(), train={"bad": {"long_save": 6}}):
        assert half.is_dir() and not (half / "config.json").exists()
        assert read_whole(tmp_path / "checkpoints" / "step-000003").step == 3
    assert not half.exists()


def test_a_controller_killed_while_it_evaluates(tmp_path: Path) -> None:
    """evals.jsonl has no line of the evaluation that was under way: it is done again."""

    def versions() -> list[int]:
        return [line["version"] for line in read_lines(tmp_path / "evals.jsonl")]

    config = stage_config(eta=0, every=2)  # no step is trained meanwhile
    saved, slow = tmp_path / "checkpoints" / "step-000002", {"bad": {"long_evaluation": 2}}
    with killed(tmp_path, lambda _: saved.is_dir(), config, rollout=slow):
        assert read_whole(saved).evaluating == 2 and 2 not in versions()
    assert 2 in versions() and versions() == sorted(set(versions()))


# Ctrl-C and SIGTERM: once finishes the step and saves, twice ends now ----------------------------


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


@pytest.mark.parametrize(("eta", "every"), [(0, 0), (2, 0), (2, 3)])
def test_an_interrupted_run_ends_its_step_and_saves(eta: int, every: int, tmp_path: Path) -> None:
    with stage(tmp_path, stage_config(eta, every=every)) as run:
        run.at_step[3] = lambda: setattr(run.loop, "is_interrupted", True)
        run.loop.run()
        assert 3 <= run.loop.step == run.loop.saved_step < STEPS
        assert sum(text.startswith("saved ") for text in run.notes) == 1
        run.loop.wait_for("nothing", lambda: True)
        waits = [text for text in run.notes if text.startswith("waiting for ")]
        assert len(waits) == len(set(waits)) and "waiting for nothing" not in waits
        assert len(read_lines(tmp_path / "metrics.jsonl")) == run.loop.step
        _, state, _ = newest_whole(tmp_path)
        assert state is not None and state.step == run.loop.step
        assert state.recipe.startswith("seed = 0")
        consumed = {*range(state.consumed_below), *state.consumed_above}
        assert not consumed & {*run.loop.groups.prompts_in_flight, *state.in_flight}


def test_ctrl_c_ends_the_last_evaluation_and_a_resume_repeats_it(tmp_path: Path) -> None:
    with stage(tmp_path, rollout={"bad": {"long_evaluation": STEPS}}) as run:
        save_last = run.loop.save_last
        run.loop.save_last = lambda: setattr(run.loop, "is_interrupted", save_last() is None)
        run.loop.run()
        assert run.loop.step == run.loop.saved_step == STEPS and not run.loop.is_whole
    with stage(tmp_path, is_resumed=True) as run:
        run.run_and_check()
        assert run.loop.is_whole


# The OOM hint -------------------------------------------------------------------------------------


@each_case("shortages")
def test_each_shortage_names_a_key_to_change(case: dict[str, str]) -> None:
    role, words, kind, change = case.values()
    config, kind = build({"devices.share": kind == "shared"}), kind.replace("shared", "cuda")
    said = memory_hint(role, words, config, kind)
    assert f"change {change}" in said
    key, after = said.partition("change ")[2].split(" from ")[0], said.rpartition(" to ")[2]
    load(RECIPES / "smoke.toml", [f"{key}={after}"])  # what it says can be said: a recipe takes it
