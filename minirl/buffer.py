"""The buffer: which groups may run, and which are trained next (stage 4).

Takes group tickets and finished groups, gives batches in which no trained token is staler than η.
It is a pure data structure: no processes, no torch, and the time is passed in, so that a test can
drive it through any history and the loop cannot disagree with the simulator. Every call costs the
same however many groups there are: groups are kept by version, and few versions are alive.

    slots      (η+1)·B of them. A group holds one while it is running, ready or in training; it
               comes back (`release`) after the weights trained on it are *published*, or when the
               group is dropped. So η = 0 is exactly synchronous.
    admission  of the free slots only as many are given out as keep the trainer fed (`Admission`).
    order      a batch takes ready groups oldest head version first.
    stragglers a group may still be too old when it is done:
               mask   train it; its tokens staler than η are masked out of the loss by the trainer.
                      A group with no token left to train is dropped.
               drop   abort it while it runs (`expired`) or leave it out when ready; count it.
               wait   the step waits for it, decided early enough: a batch may leave a group behind
                      only if all outstanding groups can still be trained in time at B per step.
    ledger     submitted = trained + dropped + in flight, at every moment, each drop with a reason.
    rollback   a trainer that died restarts from older weights. They get a new, higher number
               (`republished_as`), chosen so that a token's staleness by number is never less than
               the updates that lie between its weights and the trainer's. Groups that this makes
               too old are abandoned, and what was trained since counts as dropped.

Leaves out: which engine runs a group (rollout/dispatch.py) and what a reward is (tasks/).
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from minirl.config import Config
from minirl.records import Batch, Drop, Group

AUTO = -1.0  # buffer.target_staleness: as few groups in flight as keep the trainer fed
STARVED = 0.01  # share of a step above which a wait for groups counts as starvation
RELEASE = 0.1  # share of the left-over stock by which the margin shrinks at each step


class OnStale(StrEnum):
    MASK = "mask"
    DROP = "drop"
    WAIT = "wait"


class Ticket(NamedTuple):
    """A group's right to run. `head_bound`: no token of it can be older than this version."""

    group_id: int
    slot: int
    prompt_index: int
    head_bound: int
    admitted_s: float = 0.0


class Ledger(NamedTuple):
    submitted: int
    trained: int
    dropped: int
    in_flight: int


@dataclass(frozen=True)
class History:
    """What came before a resumed run."""

    version: int = 0
    next_group_id: int = 0
    trained: int = 0
    drops: dict[str, int] = field(default_factory=dict)


class ReadyGroup(NamedTuple):
    ticket: Ticket
    group: Group
    head: int
    newest: int


def republished_as(base: int, latest: int, reserved: int) -> int:
    """The number under which the weights of version `base` come again when `latest` is the newest.

    A token of version v between the two was written v - base updates away from them, along a path
    since abandoned: n - v is no less than that for every v ≤ latest from n = 2·latest - base on.
    `reserved` is the number of the last rollback. Where that never came out it is still the one.
    """
    return max(reserved, latest + 1, 2 * latest - base)


class ByVersion:
    """Group ids by a version of theirs; of one version, in the order in which they came."""

    def __init__(self) -> None:
        self._ids: dict[int, dict[int, None]] = {}

    def add(self, version: int, group_id: int) -> None:
        self._ids.setdefault(version, {})[group_id] = None

    def remove(self, version: int, group_id: int) -> None:
        ids = self._ids[version]
        del ids[group_id]
        if not ids:
            del self._ids[version]

    def older_than(self, version: float) -> list[int]:
        """The oldest first."""
        if not self._ids or min(self._ids) >= version:  # as mostly, and asked for all the time
            return []
        return [i for v in sorted(self._ids) if v < version for i in self._ids[v]]

    def counts(self) -> Counter[int]:
        return Counter({version: len(ids) for version, ids in self._ids.items()})


