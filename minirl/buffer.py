"""The buffer: which groups may run, and which are trained next (stage 4).

Takes group tickets and finished groups, gives batches in which no trained token is staler than η.
It is a pure data structure: no processes, no torch, no clock, so that a test can drive it through
any history and the loop cannot disagree with the simulator.

    slots      (η+1)·B of them. A group holds one while it is running, ready or in training; it
               comes back when the weights trained on it are *published*, or when the group is
               dropped. So η = 0 is exactly synchronous.
    order      a batch takes ready groups oldest head version first.
    stragglers a group may still be too old when it is done:
               mask   train it; its tokens staler than η are masked out of the loss by the trainer.
                      A group with no token left to train is dropped.
               drop   abort it while it runs (`expired`) or leave it out when ready; count it.
               wait   the step waits for it, decided early enough: a batch may leave a group behind
                      only if all outstanding groups can still be trained in time at B a step.
    ledger     submitted = trained + dropped + in flight, at every moment, each drop with a reason.

Leaves out: who runs a group (rollout/dispatch.py) and what a reward is (tasks/).
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum

from minirl.records import Batch, Group


class OnStale(StrEnum):
    MASK = "mask"
    DROP = "drop"
    WAIT = "wait"


class Drop(StrEnum):
    """Why a group was dropped; each has a count."""

    STALE = "stale"
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    TOO_LONG = "too_long"  # the prompt is longer than tasks.max_prompt_tokens
    REFUSED = "refused"  # the engine would not take the prompt
    WORKER_DIED = "worker_died"  # its prompt is queued again under a new group id


@dataclass(frozen=True)
class Ticket:
    """A group's right to run. `head_bound`: no token of it can be older than this version."""

    group_id: int
    slot: int
    prompt_index: int
    head_bound: int


@dataclass(frozen=True)
class Ledger:
    submitted: int
    trained: int
    dropped: int
    in_flight: int

    @property
    def is_balanced(self) -> bool:
        return self.submitted == self.trained + self.dropped + self.in_flight


@dataclass(frozen=True)
class History:
    """What came before a resumed run."""

    version: int = 0
    next_group_id: int = 0
    trained: int = 0
    drops: dict[str, int] = field(default_factory=dict)


class Buffer:
    def __init__(
        self,
        batch_size: int,
        max_staleness: int,
        on_stale: OnStale = OnStale.MASK,
        history: History | None = None,
    ):
        self.batch_size, self.max_staleness, self.on_stale = batch_size, max_staleness, on_stale
        history = history or History()
        self.version = history.version
        self.num_slots = (max_staleness + 1) * batch_size
        self.drops: Counter[Drop] = Counter({Drop(k): n for k, n in history.drops.items()})
        self._free = deque(range(self.num_slots))
        self._running: dict[int, Ticket] = {}
        self._ready: dict[int, tuple[Ticket, Group]] = {}
        self._training: list[Ticket] = []
        self._next_id = history.next_group_id
        self._trained = history.trained
        self._submitted = history.trained + sum(history.drops.values())

    # -- admission

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def can_admit(self, head_bound: int) -> bool:
        """Is there a slot, and under `wait` also the time? A group that begins under older weights
        (an evaluation pins them) may find all the steps before its deadline taken."""
        if self.on_stale is not OnStale.WAIT or not self._free:
            return bool(self._free)
        heads = [group.head_version for _, group in self._ready.values()]
        return self._in_time([*heads, head_bound], self.version + bool(self._training))

    def admit(self, prompt_index: int, head_bound: int) -> Ticket:
        """Takes a slot. `head_bound` is the version that the chosen worker serves, or soon will."""
        ticket = Ticket(self._next_id, self._free.popleft(), prompt_index, head_bound)
        self._next_id += 1
        self._submitted += 1
        self._running[ticket.group_id] = ticket
        return ticket

    @property
    def next_id(self) -> int:
        """The id that the next admitted group will have."""
        return self._next_id

    # -- what becomes of a group

    def finish(self, group: Group) -> None:
        """A running group is done and graded."""
        self._ready[group.id] = (self._running.pop(group.id), group)

    def drop(self, group_id: int, reason: Drop) -> Ticket:
        """Frees the slot of a running or ready group and counts why."""
        ticket = self._running.pop(group_id, None) or self._ready.pop(group_id)[0]
        self._free.append(ticket.slot)
        self.drops[reason] += 1
        return ticket

    def expired(self) -> list[int]:
        """Running groups that `drop` gives up: their first token may be too old by now."""
        if self.on_stale is not OnStale.DROP:
            return []
        return [t.group_id for t in self._running.values() if t.head_bound < self._oldest_trainable]

    # -- batches

    @property
    def _oldest_trainable(self) -> int:
        return self.version - self.max_staleness

    def take_untrainable(self) -> list[Ticket]:
        """Drops the ready groups that can no longer be trained under the rule in force."""
        return [
            self.drop(group_id, Drop.STALE)
            for group_id, (_, group) in list(self._ready.items())
            if self._is_dead(group)
        ]

    def _is_dead(self, group: Group) -> bool:
        if self.on_stale is OnStale.DROP:
            return group.head_version < self._oldest_trainable
        newest = max(t.tail_version for t in group.trajectories)
        return newest < self._oldest_trainable

    def next_batch(self, step: int) -> Batch | None:
        """The B oldest ready groups, or None while there are too few or a straggler is due.

        Groups that cannot be trained any more are passed over: `take_untrainable` drops them.
        """
        if self._training:
            return None
        trainable = [entry for entry in self._ready.values() if not self._is_dead(entry[1])]
        if len(trainable) < self.batch_size:
            return None
        oldest_first = sorted(trainable, key=lambda e: (e[1].head_version, e[1].id))
        chosen, left = oldest_first[: self.batch_size], oldest_first[self.batch_size :]
        heads_left = [group.head_version for _, group in left]
        if self.on_stale is OnStale.WAIT and not self._in_time(heads_left, self.version + 1):
            return None
        self._training = [ticket for ticket, _ in chosen]
        for ticket in self._training:
            del self._ready[ticket.group_id]
        return Batch(step, self.version, tuple(sorted((g for _, g in chosen), key=lambda g: g.id)))

    def _in_time(self, heads: list[int], version: int) -> bool:
        """Can these groups and all running ones be trained by their deadlines, B a step, from a
        step that starts from `version` on?"""
        heads = heads + [ticket.head_bound for ticket in self._running.values()]
        deadlines = sorted(head + self.max_staleness for head in heads)
        return all(d >= version + k // self.batch_size for k, d in enumerate(deadlines))

    def published(self) -> list[Ticket]:
        """The batch in training has become the next version: its slots come back."""
        done, self._training = self._training, []
        self._free.extend(ticket.slot for ticket in done)
        self._trained += len(done)
        self.version += 1
        return done

    def training_failed(self) -> list[Ticket]:
        """The batch in training was lost with its trainer: counted as dropped, slots come back."""
        lost, self._training = self._training, []
        self._free.extend(ticket.slot for ticket in lost)
        self.drops[Drop.WORKER_DIED] += len(lost)
        return lost

    # -- accounting

    @property
    def ledger(self) -> Ledger:
        in_flight = len(self._running) + len(self._ready) + len(self._training)
        return Ledger(self._submitted, self._trained, sum(self.drops.values()), in_flight)

    @property
    def history(self) -> History:
        """What a checkpoint keeps: groups in flight are not in it, their prompts run again."""
        drops = {str(reason): count for reason, count in self.drops.items()}
        return History(self.version, self._next_id, self._trained, drops)
