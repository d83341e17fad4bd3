"""The buffer under random histories: every rule holds after every event.

`World` drives a buffer with engines that lag, pinned evaluations, filters, a pace, deaths, trainers
that go back to their checkpoint, and resumes in the middle; nothing of it has a process or a clock.
"""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_buffer import trajectory

from minirl.buffer import Buffer, Drop, History, Ledger, OnStale, Ticket, republished_as
from minirl.pace import AUTO, Pace
from minirl.records import Batch, Group


@dataclass
class Engine:
    """Serves a version that may lag behind the newest; an evaluation pins it where it is."""

    version: int
    is_pinned: bool = False


@dataclass
class Running:
    ticket: Ticket
    engine: Engine
    tokens: list[list[int]]  # of each trajectory, the versions of its tokens so far
    is_ready: bool = False


@dataclass
class Checkpoint:
    history: History
    consumed: set[int]
    trained_ids: set[int]
    lineage: tuple[int, ...]  # of the weights

    @property
    def num_submitted(self) -> int:
        return self.history.trained + sum(self.history.drops.values())


class World:
    """Engines, verifiers and a trainer around a buffer, and what must be true of it."""

    def __init__(self, batch_size: int, max_staleness: int, on_stale: OnStale, seed: int):
        self.random = random.Random(seed)
        self.now = 0.0
        self.target = self.random.choice([None, AUTO, AUTO, 0.0, 0.5, float(max_staleness)])
        self.filtered_share = self.random.choice([0.0, 0.0, 0.3, 0.8])
        self.buffer = self.new_buffer(batch_size, max_staleness, on_stale, History())
        self.engines = [Engine(0) for _ in range(self.random.randint(1, 3))]
        self.group_size = self.random.randint(1, 3)
        self.groups: dict[int, Running] = {}  # running and ready
        self.training: list[Ticket] = []
        self.batch: Batch | None = None
        self.again: list[int] = []
        self.next_prompt = 0
        self.consumed: set[int] = set()
        self.trained_ids: set[int] = set()
        self.num_submitted = self.num_trained = 0
        self.drops: Counter[Drop] = Counter()
        self.lineage: dict[int, tuple[int, ...]] = {0: ()}  # of each version: its updates, in order
        self.num_updates = self.base = 0
        self.unsaved: list[Ticket] = []  # trained since the checkpoint
        self.saved = self.checkpoint()
        self.seen: Counter[str] = Counter()  # what this history really went through
        self.events = [
            (self.admit, 8),
            (self.write_tokens, 8),
            (self.finish_one, 8),
            (self.learn, 8),
            (self.publish, 6),
            (self.drop_one, 1),
            (self.pin_or_unpin, 1),
            (self.kill_engine, 0.3),
            (self.go_back, 0.4),
            (self.save, 0.5),
            (self.resume, 0.15),
            (self.finish_all_and_train, 0.3),
        ]

    def new_buffer(
        self, batch_size: int, max_staleness: int, on_stale: OnStale, history: History
    ) -> Buffer:
        num_slots = (max_staleness + 1) * batch_size
        pace = None if self.target is None else Pace(batch_size, num_slots, self.target)
        return Buffer(batch_size, max_staleness, on_stale, history, pace)

    def run(self, num_events: int) -> None:
        names, weights = zip(*self.events, strict=True)
        for event in self.random.choices(names, weights, k=num_events):
            self.now += self.random.expovariate(1.0)
            event()
            self.check()
        self.finish_all_and_train()
        self.check()

    # -- what happens

    def admit(self) -> None:
        for _ in range(self.random.randint(1, self.buffer.num_slots)):
            if not self.buffer.room:
                self.seen["held back"] += self.buffer.num_free > 0
                return
            engine = self.random.choice(self.engines)
            newest = self.buffer.version
            bound = min(engine.version, newest) if engine.is_pinned else newest
            if not self.buffer.can_admit(bound):
                assert bound < newest
                return
            index = self.again.pop() if self.again else self.next_prompt
            self.next_prompt = max(self.next_prompt, index + 1)
            group_id = self.buffer.next_id
            ticket = self.buffer.admit(index, bound, self.now)
            assert ticket.group_id == group_id and group_id not in self.groups
            self.groups[group_id] = Running(ticket, engine, [[] for _ in range(self.group_size)])
            self.num_submitted += 1
            self.seen["old head bound"] += bound < newest

    def write_tokens(self) -> None:
        """Engines step; some load the newest weights first. A group is never begun under older
        weights than those that were newest at its dispatch."""
        for engine in self.engines:
            is_due = any(g.ticket.head_bound > engine.version for g in self.running(engine))
            if is_due or (not engine.is_pinned and self.random.random() < 0.5):
                engine.version = self.buffer.version
            for group in self.running(engine):
                for versions in group.tokens:
                    if self.random.random() < 0.6:  # some wait, some are slow
                        versions.append(engine.version)

    def running(self, engine: Engine | None = None) -> list[Running]:
        groups = [g for g in self.groups.values() if not g.is_ready]
        return [g for g in groups if engine is None or g.engine is engine]

    def finish_one(self) -> None:
        running = self.running()
        if running:
            # Mostly the newest: so that old ones straggle.
            place = int(len(running) * self.random.random() ** 0.4)
            if self.random.random() < self.filtered_share:
                filters = (Drop.EQUAL_REWARDS, Drop.TRUNCATED, Drop.REWARD_ERROR)
                self.drop(running[place].ticket.group_id, self.random.choice(filters))
                self.seen["filtered"] += 1
            else:
                self.finish(running[place])

    def finish(self, group: Running) -> None:
        engine = group.engine
        if engine.version < group.ticket.head_bound:
            engine.version = self.buffer.version
        for versions in group.tokens:
            if not versions:
                versions.append(engine.version)
        if len(group.tokens) > 1 and self.random.random() < 0.2:  # it could not be graded
            group.tokens.pop(self.random.randrange(len(group.tokens)))
        trajectories = tuple(trajectory(v[0], v[-1]) for v in group.tokens)
        is_cut = [self.random.random() < 0.2 for _ in trajectories]
        masked = frozenset() if all(is_cut) else frozenset(i for i, cut in enumerate(is_cut) if cut)
        group.tokens = [v for i, v in enumerate(group.tokens) if i not in masked]
        self.seen["masked"] += len(masked)
        ticket, rewards = group.ticket, (1.0,) * len(trajectories)
        graded = Group(ticket.group_id, ticket.prompt_index, trajectories, rewards, masked)
        self.buffer.finish(graded, self.now)
        group.is_ready = True

    def drop_one(self) -> None:
        if self.groups:
            self.drop(self.random.choice(list(self.groups)), self.random.choice(list(Drop)))

    def drop(self, group_id: int, reason: Drop) -> None:
        ticket = self.buffer.drop(group_id, reason)
        self.dropped(ticket, reason)

    def dropped(self, ticket: Ticket, reason: Drop) -> None:
        assert self.groups.pop(ticket.group_id).ticket == ticket
        self.drops[reason] += 1
        self.settle(ticket, is_lost=reason is Drop.WORKER_DIED)

    def settle(self, ticket: Ticket, is_lost: bool) -> None:
        assert ticket.prompt_index not in self.consumed
        if is_lost:
            self.again.append(ticket.prompt_index)
        else:
            self.consumed.add(ticket.prompt_index)

    def pin_or_unpin(self) -> None:
        engine = self.random.choice(self.engines)
        engine.is_pinned = not engine.is_pinned
        if engine.is_pinned:  # an evaluation begins under the newest weights
            engine.version = self.buffer.version

    def kill_engine(self) -> None:
        place = self.random.randrange(len(self.engines))
        for group in self.running(self.engines[place]):
            self.drop(group.ticket.group_id, Drop.WORKER_DIED)
            self.seen["lost with its engine"] += 1
        fresh = Engine(self.buffer.version)
        for group in self.groups.values():
            if group.engine is self.engines[place]:
                group.engine = fresh
        self.engines[place] = fresh

    def learn(self) -> None:
        buffer, eta = self.buffer, self.buffer.max_staleness
        for group_id in buffer.expired():
            assert buffer.on_stale is OnStale.DROP
            assert self.groups[group_id].ticket.head_bound < buffer.version - eta
            if self.random.random() < 0.7:  # an abort takes a while; it may still finish
                self.drop(group_id, Drop.STALE)
                self.seen["aborted"] += 1
        for ticket in buffer.take_untrainable():
            assert buffer.on_stale is not OnStale.WAIT, "wait lost a group"
            self.dropped(ticket, Drop.STALE)
            self.seen["untrainable"] += 1
        batch = buffer.next_batch(0, self.now)
        if batch is not None:
            self.check_batch(batch)
            self.batch = batch
            self.training = [self.groups.pop(g.id).ticket for g in batch.groups]

    def check_batch(self, batch: Batch) -> None:
        buffer, oldest = self.buffer, self.buffer.version - self.buffer.max_staleness
        assert self.batch is None and batch.version == buffer.version
        assert len({g.id for g in batch.groups}) == buffer.batch_size
        for group in batch.groups:
            assert self.groups[group.id].is_ready
            assert group.id not in self.trained_ids
            tokens = [v for versions in self.groups[group.id].tokens for v in versions]
            if buffer.on_stale is OnStale.MASK:
                tokens = [v for v in tokens if v >= oldest]  # the trainer's rule (batch.py)
                assert tokens, "nothing to train"
            assert all(oldest <= v <= buffer.version for v in tokens)
            assert all(self.updates_between(v) <= buffer.max_staleness for v in set(tokens))
            if buffer.on_stale is not OnStale.MASK:
                assert batch.version - group.head_version <= buffer.max_staleness
            self.seen["several versions"] += len(set(tokens)) > 1
        chosen = {group.id for group in batch.groups}
        left = [g for i, g in self.groups.items() if g.is_ready and i not in chosen]
        youngest = max(group.head_version for group in batch.groups)
        assert all(min(v[0] for v in g.tokens) >= youngest for g in left), "not oldest first"

    def updates_between(self, version: int) -> int:
        """A version's weights and those that the trainer starts from: what staleness stands for."""
        ours, theirs = self.lineage[self.buffer.version], self.lineage[version]
        shared = sum(a == b for a, b in zip(ours, theirs, strict=False))
        return len(ours) + len(theirs) - 2 * shared

    def publish(self) -> None:
        if self.batch is None:
            return
        self.num_updates += 1
        self.lineage[self.batch.version + 1] = (*self.lineage[self.batch.version], self.num_updates)
        self.unsaved += self.training
        before = self.buffer.num_free
        assert self.sorted(self.buffer.published(self.now)) == self.sorted(self.training)
        assert self.buffer.num_free == before + self.buffer.batch_size
        for ticket in self.training:
            self.trained_ids.add(ticket.group_id)
            self.settle(ticket, is_lost=False)
        self.num_trained += len(self.training)
        self.batch, self.training = None, []

    @staticmethod
    def sorted(tickets: list[Ticket]) -> list[Ticket]:
        return sorted(tickets, key=lambda ticket: ticket.group_id)

    def go_back(self) -> None:
        """The trainer dies, perhaps when its version is out and nobody has heard of it yet, and its
        successor publishes the checkpoint's weights."""
        latest = self.buffer.version
        if self.batch is not None:
            assert self.sorted(self.buffer.training_failed()) == self.sorted(self.training)
            if self.random.random() < 0.5:
                latest, self.num_updates = latest + 1, self.num_updates + 1
                self.lineage[latest] = (*self.lineage[latest - 1], self.num_updates)
                for engine in self.engines:
                    if not engine.is_pinned and self.random.random() < 0.5:
                        engine.version = latest
                        for group in self.running(engine):
                            group.tokens[0].append(latest)
        for ticket in self.training + self.unsaved:
            self.consumed.discard(ticket.prompt_index)
            self.settle(ticket, is_lost=True)
        self.drops[Drop.WORKER_DIED] += len(self.training) + len(self.unsaved)
        self.num_trained -= len(self.unsaved)
        self.seen["lost with its trainer"] += len(self.training)
        self.seen["trained in vain"] += len(self.unsaved)
        self.base = max(self.base, self.saved.history.version)
        again = republished_as(self.base, latest)
        self.lineage[again] = self.saved.lineage
        too_old = self.buffer.rolled_back(again, len(self.unsaved))
        self.base, self.batch, self.training, self.unsaved = again, None, [], []
        for group_id in too_old:
            self.drop(group_id, Drop.WORKER_DIED)
        self.seen["outlived its trainer"] += len(self.groups)

    def checkpoint(self) -> Checkpoint:
        lineage = self.lineage[self.buffer.version]
        return Checkpoint(self.buffer.history, set(self.consumed), set(self.trained_ids), lineage)

    def save(self) -> None:
        if self.batch is None:  # as the loop does: between two steps
            self.saved, self.unsaved = self.checkpoint(), []

    def resume(self) -> None:
        """A new process goes on from the last checkpoint: nothing is in flight."""
        saved, old = self.saved, self.buffer
        self.buffer = self.new_buffer(
            old.batch_size, old.max_staleness, old.on_stale, saved.history
        )
        self.groups, self.training, self.batch = {}, [], None
        self.unsaved, self.base = [], saved.history.version
        self.lineage = {self.base: saved.lineage}
        self.consumed, self.trained_ids = set(saved.consumed), set(saved.trained_ids)
        self.again = [i for i in range(self.next_prompt) if i not in self.consumed]
        self.num_submitted = saved.num_submitted
        self.num_trained = saved.history.trained
        self.drops = Counter({Drop(k): n for k, n in saved.history.drops.items()})
        self.engines = [Engine(self.buffer.version) for _ in self.engines]
        self.seen["resumed"] += 1

    def finish_all_and_train(self) -> None:
        """No deadlock: when whatever runs has finished, there is a batch; and then again."""
        for _ in range(2):
            self.publish()
            for engine in self.engines:
                engine.is_pinned = False  # evaluations end
            for _ in range(2):  # the second round makes up for what was too old
                while self.buffer.room:
                    self.admit()
                for group in self.running():
                    self.finish(group)
                if self.batch is None:
                    self.learn()
                self.check()
            assert self.batch is not None, "all have finished, and there is no batch"

    # -- what must be true

    def check(self) -> None:
        buffer = self.buffer
        assert buffer.num_running == len(self.running())
        assert buffer.num_ready == len(self.groups) - len(self.running())
        in_flight = len(self.groups) + len(self.training)
        num_dropped = sum(self.drops.values())
        expected = Ledger(self.num_submitted, self.num_trained, num_dropped, in_flight)
        assert buffer.ledger == expected and expected.is_balanced
        assert {r: n for r, n in buffer.drops.items() if n} == {
            r: n for r, n in self.drops.items() if n
        }
        tickets = [g.ticket for g in self.groups.values()] + self.training
        slots = {ticket.slot for ticket in tickets}
        assert len(slots) == len(tickets), "a slot was given twice"
        assert slots <= set(range(buffer.num_slots))
        assert buffer.num_free == buffer.num_slots - in_flight, "a slot was lost"
        assert buffer.num_in_flight == in_flight and 0 <= buffer.room <= buffer.num_free
        in_hand = [t.prompt_index for t in tickets] + self.again
        assert len(set(in_hand)) == len(in_hand)
        assert set(in_hand) | self.consumed == set(range(self.next_prompt))
        assert not set(in_hand) & self.consumed, "a prompt is both consumed and to come"


