"""The events of a run, in simulated time, and what comes out: throughput, idle shares, staleness.

    feed      as many groups as the buffer says, each to the engine that the dispatcher says
    learn     what the buffer gives is trained, when the trainer is free
    events    an engine's next sequence ends; a step is trained and published

The decisions are those of the real Buffer, Pace and Dispatcher; here is only what costs time.
Leaves out: evaluations, checkpoints, the time of rewards and of messages.
"""

import gc
import heapq
import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from minirl.buffer import Buffer, Drop
from minirl.records import Batch, Group, StopReason, Trajectory
from minirl.rollout.dispatch import Dispatcher
from minirl.tools.simulate.costs import Costs
from minirl.tools.simulate.engine import Engine, Sequence
from minirl.tools.simulate.lengths import Lengths

TRAINED = -1  # the event that is no engine's
ENDLESS = 2**62  # a version that never comes
CUT, ENDED = StopReason.LENGTH, StopReason.STOP


@dataclass(frozen=True)
class Setup:
    costs: Costs
    lengths: Lengths
    num_engines: int
    max_running: int  # sequences that one engine decodes at once
    group_size: int
    num_steps: int
    num_warm: int = 0  # first steps that do not count
    filtered: float = 0.0  # share of groups that a filter drops
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
    engines_idle_s: float  # of all engines, since the beginning


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
    head: int  # the oldest version that began one of its sequences
    done: list[Trajectory] = field(default_factory=list)
    num_tokens: int = 0
    versions: float = 0.0  # of all tokens, summed


class Simulation:
    def __init__(self, setup: Setup, buffer: Buffer):
        self.setup, self.buffer = setup, buffer
        self.dispatcher = Dispatcher(setup.num_engines, setup.lengths.longest)
        self.engines = [
            Engine(setup.costs, setup.max_running, buffer.version, setup.recomputes)
            for _ in range(setup.num_engines)
        ]
        self.dice, self.longest = random.Random(setup.seed), setup.lengths.longest
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
                self.happen()
        finally:
            if was_collecting:
                gc.enable()
        return outcome(self.steps, self.setup.num_warm, self.setup.num_engines, self.num_prompts)

    def feed(self) -> None:
        needed = (self.setup.num_steps - len(self.steps)) * self.buffer.batch_size
        count = self.buffer.num_to_begin(needed)
        if not count:
            return
        sent: dict[int, list[Sequence]] = {}
        lengths = self.setup.lengths
        for _ in range(count):
            if not self.buffer.can_admit(self.buffer.version):
                break
            engine = self.dispatcher.assign(self.buffer.next_id, self.setup.group_size)
            ticket = self.buffer.admit(self.num_prompts, self.buffer.version, self.now)
            self.num_prompts += 1
            self.sampling[ticket.group_id] = Sampling(engine, ENDLESS)
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

    def happen(self) -> None:
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
        group_id, setup, length = sequence.group_id, self.setup, sequence.length
        self.dispatcher.trajectory_done(group_id, length)
        group = self.sampling[group_id]
        stop = CUT if length >= self.longest else ENDED
        head = sequence.head_version
        whole = sequence.prompt + length
        group.done.append(Trajectory(0, whole, length, stop, head, sequence.tail_version))
        if head < group.head:
            group.head = head
        group.num_tokens += length
        group.versions += length * sequence.mean_version
        if len(group.done) < setup.group_size:
            return
        del self.sampling[group_id]
        if setup.filtered and self.dice.random() < setup.filtered:
            self.buffer.drop(group_id, Drop.EQUAL_REWARDS)
            return
        self.written[group_id] = group
        trajectories = tuple(group.done)
        rewards = (0.0,) * len(trajectories)
        self.buffer.finish(Group(group_id, 0, trajectories, rewards), self.now)

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
            idle = self.now - self.free_since_s
            self.steps.append(self.step(self.batch, ends, idle))

    def step(self, batch: Batch, ended_s: float, idle_s: float) -> Step:
        eta = self.buffer.max_staleness
        written = [self.written.pop(group.id) for group in batch.groups]
        num = sum(group.num_tokens for group in written)
        mean = batch.version - sum(group.versions for group in written) / num
        oldest = batch.version - min([group.head for group in written])
        # What is older is masked out, so it does not count.
        return Step(ended_s, num, min(mean, eta), min(oldest, eta), idle_s, 0.0)

    def on_trained(self) -> None:
        self.buffer.published(self.now)
        self.batch = None
        self.free_since_s = self.now
        for i, engine in enumerate(self.engines):
            engine.reload(self.buffer.version, self.now)
            self.expect(i)
        self.steps[-1].engines_idle_s = sum(engine.idle_s for engine in self.engines)


def outcome(steps: SequenceOf[Step], num_warm: int, num_engines: int, groups: int) -> Outcome:
    counted = steps[num_warm:]
    began = steps[num_warm - 1] if num_warm else Step(0.0, 0, 0.0, 0, 0.0, 0.0)
    seconds = counted[-1].ended_s - began.ended_s
    num_tokens = sum(step.num_tokens for step in counted)
    engines_idle_s = counted[-1].engines_idle_s - began.engines_idle_s
    return Outcome(
        tokens_per_s=num_tokens / seconds,
        seconds=seconds,
        trainer_idle=sum(step.trainer_idle_s for step in counted) / seconds,
        engines_idle=engines_idle_s / num_engines / seconds,
        staleness_mean=sum(step.staleness * step.num_tokens for step in counted) / num_tokens,
        staleness_max=max(step.staleness_max for step in counted),
        num_groups=groups,
    )