class Admission:
    """How far generation may run ahead of the trainer (`buffer.target_staleness`), as a limit on
    the groups in flight. When training is the bottleneck, slots alone would let every batch become
    η old, so only as many groups are kept in flight as the trainer needs:

        B in training  +  B · turn-around / step time under way  +  a margin

    The second term is Little's law and at least one batch. The margin makes up for what the means
    do not show: it grows when the trainer starves, and shrinks by what was left in stock after a
    batch was taken. When generation is the bottleneck the trainer always starves, the margin grows,
    and the limit is all slots: admission control never costs throughput.
    """

    def __init__(self, batch_size: int, num_slots: int, target_staleness: float = AUTO):
        self._batch_size, self._num_slots = batch_size, num_slots
        self._target = target_staleness
        self._turnaround_s = 0.0
        self._num_turnarounds = 0
        self._step_s = 0.0
        self._margin = 0.0

    @property
    def limit(self) -> int:
        """Groups that may be running, ready or in training at once."""
        is_auto = self._target == AUTO
        wanted = self._needed + self._margin if is_auto else self._batch_size * (1 + self._target)
        return max(self._batch_size, math.ceil(min(self._num_slots, wanted)))

    @property
    def _needed(self) -> float:
        ahead = self._turnaround_s / self._step_s if self._step_s else 1.0
        return self._batch_size * (1 + max(1.0, ahead))

    def group_took(self, seconds: float) -> None:
        """From its admission until it was ready."""
        self._num_turnarounds += 1
        weight = 1 / min(self._num_turnarounds, self._batch_size)
        self._turnaround_s += weight * (seconds - self._turnaround_s)

    def step_took(self, seconds: float) -> None:
        """From taking a batch until its version was published."""
        weight = 0.3 if self._step_s else 1.0
        self._step_s += weight * (seconds - self._step_s)

    def batch_taken(self, starved_s: float, num_left: int) -> None:
        """The trainer had starved for this long; this many groups were ready beyond B."""
        if not self._step_s:  # the first batch is always waited for
            return
        starved = starved_s / self._step_s
        if starved > STARVED:
            self._margin += 1 + self._batch_size * min(1.0, starved)
        else:
            self._margin -= RELEASE * num_left
        # Clamp the margin to the range in which it has an effect, so that it reacts at once when
        # the bottleneck changes (no wind-up).
        low, high = 2 * self._batch_size - self._needed, self._num_slots - self._needed
        self._margin = min(max(self._margin, low), max(low, high))


