"""The rewards bench: what slow rewards cost generation.

    generation_cost   share of tokens/s that the engine loses when every reward takes 200 ms and one
                      in 100 hangs until its verifier is replaced, against rewards that take nothing

A real run, but for its trainer, which only sleeps and publishes: the real loop, vLLM with a tiny
model, real verifier processes. Within it the rewards are instant and slow by turns (I S I S … I), a
few steps each; each slow turn is compared with the two around it. The engine has its core for
itself, all others share the rest. Time that the engine waits for prompts counts, and time in which
other programs or a hypervisor kept it from its core does not.

A rented core changes its speed by more than the goal within seconds. So the engine's process does a
small piece of work again and again between its steps, and the engine's rate is counted in tokens
for the time that this takes: what slows both alike is the machine's, and cancels out. The raw rates
are reported beside it.
"""

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Any

from minirl.config import Config
from minirl.messages import Role, Started
from minirl.records import Drop, Example, Prompt
from minirl.rollout.engine import Engine, Sampling
from minirl.rollout.worker import Request, RolloutSetup, RolloutWorker
from minirl.shm.board import TOTALS, BoardWriter, State, Total
from minirl.shm.ring import TrajectoryRing
from minirl.shm.segment import Segment
from minirl.shm.weights import WeightStore
from minirl.tasks.verifier import VerifierSetup
from tests.bench import Figure, Options, at_most, median
from tests.bench.clock import now, stolen
from tests.bench.loop_harness import LoopRun, Prompts, Silent, run_loop
from tests.bench.models import SHAPES, Publisher
from tests.bench.processes import Processes, processes
from tests.bench.scripted import TrainerScript, serve_training
from tests.bench.slow_task import HANGS, SLOW_S, Phase, Switch, Work
from tests.bench.worker_harness import SEED, random_prompt

GOAL = 0.02
GAUGE_EVERY, GAUGE_TIMES = 8, 24  # engine turns; about 2 % of the engine's time
TASK = "tests.bench.slow_task:SlowTask"


@dataclass(frozen=True)
class Size:
    batch_size: int
    group_size: int
    num_seqs: int
    new_tokens: int
    num_verifiers: int
    turns: int  # slow ones; there is one instant turn more
    steps_per_turn: int
    steps_between: int  # not counted: what was graded in the turn before still runs
    eta: int = 5
    prompt_tokens: int = 32
    train_s: float = 0.05
    timeout_s: float = 2.0

    @property
    def num_steps(self) -> int:
        """The last ones do not count: no more groups are begun than the run needs."""
        turn = self.steps_per_turn + self.steps_between
        return (2 * self.turns + 1) * turn + self.eta + 2


SIZES = {
    "tiny": Size(8, 4, 32, 192, 24, turns=24, steps_per_turn=3, steps_between=2),
    "135m": Size(4, 4, 16, 48, 8, turns=2, steps_per_turn=2, steps_between=1),
}
QUICK = Size(2, 2, 4, 8, 2, turns=1, steps_per_turn=1, steps_between=1, timeout_s=0.5)


