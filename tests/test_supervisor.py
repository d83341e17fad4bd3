"""The real loop, run log and buffer around workers that die, freeze or stand still: whatever
happens, steps come once each, every group is accounted for, and no version number comes twice.
"""

import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fault_bodies import Script
from processes import assert_accounted
from worker_bodies import place

from minirl import supervisor
from minirl.config import Config
from minirl.errors import CannotTrain, MinirlError, Stalled
from minirl.launch import make_buffer
from minirl.loop import Loop
from minirl.messages import Role, Stop
from minirl.recipe import load, to_toml
from minirl.records import Drop, Example, Prompt
from minirl.resume import Start, find_start
from minirl.run_dir import read_lines
from minirl.run_log import RunLog
from minirl.shm.weights import TensorSpec, WeightStore
from minirl.supervisor import memory_hint
from minirl.tasks.prompts import Consumed, PromptStream
from minirl.tasks.registry import make_task
from minirl.workers import Workers
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
        self.note = self.texts.append

    def step(self, line: dict[str, Any]) -> None:
        self.at_step.get(line["step"], lambda: None)()


class Stage:
    def __init__(
        self, folder: Path, config: Config, is_resumed: bool, scripts: dict[str, dict[str, Any]]
    ):
        self.dir, self.config, self.notes = folder, config, Notes()
        start = find_start(folder) if is_resumed else Start()
        (folder / "recipe.toml").write_text(to_toml(config))
        self.workers = Workers(folder, 3)
        # Forked: these workers need nothing but what is loaded here, and torch takes 2 s to load.
        self.workers._context = multiprocessing.get_context("fork")
        self.store = WeightStore((TensorSpec("w", (1,)),), "float32")
        script = Script(
            self.store,
            folder=str(start.folder),
            rendezvous=str(folder / "rendezvous"),
            is_resumed=start.folder is not None,
            version=start.state.history.version,
            eta=config.buffer.max_staleness,
        )
        for role, body in BODIES.items():
            its = replace(script, **scripts.get(role.value, {}))
            self.workers.spawn(role, 0, body, its, place())
        consumed = Consumed(start.state.consumed_below, start.state.consumed_above)
        self.stream = PromptStream(make_task(config), Numbers(), config.seed, consumed)
        self.buffer = make_buffer(config, start.state.history)
        args = (config, folder, self.workers, self.notes, start.state.step)
        self.log = RunLog(*args, evaluating=start.state.evaluating)
        heldout = [Prompt(i, Example("Ann has 1 pear", "?"), (1,)) for i in range(2)]
        self.loop = Loop(config, self.workers, self.stream, heldout, self.buffer, self.log)

    def signal_at(self, step: int, role: Role, number: int) -> None:
        """In the loop's own thread, right after the step: no later one can come first."""
        self.notes.at_step[step] = lambda: os.kill(self.workers.of(role)[0].pid, number)

    @property
    def updates(self) -> float:
        found: list[float] = []
        self.store.read(lambda slot: found.append(float(dict(self.store.views(slot))["w"][0])))
        return found[-1]

    def run_and_check(self) -> list[dict[str, Any]]:
        """To its end, and what must be true then of any run that gets there."""
        self.loop.run()
        self.workers.stop(Stop())
        lines = read_lines(self.dir / "metrics.jsonl")
        assert_accounted(lines, self.config.buffer.max_staleness)
        trained = [line["buffer/groups_trained"] for line in lines]
        assert trained == [BATCH * line["step"] for line in lines]
        assert len(lines) == STEPS == self.loop.step == self.updates
        assert [line["train/loss"] for line in lines] == [*range(1, STEPS + 1)]  # no update twice
        versions = [line["version"] for line in lines]
        assert versions == sorted(set(versions))
        ledger, consumed = self.buffer.ledger, self.stream.consumed
        num_ended = ledger.trained + ledger.dropped - self.buffer.drops[Drop.WORKER_DIED]
        assert consumed.below + len(consumed.above) == num_ended
        assert [finding for finding in prove(self.dir) if not finding.is_held] == []
        return lines