class Buffer:
    """`now` is any clock's seconds: only differences count, and only for admission control.
    Without a `target_staleness` every free slot may be taken."""

    def __init__(
        self,
        batch_size: int,
        max_staleness: int,
        on_stale: OnStale = OnStale.MASK,
        history: History | None = None,
        target_staleness: float = math.inf,
    ):
        self.batch_size, self.max_staleness, self.on_stale = batch_size, max_staleness, on_stale
        history = history or History()
        self.version = history.version
        self.num_slots = (max_staleness + 1) * batch_size
        self.admission = Admission(batch_size, self.num_slots, target_staleness)
        self.drops: Counter[Drop] = Counter({Drop(k): n for k, n in history.drops.items()})
        self._free = deque(range(self.num_slots))
        self._running: dict[int, Ticket] = {}
        self._running_bounds = ByVersion()
        self._ready: dict[int, ReadyGroup] = {}
        self._ready_heads, self._ready_tails = ByVersion(), ByVersion()
        self._training: list[Ticket] = []
        self._took_batch_s = 0.0
        self._starving_since_s: float | None = None
        self._next_id = history.next_group_id
        self._trained = history.trained
        self._submitted = history.trained + sum(history.drops.values())

    # -- admission

    @property
    def holds_back(self) -> bool:
        return self.admission.limit < self.num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_in_flight(self) -> int:
        return len(self._running) + len(self._ready) + len(self._training)

    def num_to_admit(self, num_needed: int, oldest_served: int) -> int:
        """How many groups may begin now: free slots, as far as admission control allows, of the
        `num_needed` that the rest of the run takes (those in flight among them).

        At η = 0 a round begins when the last has ended: what filters dropped is made up for in
        rounds. Under `wait` there must also be time: a group that begins under older weights
        (`oldest_served`: an evaluation pins them) may find all steps before its deadline taken.
        """
        if not self.max_staleness and (self._running or self._training):
            return 0
        room = min(len(self._free), min(self.admission.limit, num_needed) - self.num_in_flight)
        if self.on_stale is not OnStale.WAIT:
            return max(0, room)
        heads, version = self._ready_heads.counts(), self.version + bool(self._training)
        while room > 0 and not self._in_time(heads + Counter({oldest_served: room}), version):
            room -= 1
        return max(0, room)

    def admit(self, prompt_index: int, head_bound: int, now: float = 0.0) -> Ticket:
        """Takes a slot. `head_bound` is the version that the chosen worker serves, or soon will."""
        ticket = Ticket(self._next_id, self._free.popleft(), prompt_index, head_bound, now)
        self._next_id += 1
        self._submitted += 1
        self._running[ticket.group_id] = ticket
        self._running_bounds.add(head_bound, ticket.group_id)
        return ticket

    # -- what becomes of a group

    def finish(self, group: Group, now: float = 0.0) -> None:
        """A running group is done and graded."""
        ticket = self._stop_running(group.id)
        head, newest = group.head_version, group.newest_version
        self._ready[group.id] = ReadyGroup(ticket, group, head, newest)
        self._ready_heads.add(head, group.id)
        self._ready_tails.add(newest, group.id)
        self.admission.group_took(now - ticket.admitted_s)

    def _stop_running(self, group_id: int) -> Ticket:
        ticket = self._running.pop(group_id)
        self._running_bounds.remove(ticket.head_bound, group_id)
        return ticket

    def _take_ready(self, group_id: int) -> ReadyGroup:
        entry = self._ready.pop(group_id)
        self._ready_heads.remove(entry.head, group_id)
        self._ready_tails.remove(entry.newest, group_id)
        return entry

    def drop(self, group_id: int, reason: Drop) -> Ticket:
        """Frees the slot of a running or ready group and counts why."""
        is_running = group_id in self._running
        ticket = self._stop_running(group_id) if is_running else self._take_ready(group_id).ticket
        self._free.append(ticket.slot)
        self.drops[reason] += 1
        return ticket

    def expired(self) -> list[int]:
        """Running groups that `drop` gives up: their first token may be too old by now."""
        if self.on_stale is not OnStale.DROP:
            return []
        return self._running_bounds.older_than(self._oldest_trainable)

    # -- batches

    @property
    def _oldest_trainable(self) -> int:
        return self.version - self.max_staleness

    def take_untrainable(self) -> list[Ticket]:
        """Drops the ready groups that can no longer be trained under the rule in force."""
        return [self.drop(group_id, Drop.STALE) for group_id in self._dead()]

    def _dead(self) -> list[int]:
        is_by_head = self.on_stale is OnStale.DROP
        ready = self._ready_heads if is_by_head else self._ready_tails
        return ready.older_than(self._oldest_trainable)

    def next_batch(self, step: int, now: float = 0.0) -> Batch | None:
        """The B oldest ready groups, or None while there are too few or a straggler is due. First
        `take_untrainable` drops those that cannot be trained any more."""
        if self._training:
            return None
        if not (chosen := self._choose()):
            if self._starving_since_s is None:
                self._starving_since_s = now
            return None
        entries = [self._take_ready(group_id) for group_id in chosen]
        self._training = [entry.ticket for entry in entries]
        since = now if self._starving_since_s is None else self._starving_since_s
        self.admission.batch_taken(now - since, len(self._ready))
        self._starving_since_s, self._took_batch_s = None, now
        groups = sorted((entry.group for entry in entries), key=lambda group: group.id)
        return Batch(step, self.version, tuple(groups))

    def _choose(self) -> list[int]:
        """B of them, or none at all. Under `wait` those left behind must still be in time."""
        if len(self._ready) < self.batch_size:
            return []
        assert not self._dead(), "take_untrainable comes first"
        chosen = self._ready_heads.older_than(math.inf)[: self.batch_size]
        heads = self._ready_heads.counts()
        heads.subtract(self._ready[group_id].head for group_id in chosen)
        may_leave = self.on_stale is not OnStale.WAIT or self._in_time(+heads, self.version + 1)
        return chosen if may_leave else []

    def _in_time(self, heads: Counter[int], version: int) -> bool:
        """Can these groups and all running ones be trained by their deadlines, B a step, from a
        step that starts from `version` on?"""
        num_before = 0
        for head, count in sorted((heads + self._running_bounds.counts()).items()):
            num_before += count
            if head + self.max_staleness < version + (num_before - 1) // self.batch_size:
                return False
        return True

    def published(self, now: float = 0.0) -> list[Ticket]:
        """The batch in training has become the next version. Its slots come back with `release`,
        when nothing reads their cells any more."""
        done, self._training = self._training, []
        self._trained += len(done)
        self.version += 1
        self.admission.step_took(now - self._took_batch_s)
        return done

    def release(self, tickets: list[Ticket]) -> None:
        self._free.extend(ticket.slot for ticket in tickets)

    def roll_back(self, version: int, num_untrained: int) -> tuple[list[Ticket], list[int]]:
        """The trainer restarts from weights that are republished as `version`. Its batch is lost,
        and `num_untrained` groups are no longer trained: all count as dropped. Gives the batch's
        tickets, and the groups, running and ready, that are too old now, for the caller to drop."""
        assert version >= self.version  # equal: before the first was out
        lost, self._training = self._training, []
        self.release(lost)
        self._trained -= num_untrained
        self.drops[Drop.WORKER_DIED] += num_untrained + len(lost)
        self.version = version
        oldest = self._oldest_trainable
        if self.on_stale is OnStale.WAIT and not self._in_time(self._ready_heads.counts(), version):
            oldest = version  # they cannot all be trained in time
        return lost, self._ready_heads.older_than(oldest) + self._running_bounds.older_than(oldest)

    # -- accounting

    @property
    def ledger(self) -> Ledger:
        num_dropped = sum(self.drops.values())
        return Ledger(self._submitted, self._trained, num_dropped, self.num_in_flight)

    @property
    def history(self) -> History:
        """What a checkpoint keeps: groups in flight are not in it, their prompts run again."""
        drops = {str(reason): count for reason, count in self.drops.items()}
        return History(self.version, self._next_id, self._trained, drops)


def make_buffer(config: Config, history: History | None = None) -> Buffer:
    size, own = config.train.batch_size, config.buffer
    rule, target = OnStale(own.on_stale), own.target_staleness
    return Buffer(size, own.max_staleness, rule, history, target)
