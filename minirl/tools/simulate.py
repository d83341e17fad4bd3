"""A run in simulated time: the real buffer, admission control and dispatcher; all else only costs
time. No processes, no model, no clock.

Takes costs, the lengths of answers and a Buffer, gives throughput, idle shares and staleness:

    feed      as many groups as the buffer admits, each to the engine that the dispatcher picks
    learn     the trainer, when it is free, takes the batch that the buffer gives
    events    an engine's next sequence ends; a step is trained and published

Costs are linear. An engine step gives each running sequence one token. Decoding is bound by memory:
the step reads all weights once and the KV of every running sequence. Prefill (also of running
sequences after an update) and training are bound by compute.

Leaves out: evaluations, checkpoints, the time of rewards and of messages; a group that grows too
old is not aborted but dropped when it is done.
"""

import gc
import heapq
import math
import random
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from statistics import NormalDist, fmean

from minirl.buffer import Buffer
from minirl.errors import RecipeError
from minirl.records import Batch, Group, StopReason, Trajectory
from minirl.rollout.dispatch import Assignment, Dispatcher
from minirl.run_dir import RunDir

SIGMA = 0.7  # of the logarithm: the longest tenth is about six times as long as the shortest


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


@dataclass(frozen=True)
class Lengths:
    """Answers are drawn from `answers`, a sample of the distribution, with replacement."""

    answers: tuple[int, ...]
    prompt: int

    @cached_property
    def mean(self) -> float:
        return fmean(self.answers)

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
        is_short = long_tailed(middle, limit, prompt, num=512).mean < mean
        low, high = (middle, high) if is_short else (low, middle)
    return long_tailed(low, limit, prompt)


def of_run(run_dir: Path) -> Lengths:
    """What a run trained, all steps together."""
    groups = [group for line in RunDir(run_dir).batches for group in line["groups"]]
    if not groups:
        remedy = "name the directory of a run that has trained a step"
        raise RecipeError("--run", str(run_dir), "has no step in its batches.jsonl", remedy)
    answers = tuple(length for group in groups for length in group["lengths"])
    return Lengths(answers, round(fmean(group["prompt_tokens"] for group in groups)))


@dataclass(slots=True)
class Sequence:
    group_id: int
    prompt: int
    length: int
    started: float = 0.0  # the engine's counter
    versions: float = (
        0.0  # of its tokens, summed; while it runs, the engine's integral at its start
    )
    head_version: int = 0
    tail_version: int = 0

    @property
    def trajectory(self) -> Trajectory:
        whole, versions = self.prompt + self.length, (self.head_version, self.tail_version)
        return Trajectory(0, whole, self.length, StopReason.STOP, *versions)


class Engine:
    """All its sequences get a token with every step. So a sequence is done when the engine's token
    counter reaches the one at its start plus its length, and between two events the counter is
    advanced in closed form."""

    def __init__(self, costs: Costs, max_running: int, version: int = 0, recomputes: bool = True):
        self.costs, self.max_running, self.recomputes = costs, max_running, recomputes
        self.version = version
        self.now = 0.0
        self.idle_s = 0.0
        self.next_end_s = math.inf  # when the next sequence is done, if nothing happens before
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
        again = self._context * self.costs.prefill_per_token_s if self.recomputes else 0.0
        self._stand(self.costs.reload_s + again)

    def take_done(self, now: float) -> list[Sequence]:
        self.advance(now)
        done = []
        while self._running and self._running[0][0] <= self._counter + 1e-6:
            sequence = heapq.heappop(self._running)[2]
            self._context -= sequence.prompt + sequence.length
            mean = (self._versions - sequence.versions) / (self._counter - sequence.started)
            sequence.versions = mean * sequence.length
            sequence.tail_version = self.version
            done.append(sequence)
        self._admit()
        return done

    def _admit(self) -> None:
        prefill, last_group = 0, -1
        while self._waiting and len(self._running) < self.max_running:
            sequence = self._waiting.popleft()
            sequence.started, sequence.versions = self._counter, self._versions
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

    def _stand(self, seconds: float) -> None:
        self._stands_until = max(self.now, self._stands_until) + seconds
        self.next_end_s = math.inf
        if self._running:
            steps, num = max(0.0, self._running[0][0] - self._counter), len(self._running)
            self.next_end_s = self._stands_until + self.costs.steps_s(steps, num, self._context)


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
    num_tokens: int = 0  # written
    staleness: float = 0.0  # mean over those tokens
    staleness_max: int = 0
    trainer_idle_s: float = 0.0
    engines_idle_s: float = 0.0  # of all engines, since the beginning


@dataclass(frozen=True)
class Outcome:
    tokens_per_s: float
    trainer_idle: float
    engines_idle: float
    staleness_mean: float
    staleness_max: int
    num_groups: int