BODIES = {
    Role.TRAIN: "fault_bodies:trainer",
    Role.ROLLOUT: "fault_bodies:engine",
    Role.VERIFY: "tests.bench.scripted:verifier",
}


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
def stage(
    folder: Path,
    config: Config | None = None,
    is_resumed: bool = False,
    **scripts: dict[str, Any],
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


@pytest.mark.parametrize(
    ("eta", "bad", "redone"),
    [
        (0, {"die_at_step": 6}, 2),  # from 5 back to 3
        (2, {"die_at_step": 6}, 2),
        (0, {"die_after_publishing": 5}, 1),  # version 5 was out before the controller knew
        (2, {"die_after_publishing": 5}, 1),
        (2, {"die_in_save": 6}, 3),
        (2, {"die_at_step": 2}, 1),  # there is no checkpoint yet: from the beginning
    ],
)
def test_a_trainer_that_dies_is_rolled_back_and_the_run_is_whole(
    eta: int, bad: dict[str, int], redone: int, tmp_path: Path
) -> None:
    with stage(tmp_path, stage_config(eta), train={"bad": bad}) as run:
        lines = run.run_and_check()
        assert lines[-1]["faults/steps_redone"] == redone
        assert lines[-1]["faults/workers_replaced"] == 1
        least = BATCH * redone + (0 if "die_in_save" in bad else BATCH)
        assert run.buffer.drops[Drop.WORKER_DIED] >= least
        assert any("rollback from step" in note for note in run.notes.texts)
        assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("script", "said", "num_steps"),
    [
        ({"train": {"die_at_step": 5, "always": 1}}, r"train-0 was killed by .* \(start 4\)", 4),
        ({"train": {"dies": 1}}, r"train-0 RuntimeError: no luck \(start 4\)", 0),
        # What does not fit says what to change, and is not tried again.
        ({"train": {"dies": 2}}, r"\(start 1\).*change train\.max_tokens from 16384", 0),
        ({"rollout": {"stale": 1}}, r"rollout-0: version 1 did not reach the engine", 0),
    ],
    ids=["at one step", "at once", "out of memory", "broken reload"],
)
def test_a_worker_that_always_dies_ends_the_run_with_a_reason(
    script: dict[str, dict[str, int]], said: str, num_steps: int, tmp_path: Path
) -> None:
    scripts = {role: {"bad": bad} for role, bad in script.items()}
    with stage(tmp_path, **scripts) as run:
        with pytest.raises(MinirlError, match=said):
            run.loop.run()
        steps = [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")]
        assert steps == [*range(1, num_steps + 1)] or script.keys() == {"rollout"}
        is_quiet = "dies" not in script.get("train", {})
        assert is_quiet or any("the last words of a rank" in note for note in run.notes.texts)


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


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_frozen_rank_or_a_run_in_which_nothing_moves_ends_with_a_report(
    is_frozen: bool, tmp_path: Path
) -> None:
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
def test_a_run_that_gets_no_reward_saves_what_there_is_and_stops(
    version: int, tmp_path: Path
) -> None:
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
        told = [text for text in run.notes.texts if text.startswith("no reward for")]
        assert 1 <= len(told) <= 3, "the 1st, 10th, 100th"


def test_a_prompt_that_kills_every_engine_is_dropped_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MAX_DEATHS", 99)
    with stage(tmp_path, rollout={"bad": {"deadly_prompt": 4}}) as run:
        run.run_and_check()
        assert run.buffer.drops[Drop.REFUSED] >= 1


@pytest.mark.parametrize("step", [3, STEPS])
def test_a_disk_that_is_full_costs_a_checkpoint_and_not_the_run(step: int, tmp_path: Path) -> None:
    with stage(tmp_path, train={"bad": {"unsaved": step}}) as run:
        run.loop.run()
        said = f"no checkpoint of step {step}: No space left"
        assert any(said in text for text in run.notes.texts)
        saved = {int(path.name[-6:]) for path in (tmp_path / "checkpoints").iterdir()}
        assert saved == {3, 6, STEPS} - {step} and run.loop.saved_step == max(saved)
        assert run.loop.save_error == ("No space left on device" if step == STEPS else "")


# The OOM hint -------------------------------------------------------------------------------------

SMOKE = Path(__file__).parent.parent / "recipes" / "smoke.toml"
CUDA_OOM = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …"
CPU_OOM = "RuntimeError: DefaultCPUAllocator: can't allocate memory"
NO_BLOCKS = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_…"
TOO_SMALL = "ValueError: To serve at least one request (1.75 GiB KV cache is needed, which …"
NO_ROOM = "Free memory on device cuda:0 (31.02/79.10 GiB) on startup is less than desired GPU …"
SAMPLER = "RuntimeError: CUDA out of memory occurred when warming up sampler with 512 dummy …"


@pytest.mark.parametrize(
    ("role", "words", "kind", "change"),
    [
        ("train", CUDA_OOM, "cuda", "train.max_tokens from 16384 to 8192"),
        ("train", CPU_OOM, "cpu", "train.max_tokens from 16384 to 8192"),
        ("train", CPU_OOM, "cuda", "train.batch_size from 32 to 16"),
        ("rollout", NO_BLOCKS, "cuda", "rollout.memory_fraction from 0.85 to 0.9"),
        ("rollout", TOO_SMALL, "cpu", "rollout.kv_cache_gib from 0.5 to 1.0"),
        ("rollout", NO_ROOM, "cuda", "rollout.memory_fraction from 0.85 to 0.36"),
        ("rollout", SAMPLER, "cuda", "rollout.max_num_seqs from 256 to 128"),
        ("rollout", CUDA_OOM, "cuda", "rollout.memory_fraction from 0.85 to 0.75"),
        ("rollout", CPU_OOM, "cpu", "rollout.kv_cache_gib from 0.5 to 0.25"),
        ("verify", "SIGKILL\nended by the kernel's OOM killer", "cpu", "train.batch_size from 32"),
    ],
)
def test_each_shortage_names_a_key_and_its_value(
    role: str, words: str, kind: str, change: str
) -> None:
    said = memory_hint(role, words, Config(), kind)
    assert f"change {change}" in said
    key, after = said.partition("change ")[2].split(" from ")[0], said.rpartition(" to ")[2]
    load(SMOKE, [f"{key}={after}"])  # what it says can be said: a recipe takes it
