"""A run in simulated time: the real buffer, admission control and dispatcher; all else only costs
time. No processes, no model, no clock.

Takes costs, the lengths of answers and a Buffer, gives throughput, idle shares and staleness:

    feed      as many groups as the buffer admits, each to the engine that the dispatcher picks
    learn     the trainer, when it is free, takes the batch that the buffer gives
    events    an engine's next sequence ends; a step is trained and published

Costs are linear. An engine step gives each running sequence one token. Decoding is bound by memory:
the step reads all weights once and the KV of every running sequence; each sequence adds a little
compute and bookkeeping. Prefill (also of running sequences after an update) and training are bound
by compute.

Leaves out: evaluations, checkpoints, the time of rewards and of messages.
"""

import gc
import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import NormalDist, fmean

from minirl.buffer import Buffer, Drop
from minirl.errors import RecipeError
from minirl.records import Batch, Group, StopReason, Trajectory
from minirl.rollout.dispatch import Dispatcher
from minirl.run_dir import read_lines

SIGMA = 0.7  # of the logarithm: the longest tenth is about six times as long as the shortest
TRAINED = -1  # the event that is no engine's
ENDLESS = 2**62  # a version that never comes
CUT, ENDED = StopReason.LENGTH, StopReason.STOP


@dataclass(frozen=True)
class Costs:
    step_s: float  # an engine step, however few sequences: weights through memory, launches
    step_per_seq_s: float = 0.0  # one sequence's token: compute, sampling, bookkeeping
    step_per_context_s: float = 0.0  # reading one token's KV
    prefill_per_token_s: float = 0.0
    reload_s: float = 0.0  # an engine stands still for new weights
    train_per_token_s: float = 0.0  # of the whole training pool
    train_fixed_s: float = 0.0  # a training step: optimizer, gradient sums, publication

    def steps_s(self, num_steps: float, num_seqs: int, context: float) -> float:
        """The time of so many engine steps: each adds one token per sequence to the context."""
        grown = num_steps * context + num_seqs * num_steps * num_steps / 2
        return num_steps * self.base_s(num_seqs) + self.step_per_context_s * grown

    def steps_in(self, seconds: float, num_seqs: int, context: float) -> float:
        """The inverse of `steps_s`."""
        slope = self.base_s(num_seqs) + self.step_per_context_s * context
        bend = self.step_per_context_s * num_seqs
        if bend * seconds < 1e-9 * slope * slope:
            return seconds / slope
        return (-slope + (slope * slope + 2 * bend * seconds) ** 0.5) / bend

    def base_s(self, num_seqs: int) -> float:
        return self.step_s + num_seqs * self.step_per_seq_s

    def train_s(self, num_tokens: int) -> float:
        return self.train_fixed_s + num_tokens * self.train_per_token_s


@dataclass(frozen=True)
class Lengths:
    """Answers are drawn from `answers`, a sample of the distribution, with replacement."""

    answers: tuple[int, ...]
    prompt: int

    def draw(self, dice: random.Random) -> int:
        return self.answers[int(dice.random() * len(self.answers))]

    @cached_property
    def mean(self) -> float:
        return sum(self.answers) / len(self.answers)

    @cached_property
    def longest(self) -> int:
        return max(self.answers)


def long_tailed(median: float, limit: int, prompt: int, num: int = 4096) -> Lengths:
    """A lognormal cut at the limit, as answers of reasoning models are: its quantiles in equal
    steps, so the same sample every time."""
    normal = NormalDist(sigma=SIGMA)
    drawn = (median * math.exp(normal.inv_cdf((i + 0.5) / num)) for i in range(num))
    return Lengths(tuple(max(1, min(limit, round(length))) for length in drawn), prompt)


def with_mean(mean: float, limit: int, prompt: int) -> Lengths:
    """The same, by its mean after the cut."""
    low, high = 1.0, float(limit) * 4
    for _ in range(30):
        middle = (low + high) / 2
        if long_tailed(middle, limit, prompt, num=512).mean < mean:
            low = middle
        else:
            high = middle
    return long_tailed(low, limit, prompt)