def measure(options: Options) -> list[Figure]:
    shape = SHAPES[options.model]
    size = QUICK if options.is_quick else SIZES[options.model]
    with processes(2 + size.num_verifiers) as here:
        folder = shape.write(here.folder / "model")
        _write_tokenizer(Path(folder), shape.vocab)
        switch = Switch(Segment(Switch.NUM_BYTES))
        conductor = Conductor(switch, size, here.rollout_place.cores)
        store = WeightStore(shape.table, "float32")
        with _on_cores(here.train_place.cores):
            buffer = _play(here, size, conductor, folder, store).buffer
    raw = {p: [work.tokens / work.seconds for work in conductor.turns[p]] for p in Phase}
    rates = {p: [work.tokens_per_gauge for work in conductor.turns[p]] for p in Phase}
    batch = {p: [work.tokens / work.steps for work in conductor.turns[p]] for p in Phase}
    costs, raw_costs = _costs(rates), _costs(raw)
    note = f"{1000 * SLOW_S:.0f} ms per reward, one in {HANGS} hangs"
    return [
        at_most("generation_cost", median(costs), GOAL, note),
        Figure("generation_cost_worst", max(costs), note=f"of {len(costs)} turns"),
        Figure("generation_cost_raw", median(raw_costs), note="with the machine's own changes"),
        Figure("instant_tokens_per_s", median(raw[Phase.INSTANT])),
        Figure(
            "slow_tokens_per_s", median(raw[Phase.SLOW]), note=f"{size.num_verifiers} verifiers"
        ),
        Figure("instant_batch_mean", fmean(batch[Phase.INSTANT]), note="sequences at once"),
        Figure("slow_batch_mean", fmean(batch[Phase.SLOW])),
        Figure("groups_timed_out", buffer.drops[Drop.REWARD_TIMEOUT], note="their verifiers too"),
        Figure("groups_trained", buffer.ledger.trained),
    ]


def _costs(rates: dict[Phase, list[float]]) -> list[float]:
    """Of each slow turn, against the two instant ones around it."""
    instant, slow = rates[Phase.INSTANT], rates[Phase.SLOW]
    pairs = zip(slow, instant, instant[1:], strict=False)
    return [1 - rate / ((before + after) / 2) for rate, before, after in pairs]