class Simulation:
    def __init__(self, setup: Setup, buffer: Buffer):
        self.setup, self.buffer = setup, buffer
        self.dispatcher = Dispatcher(setup.num_engines, setup.lengths.longest)
        args = (setup.costs, setup.max_running, buffer.version, setup.recomputes)
        self.engines = [Engine(*args) for _ in range(setup.num_engines)]
        self.dice = random.Random(setup.seed)
        self.now = self.free_since_s = 0.0
        self.trained_s = math.inf  # when the step in training ends
        self.assigned: dict[int, Assignment] = {}  # by group, while it runs
        self.done: dict[int, list[Sequence]] = defaultdict(list)  # by group
        self.steps: list[Step] = []
        self.num_groups = 0

    def run(self) -> Outcome:
        gc.disable()  # nothing here refers to itself; looking for it costs a fifth of the time
        try:
            while len(self.steps) < self.setup.num_steps:
                self.feed()
                self.learn()
                self.next_event()
        finally:
            gc.enable()
        return self.outcome()

    def feed(self) -> None:
        buffer, lengths, size = self.buffer, self.setup.lengths, self.setup.group_size
        needed = (self.setup.num_steps - len(self.steps)) * buffer.batch_size
        sent: dict[int, list[Sequence]] = defaultdict(list)
        for _ in range(buffer.num_to_admit(needed, buffer.version)):
            assigned = self.dispatcher.assign(size)
            group_id = buffer.admit(self.num_groups, buffer.version, self.now).group_id
            self.assigned[group_id] = assigned
            self.num_groups += 1
            drawn = self.dice.choices(lengths.answers, k=size)
            sent[assigned.engine] += [
                Sequence(group_id, lengths.prompt, length) for length in drawn
            ]
        for engine, sequences in sent.items():
            self.engines[engine].submit(sequences, self.now)

    def learn(self) -> None:
        if self.trained_s < math.inf:
            return
        for ticket in self.buffer.take_untrainable():
            del self.done[ticket.group_id]
        batch = self.buffer.next_batch(len(self.steps) + 1, self.now)
        if batch is not None:
            self.steps.append(self.step(batch))
            self.trained_s = self.steps[-1].ended_s

    def step(self, batch: Batch) -> Step:
        costs, eta = self.setup.costs, self.buffer.max_staleness
        trained = [s for group in batch.groups for s in self.done.pop(group.id)]
        num = sum([s.length for s in trained])
        num_prompt = self.setup.lengths.prompt * len(trained)
        mean = batch.version - sum([s.versions for s in trained]) / num
        oldest = batch.version - min([s.head_version for s in trained])
        ended_s = self.now + costs.train_fixed_s + costs.train_per_token_s * (num + num_prompt)
        # What is older is masked out, so it does not count.
        return Step(ended_s, num, min(mean, eta), min(oldest, eta), self.now - self.free_since_s)

    def next_event(self) -> None:
        engine = min(self.engines, key=attrgetter("next_end_s"))
        self.now = min(self.trained_s, engine.next_end_s)
        if self.now == self.trained_s:
            self.on_trained()
        else:
            for sequence in engine.take_done(self.now):
                self.on_sequence(sequence)

    def on_sequence(self, sequence: Sequence) -> None:
        group_id, group = sequence.group_id, self.done[sequence.group_id]
        self.dispatcher.trajectory_done(self.assigned[group_id], sequence.length)
        group.append(sequence)
        if len(group) == self.setup.group_size:
            del self.assigned[group_id]
            trajectories = tuple([s.trajectory for s in group])
            self.buffer.finish(Group(group_id, 0, trajectories, (0.0,) * len(group)), self.now)

    def on_trained(self) -> None:
        self.buffer.release(self.buffer.published(self.now))
        self.trained_s, self.free_since_s = math.inf, self.now
        for engine in self.engines:
            engine.reload(self.buffer.version, self.now)
        self.steps[-1].engines_idle_s = sum(engine.idle_s for engine in self.engines)

    def outcome(self) -> Outcome:
        num_warm = self.setup.num_warm
        counted = self.steps[num_warm:]
        began = self.steps[num_warm - 1] if num_warm else Step(0.0)
        seconds = counted[-1].ended_s - began.ended_s
        num_tokens = sum(step.num_tokens for step in counted)
        idle_s = counted[-1].engines_idle_s - began.engines_idle_s
        return Outcome(
            tokens_per_s=num_tokens / seconds,
            trainer_idle=sum(step.trainer_idle_s for step in counted) / seconds,
            engines_idle=idle_s / self.setup.num_engines / seconds,
            staleness_mean=sum(step.staleness * step.num_tokens for step in counted) / num_tokens,
            staleness_max=max(step.staleness_max for step in counted),
            num_groups=self.num_groups,
        )