def of_run(run_dir: Path) -> Lengths:
    """What a run trained, all steps together."""
    path = run_dir / "batches.jsonl"
    if not path.is_file():
        rule = "has no batches.jsonl"
        raise RecipeError("--run", str(run_dir), rule, "name the directory of a run with steps")
    groups = [group for line in read_lines(path) for group in line["groups"]]
    if not groups:
        raise RecipeError("--run", str(run_dir), "has no trained step", "let it train one")
    answers = tuple(length for group in groups for length in group["lengths"])
    return Lengths(answers, round(fmean(group["prompt_tokens"] for group in groups)))


@dataclass(slots=True)
class Sequence:
    group_id: int
    prompt: int
    length: int
    started: float = 0.0  # the engine's counter
    started_versions: float = 0.0  # the engine's integral
    head_version: int = 0
    tail_version: int = 0
    mean_version: float = 0.0


class Engine:
    """All its sequences get a token with every step. So a sequence is done when the engine's token
    counter reaches the one at its start plus its length, and between two events the counter is
    advanced in closed form."""

    def __init__(self, costs: Costs, max_running: int, version: int = 0, recomputes: bool = True):
        self.costs, self.max_running, self.recomputes = costs, max_running, recomputes
        self.version = version
        self.now = 0.0
        self.idle_s = 0.0
        self.stamp = 0  # grows when what comes next has changed
        self._stands_until = 0.0  # prefilling or reloading
        self._counter = 0.0  # tokens that a sequence which ran from the beginning would have
        self._versions = 0.0  # integral of the version over the counter
        self._context = 0.0  # tokens in the KV cache
        self._running: list[tuple[float, int, Sequence]] = []  # by the counter at which it ends
        self._waiting: deque[Sequence] = deque()
        self._next_key = 0

    def advance(self, now: float) -> None:
        if not self._running:
            self.idle_s += now - self.now
        elif now > (since := max(self.now, self._stands_until)):
            num = len(self._running)
            steps = self.costs.steps_in(now - since, num, self._context)
            self._counter += steps
            self._versions += steps * self.version
            self._context += steps * num
        self.now = now

    def submit(self, sequences: list[Sequence], now: float) -> None:
        self.advance(now)
        self._waiting.extend(sequences)
        self._admit()

    def reload(self, version: int, now: float) -> None:
        """New weights between two steps; what runs has its KV computed again under them."""
        self.advance(now)
        self.version = version
        pause = self.costs.reload_s
        if self.recomputes:
            pause += self._context * self.costs.prefill_per_token_s
        self._stand(pause)

    def _stand(self, seconds: float) -> None:
        self._stands_until = max(self.now, self._stands_until) + seconds
        self.stamp += 1

    def _admit(self) -> None:
        prefill = 0
        last_group = -1
        while self._waiting and len(self._running) < self.max_running:
            sequence = self._waiting.popleft()
            sequence.started, sequence.started_versions = self._counter, self._versions
            sequence.head_version = self.version
            # From the next whole step on: then many end with the same step, as in an engine.
            entry = (math.ceil(self._counter) + sequence.length, self._next_key, sequence)
            heapq.heappush(self._running, entry)
            self._next_key += 1
            self._context += sequence.prompt
            if sequence.group_id != last_group:  # a group shares its prompt's KV
                prefill += sequence.prompt
                last_group = sequence.group_id
        self._stand(prefill * self.costs.prefill_per_token_s)

    @property
    def next_end_s(self) -> float | None:
        """When the next sequence is done, if nothing happens before."""
        if not self._running:
            return None
        steps = max(0.0, self._running[0][0] - self._counter)
        since = max(self.now, self._stands_until)
        return since + self.costs.steps_s(steps, len(self._running), self._context)

    def take_done(self, now: float) -> list[Sequence]:
        self.advance(now)
        done = []
        while self._running and self._running[0][0] <= self._counter + 1e-6:
            done.append(self._end(heapq.heappop(self._running)[2]))
        self._admit()
        return done

    def _end(self, sequence: Sequence) -> Sequence:
        self._context -= sequence.prompt + sequence.length
        sequence.tail_version = self.version
        grown = self._versions - sequence.started_versions
        sequence.mean_version = grown / max(1e-9, self._counter - sequence.started)
        return sequence

    def abort(self, group_id: int, now: float) -> None:
        self.advance(now)
        for _, _, sequence in self._running:
            if sequence.group_id == group_id:
                self._context -= sequence.prompt + self._counter - sequence.started
        self._running = [e for e in self._running if e[2].group_id != group_id]
        heapq.heapify(self._running)
        self._waiting = deque(s for s in self._waiting if s.group_id != group_id)
        self._admit()