@pytest.mark.parametrize("on_stale", OnStale)
@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.integers(0, 5), st.integers(0, 2**32), st.integers(1, 400))
def test_any_history(
    on_stale: OnStale, batch_size: int, max_staleness: int, seed: int, num_events: int
) -> None:
    World(batch_size, max_staleness, on_stale, seed).run(num_events)


@pytest.mark.slow
@pytest.mark.parametrize("on_stale", OnStale)
def test_a_hundred_thousand_histories(on_stale: OnStale) -> None:
    """Under each rule, one of a hundred of them long. A failure names the seed to run again."""
    for seed in range(100_000):
        shape = random.Random(f"shape {seed}")
        world = World(shape.randint(1, 8), shape.randint(0, 5), on_stale, seed)
        try:
            world.run(shape.randint(1, 80 if seed % 100 else 1500))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("on_stale", OnStale)
def test_the_random_histories_go_through_what_they_claim(on_stale: OnStale) -> None:
    seen: Counter[str] = Counter()
    num_steps = 0
    for seed in range(24):
        world = World(1 + seed % 4, 1 + seed % 3, on_stale, seed)
        world.run(600)
        seen += world.seen
        num_steps += world.num_trained // world.buffer.batch_size
    expected = {
        "several versions",
        "lost with its engine",
        "lost with its trainer",
        "trained in vain",
        "outlived its trainer",
        "resumed",
        "old head bound",
        "filtered",
        "masked",
        "held back",
    }
    if on_stale is OnStale.DROP:
        expected |= {"aborted"}
    if on_stale is not OnStale.WAIT:
        expected |= {"untrainable"}
    assert expected <= {name for name, count in seen.items() if count}
    assert num_steps > 200
