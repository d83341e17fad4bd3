"""A run in simulated time: the real buffer, admission control and dispatcher; all else only costs
time. No processes, no model, no clock.

Takes a recipe, costs and the lengths of answers, gives throughput and idle shares.
Costs are linear. An engine step gives each running sequence one token and reads all weights and
the KV of every running sequence, whose context is taken for its mean.

Leaves out: evaluations, checkpoints, the time of rewards and of messages; a group that grows too
old is not aborted but dropped when it is done.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from statistics import NormalDist, fmean
from typing import NamedTuple

from minirl.buffer import make_buffer
from minirl.config import Config
from minirl.records import Group, StopReason, Trajectory
from minirl.rollout.dispatch import Assignment, Dispatcher


class Costs(NamedTuple):  # in seconds
    step: float  # an engine step, however few sequences: weights through memory, launches
    step_per_seq: float = 0.0  # one sequence's token: its KV through memory, compute, sampling
    prefill: float = 0.0  # of one sequence's prompt, which its group shares
    reload: float = 0.0  # an engine stands still for new weights
    reload_per_seq: float = 0.0  # the KV of a running sequence, computed again under them
    train: float = 0.0  # a training step: optimizer, gradient sums, publication
    train_per_token: float = 0.0  # of the whole training pool
    prompts_per_answer: float = 1.0  # that are trained; fewer where a group shares its prompt


class Lengths(NamedTuple):
    """Answers are drawn from `answers`, a sample of the distribution, with replacement."""

    answers: tuple[int, ...]
    prompt: int

    @property
    def mean_tokens(self) -> float:
        """Of a whole trajectory."""
        return self.prompt + fmean(self.answers)

    @property
    def mean_context(self) -> float:
        """Of a running sequence, over time: the longer ones run longer."""
        return self.prompt + sum(n * n for n in self.answers) / (2 * sum(self.answers))


def long_tailed(mean: float, limit: int, prompt: int) -> Lengths:
    """A lognormal cut at the limit, as answers of reasoning models are, with this mean after the
    cut: its quantiles in equal steps, so the same sample every time."""
    # Of the logarithm: the longest tenth is about six times as long as the shortest.
    normal, num, scale = NormalDist(sigma=0.7), 1024, mean
    quantiles = [math.exp(normal.inv_cdf((i + 0.5) / num)) for i in range(num)]
    for _ in range(30):  # the cut takes from the mean
        answers = tuple(max(1, min(limit, round(scale * q))) for q in quantiles)
        scale *= mean / fmean(answers)
    return Lengths(answers, prompt)


class SimulatedEngine:
    """Each step gives every running sequence one token. So a sequence ends when the engine's count
    of steps reaches that of its start plus its length, and the count advances in closed form."""

    def __init__(self, costs: Costs, max_running: int):
        self.costs, self.max_running = costs, max_running
        self.version, self.now, self.idle_s = 0, 0.0, 0.0
        self.next_end_s = math.inf  # when the next sequence ends, if nothing happens before
        # Until when steps are counted: later than `now` while it prefills or reloads.
        self._steps, self._counted_s = 0.0, 0.0
        # A heap of (step of its last token, group, length, version of its first token).
        self._running: list[tuple[int, int, int, int]] = []
        self._waiting: deque[tuple[int, int]] = deque()  # group and length

    def advance(self, now: float) -> None:
        if not self._running:
            self.idle_s += now - self.now
        elif now > self._counted_s:
            self._steps += (now - self._counted_s) / self.step_s
        self.now, self._counted_s = now, max(now, self._counted_s)

    @property
    def step_s(self) -> float:
        return self.costs.step + len(self._running) * self.costs.step_per_seq

    def submit(self, sequences: Iterable[tuple[int, int]], now: float) -> None:
        self.advance(now)
        self._waiting.extend(sequences)
        self._admit()

    def reload(self, version: int, now: float) -> None:
        """New weights between two steps; what runs has its KV computed again under them."""
        self.advance(now)
        self.version = version
        self._admit(self.costs.reload + len(self._running) * self.costs.reload_per_seq)

    def take_done(self, now: float) -> list[tuple[int, Trajectory]]:
        """By group."""
        self.advance(now)
        done = []
        while self._running and self._running[0][0] <= self._steps + 1e-6:
            _, group_id, length, head = heapq.heappop(self._running)
            trajectory = Trajectory(0, length, length, StopReason.STOP, head, self.version)
            done.append((group_id, trajectory))
        self._admit()
        return done

    def _admit(self, pause_s: float = 0.0) -> None:
        num_before = len(self._running)
        while self._waiting and len(self._running) < self.max_running:
            group_id, length = self._waiting.popleft()
            # From the next whole step on: then many end with the same step, as in an engine.
            end = math.ceil(self._steps) + length
            heapq.heappush(self._running, (end, group_id, length, self.version))
        self._counted_s += pause_s + (len(self._running) - num_before) * self.costs.prefill
        self.next_end_s = math.inf
        if self._running:
            num_steps = max(0.0, self._running[0][0] - self._steps)
            self.next_end_s = self._counted_s + num_steps * self.step_s


class Throughput(NamedTuple):
    tokens_per_s: float
    trainer_idle: float
    engines_idle: float


class Simulation:
    def __init__(self, config: Config, costs: Costs, lengths: Lengths, max_running: int):
        """`max_running`: sequences that one engine decodes at once."""
        self.costs, self.lengths, self.group_size = costs, lengths, config.rollout.group_size
        self.buffer = make_buffer(config)
        num_engines = config.num_nodes * config.devices.rollout // config.devices.tensor_parallel
        self.dispatcher = Dispatcher(num_engines, max(lengths.answers))
        self.engines = [SimulatedEngine(costs, max_running) for _ in range(num_engines)]
        self.dice = random.Random(0)
        self.now = self.free_since_s = 0.0  # seconds
        self.trained_s = math.inf  # when the step in training ends
        # Groups: where each runs, and those of its trajectories that are done.
        self.running: dict[int, tuple[Assignment, list[Trajectory]]] = {}
        self.num_groups = 0

    def run(self, num_steps: int, num_warm: int = 0) -> Throughput:
        """The first `num_warm` steps do not count."""
        for end in (num_warm, num_steps):
            began_s, self.trainer_idle_s, self.num_tokens = self.now, 0.0, 0
            for engine in self.engines:
                engine.idle_s = 0.0
            while self.buffer.version < end:
                self.feed((num_steps - self.buffer.version) * self.buffer.batch_size)
                self.learn()
                self.next_event()
        idle_s = self.trainer_idle_s, fmean(engine.idle_s for engine in self.engines)
        return Throughput(*(total / (self.now - began_s) for total in (self.num_tokens, *idle_s)))

    def feed(self, needed: int) -> None:
        """As many groups as the buffer admits, each to the engine that the dispatcher picks."""
        buffer, size = self.buffer, self.group_size
        for _ in range(buffer.num_to_admit(needed, buffer.version)):
            assigned = self.dispatcher.assign(size)
            group_id = buffer.admit(self.num_groups, buffer.version, self.now).group_id
            self.running[group_id] = (assigned, [])
            self.num_groups += 1
            drawn = self.dice.choices(self.lengths.answers, k=size)
            self.engines[assigned.engine].submit([(group_id, n) for n in drawn], self.now)

    def learn(self) -> None:
        """The trainer, when it is free, takes the batch that the buffer gives."""
        if self.trained_s < math.inf:
            return
        self.buffer.take_untrainable()
        if batch := self.buffer.next_batch(self.buffer.version + 1, self.now):
            self.trainer_idle_s += self.now - self.free_since_s
            written = [t.num_written for group in batch.groups for t in group.trajectories]
            self.num_tokens += sum(written)
            num_prompts = self.costs.prompts_per_answer * len(written)
            num_trained = sum(written) + self.lengths.prompt * num_prompts
            self.trained_s = self.now + self.costs.train + self.costs.train_per_token * num_trained

    def next_event(self) -> None:
        engine = min(self.engines, key=attrgetter("next_end_s"))
        self.now = min(self.trained_s, engine.next_end_s)
        if self.now == self.trained_s:
            self.buffer.release(self.buffer.published(self.now))
            self.trained_s, self.free_since_s = math.inf, self.now
            for engine in self.engines:
                engine.reload(self.buffer.version, self.now)
            return
        for group_id, trajectory in engine.take_done(self.now):
            assigned, done = self.running[group_id]
            self.dispatcher.trajectory_done(assigned, trajectory.num_written)
            done.append(trajectory)
            if len(done) == self.group_size:
                del self.running[group_id]
                self.buffer.finish(Group(group_id, 0, tuple(done), (0.0,) * len(done)), self.now)