def _play(
    here: Processes, size: Size, conductor: "Conductor", folder: str, store: WeightStore
) -> LoopRun:
    config = _recipe(size, conductor.switch.segment.path)
    num_cells = config.num_slots * size.group_size + config.eval.num_prompts
    ring = TrajectoryRing(num_cells, config.max_tokens_per_trajectory)
    body = "tests.bench.rewards:{}".format
    script = PublishingScript(size.train_s, folder=folder, store=store)
    here.spawn(Role.TRAIN, body("trainer"), script, here.train_place)
    setup = RolloutSetup(config, folder, here.kind, SEED, ring, store)
    watched = EngineScript(setup, conductor.switch)
    here.spawn(Role.ROLLOUT, body("engine"), watched, here.rollout_place)
    aside = replace(here.train_place, env={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    for _ in range(size.num_verifiers):
        grader = VerifierSetup(config, folder, ring)
        here.spawn(Role.VERIFY, "minirl.tasks.verifier:run", grader, aside)
    prompts = RandomPrompts(size.prompt_tokens, vocab=300)
    return run_loop(config, here.workers, here.folder, conductor, prompts)


def _recipe(size: Size, switch: str) -> Config:
    base = Config()
    return replace(
        base,
        tasks=replace(
            base.tasks,
            kind=TASK,
            data=switch,
            verifiers=size.num_verifiers,
            timeout_s=size.timeout_s,
            max_prompt_tokens=size.prompt_tokens,
        ),
        rollout=replace(
            base.rollout,
            group_size=size.group_size,
            max_new_tokens=size.new_tokens,
            max_num_seqs=size.num_seqs,
            kv_cache_gib=0.25,
            on_update="keep",
        ),
        buffer=replace(base.buffer, max_staleness=size.eta, target_staleness=float(size.eta)),
        train=replace(base.train, steps=size.num_steps, batch_size=size.batch_size),
        eval=replace(base.eval, every=0, num_prompts=1),
        log=replace(base.log, samples=0),
    )


class Conductor(Silent):
    """A view that shows nothing: it turns the switch between steps and notes the rates."""

    def __init__(self, switch: Switch, size: Size, cores: tuple[int, ...]):
        self.switch, self.size, self._cores = switch, size, cores
        self.turns: dict[Phase, list[Work]] = {phase: [] for phase in Phase}
        self._before, self._stolen_before = Work(0.0, 0.0, 0.0), 0.0

    def step(self, line: dict[str, Any]) -> None:
        """After the steps between, a turn begins to count; after its steps it ends."""
        phase, size = self.switch.phase, self.size
        turn, place = divmod(int(line["step"]), size.steps_between + size.steps_per_turn)
        total = self.switch.total(phase)
        if turn > 2 * size.turns + 1:
            return
        if place == size.steps_between:
            self._before, self._stolen_before = total, stolen(self._cores)
        elif place == 0:
            done = total - self._before
            lost = stolen(self._cores) - self._stolen_before
            self.turns[phase].append(replace(done, seconds=done.seconds - lost))
            self.switch.phase = Phase.SLOW if phase is Phase.INSTANT else Phase.INSTANT
            if turn == 2 * size.turns + 1:
                self.switch.phase = Phase.INSTANT


class RandomPrompts(Prompts):
    """Each prompt has a number and tokens of its own."""

    def __init__(self, num_tokens: int, vocab: int) -> None:
        super().__init__()
        self._num_tokens, self._vocab = num_tokens, vocab
        self._dice = random.Random(SEED)

    def next(self) -> Prompt:
        self._next += 1
        tokens = tuple(random_prompt(self._dice, self._num_tokens, self._vocab))
        return Prompt(self._next - 1, Example(str(self._next), ""), tokens)


@contextmanager
def _on_cores(cores: tuple[int, ...]) -> Iterator[None]:
    """The controller too stays off the engine's core."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _write_tokenizer(folder: Path, vocab: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{i}": i for i in range(vocab)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


# -- the trainer and the engine, each in its process


@dataclass(frozen=True)
class PublishingScript(TrainerScript):
    folder: str = ""
    store: WeightStore | None = None


def trainer(script: PublishingScript, board: BoardWriter, pipe: Connection) -> None:
    """Sleeps for a step, and publishes as a real one does."""
    assert script.store is not None
    publisher = Publisher(pipe, script.folder, script.store)
    serve_training(script, board, pipe, publisher.publish)


@dataclass(frozen=True)
class EngineScript:
    setup: RolloutSetup
    switch: Switch


class Watched(RolloutWorker):
    """The worker as it is, with answers of different lengths and a clock."""

    switch: Switch
    dice: random.Random
    num_turns = 0

    def sampling(self, request: Request) -> Sampling:
        whole = super().sampling(request)
        shortest = max(1, whole.max_tokens // 2)
        return whole._replace(max_tokens=self.dice.randint(shortest, whole.max_tokens))

    def turn(self) -> None:
        phase, began, tokens, steps = self.switch.phase, now(), *self.done
        super().turn()
        after, seconds = self.done, now() - began
        work = Work(after[0] - tokens, seconds, after[1] - steps)
        self.num_turns += 1
        if self.num_turns % GAUGE_EVERY == 0:
            work = replace(work, gauge_s=gauge(), num_gauges=1.0)
        self.switch.add(phase, work)

    @property
    def done(self) -> tuple[float, float]:
        row = self.board._row
        return float(row[TOTALS + Total.TOKENS]), float(row[TOTALS + Total.STEPS])


def gauge() -> float:
    """CPU seconds for a piece of work like the engine's own."""
    import torch

    started = time.thread_time()
    hidden, weight = torch.ones(32, 128), torch.ones(128, 384)
    for _ in range(GAUGE_TIMES):
        (hidden @ weight).log_softmax(-1)
    return time.thread_time() - started


def engine(script: EngineScript, board: BoardWriter, pipe: Connection) -> None:
    setup = script.setup
    built = Engine(setup.config, setup.folder, setup.kind, setup.store, setup.seed)
    board.enter(State.RELOADING)
    built.reload()
    pipe.send(Started())
    worker = Watched(setup.config, built, setup.ring, board, pipe)
    worker.switch, worker.dice = script.switch, random.Random(SEED)
    worker.loop()
    built.shutdown()