@dataclass(frozen=True)
class Setup:
    costs: Costs
    lengths: Lengths
    num_engines: int
    max_running: int  # sequences that one engine decodes at once
    group_size: int
    num_steps: int
    num_warm: int = 0  # first steps that do not count
    recomputes: bool = True
    seed: int = 0


@dataclass
class Step:
    """What one training step was made of."""

    ended_s: float
    num_tokens: int  # written
    staleness: float  # mean over those tokens
    staleness_max: int
    trainer_idle_s: float
    engines_idle_s: float = 0.0  # of all engines, since the beginning


@dataclass(frozen=True)
class Outcome:
    tokens_per_s: float
    seconds: float
    trainer_idle: float
    engines_idle: float
    staleness_mean: float
    staleness_max: int
    num_groups: int


@dataclass(slots=True)
class Sampling:
    engine: int
    head: int = ENDLESS  # the oldest version that began one of its sequences
    done: list[Trajectory] = field(default_factory=list)
    num_tokens: int = 0
    versions: float = 0.0  # of all tokens, summed


class Simulation:
    def __init__(self, setup: Setup, buffer: Buffer):
        self.setup, self.buffer = setup, buffer
        self.longest = setup.lengths.longest
        self.dispatcher = Dispatcher(setup.num_engines, self.longest)
        self.engines = [
            Engine(setup.costs, setup.max_running, buffer.version, setup.recomputes)
            for _ in range(setup.num_engines)
        ]
        self.dice = random.Random(setup.seed)
        self.now = 0.0
        self.events: list[tuple[float, int, int]] = []  # time, engine or TRAINED, stamp
        self.sampling: dict[int, Sampling] = {}
        self.written: dict[int, Sampling] = {}  # of groups that are done
        self.batch: Batch | None = None
        self.free_since_s = 0.0
        self.steps: list[Step] = []
        self.num_prompts = 0

    def run(self) -> Outcome:
        was_collecting = gc.isenabled()
        gc.disable()  # nothing here refers to itself; looking for it costs a fifth of the time
        try:
            while len(self.steps) < self.setup.num_steps:
                self.feed()
                self.learn()
                self.next_event()
        finally:
            if was_collecting:
                gc.enable()
        return self.outcome()

    def feed(self) -> None:
        needed = (self.setup.num_steps - len(self.steps)) * self.buffer.batch_size
        sent: dict[int, list[Sequence]] = {}
        lengths = self.setup.lengths
        for _ in range(self.buffer.num_to_begin(needed)):
            if not self.buffer.can_admit(self.buffer.version):
                break
            engine = self.dispatcher.assign(self.buffer.next_id, self.setup.group_size)
            ticket = self.buffer.admit(self.num_prompts, self.buffer.version, self.now)
            self.num_prompts += 1
            self.sampling[ticket.group_id] = Sampling(engine)
            queue = sent.setdefault(engine, [])
            for _ in range(self.setup.group_size):
                length = lengths.draw(self.dice)
                queue.append(Sequence(ticket.group_id, lengths.prompt, length))
        for engine, sequences in sent.items():
            self.engines[engine].submit(sequences, self.now)
            self.expect(engine)

    def expect(self, engine: int) -> None:
        at = self.engines[engine].next_end_s
        if at is not None:
            heapq.heappush(self.events, (at, engine, self.engines[engine].stamp))

    def next_event(self) -> None:
        while True:
            self.now, engine, stamp = heapq.heappop(self.events)
            if engine == TRAINED:
                self.on_trained()
                return
            if stamp == self.engines[engine].stamp:
                for sequence in self.engines[engine].take_done(self.now):
                    self.on_sequence(sequence)
                self.expect(engine)
                return

    def on_sequence(self, sequence: Sequence) -> None:
        group_id, length, head = sequence.group_id, sequence.length, sequence.head_version
        self.dispatcher.trajectory_done(group_id, length)
        group = self.sampling[group_id]
        stop = CUT if length >= self.longest else ENDED
        whole = sequence.prompt + length
        group.done.append(Trajectory(0, whole, length, stop, head, sequence.tail_version))
        if head < group.head:
            group.head = head
        group.num_tokens += length
        group.versions += length * sequence.mean_version
        if len(group.done) == self.setup.group_size:
            self.written[group_id] = self.sampling.pop(group_id)
            rewards = (0.0,) * len(group.done)
            self.buffer.finish(Group(group_id, 0, tuple(group.done), rewards), self.now)

    def learn(self) -> None:
        for group_id in self.buffer.expired():
            group = self.sampling.pop(group_id)
            self.dispatcher.forget(group_id)
            self.buffer.drop(group_id, Drop.STALE)
            self.engines[group.engine].abort(group_id, self.now)
            self.expect(group.engine)
        if self.batch is not None:
            return
        for ticket in self.buffer.take_untrainable():
            del self.written[ticket.group_id]
        self.batch = self.buffer.next_batch(len(self.steps) + 1, self.now)
        if self.batch is not None:
            tokens = sum(t.length for group in self.batch.groups for t in group.trajectories)
            ends = self.now + self.setup.costs.train_s(tokens)
            heapq.heappush(self.events, (ends, TRAINED, 0))
            self.steps.append(self.step(self.batch, ends))

    def step(self, batch: Batch, ended_s: float) -> Step:
        eta = self.buffer.max_staleness
        written = [self.written.pop(group.id) for group in batch.groups]
        num = sum(group.num_tokens for group in written)
        mean = batch.version - sum(group.versions for group in written) / num
        oldest = batch.version - min([group.head for group in written])
        # What is older is masked out, so it does not count.
        return Step(ended_s, num, min(mean, eta), min(oldest, eta), self.now - self.free_since_s)

    def on_trained(self) -> None:
        self.buffer.published(self.now)
        self.batch = None
        self.free_since_s = self.now
        for i, engine in enumerate(self.engines):
            engine.reload(self.buffer.version, self.now)
            self.expect(i)
        self.steps[-1].engines_idle_s = sum(engine.idle_s for engine in self.engines)

    def outcome(self) -> Outcome:
        num_warm = self.setup.num_warm
        counted = self.steps[num_warm:]
        began = self.steps[num_warm - 1] if num_warm else Step(0.0, 0, 0.0, 0, 0.0)
        seconds = counted[-1].ended_s - began.ended_s
        num_tokens = sum(step.num_tokens for step in counted)
        idle_s = counted[-1].engines_idle_s - began.engines_idle_s
        return Outcome(
            tokens_per_s=num_tokens / seconds,
            seconds=seconds,
            trainer_idle=sum(step.trainer_idle_s for step in counted) / seconds,
            engines_idle=idle_s / self.setup.num_engines / seconds,
            staleness_mean=sum(step.staleness * step.num_tokens for step in counted) / num_tokens,
            staleness_max=max(step.staleness_max for step in counted),
            num_groups=self.num_prompts,
        )
