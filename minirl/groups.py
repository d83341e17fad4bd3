"""A group's life, from its prompt to a batch. Takes what workers say, gives what to send them.

    begin ──Submit──► engine ──Finished──► queue ──Grade──► verifier ──Graded──► buffer ──► batch
                       ▲  └──(a turn)───► queue ──Ask──► verifier ──Replied──┐
                       └──────────────────── Continue ◄──────────────────────┘

`GroupState` is all that is known of one group, `Groups.states` the only table of them. A group ends
exactly once: trained and released, dropped with a reason, or, of an evaluation, ended. What a lost
worker costs it is decided here too:

    engine    its groups are dropped and their prompts requeued; an evaluation is void or requeued
    verifier  the reward is blamed and the group dropped; if it was killed from outside, one retry
    ranks     groups that their rollback makes too old are abandoned and their prompts requeued

Where a task has several turns, a turn that ended waits for the task's reply. Its trajectory ends
where the task has none; and, truncated, where the reply leaves no room for a written token in
rollout.max_new_tokens, or after rollout.max_turns. At η = 0 replies are held until every sequence
of an engine has ended its turn, and are sent together, in order: what the engine does next does not
depend on when a reply came.

Pure: no process, no clock, no torch; times and versions are passed in. Leaves out: slots, staleness
and the order of batches (buffer.py), the choice of an engine (dispatch.py), restarts
(supervisor.py).
"""

import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from minirl import messages
from minirl.buffer import Buffer, Ticket
from minirl.config import Config
from minirl.errors import MinirlError
from minirl.evaluation import Ended, Evaluation
from minirl.messages import Ask, Grade, Role
from minirl.metrics import DropWatch, RateLimit
from minirl.records import Batch, Drop, Group, Prompt, StopReason, Trajectory
from minirl.rollout.dispatch import Assignment, Dispatcher
from minirl.tasks.prompts import PromptStream

FIRST_EVAL_ID = 1 << 40  # group ids from here on are of evaluations
MAX_LOSSES = 5  # of one prompt with its engine: then the prompt is taken for the cause
DEADLY = f"its engine died {MAX_LOSSES} times"
MAX_SCORED = 2  # answers per version that rank 0 compares logprobs of

Sends = list[tuple[str, object]]  # the name of a worker, and what it is sent


class Phase(StrEnum):
    SAMPLING = "sampling"  # at an engine
    GRADING = "grading"  # waits for a verifier, or is at one
    READY = "ready"
    TRAINING = "training"


@dataclass
class GroupState:
    id: int
    prompt: Prompt
    cells: tuple[int, ...]
    assignment: Assignment
    num_left: int  # trajectories that the engine still owes
    phase: Phase = Phase.SAMPLING
    done: dict[int, Trajectory] = field(default_factory=dict)  # by place in the group
    asked: dict[int, Ask] = field(default_factory=dict)  # turns that wait for a reply, by place
    texts: tuple[str, ...] = ()  # of a ready group
    abort: Drop | None = None  # why the engine was asked to; WORKER_DIED: it is abandoned
    error: str = ""  # why, in words
    was_retried: bool = False  # its verifier was killed from outside
    evaluation: Evaluation | None = None
    eval_place: int = 0  # of its prompt among the evaluation's

    @property
    def prompt_key(self) -> tuple[bool, int]:
        """Its prompt among held-out ones, or among those to train on."""
        is_held_out = self.evaluation is not None
        return is_held_out, self.eval_place if is_held_out else self.prompt.index


class Groups:
    def __init__(
        self,
        config: Config,
        stream: PromptStream | None,  # None: only evaluations
        buffer: Buffer,
        num_engines: int,
        num_verifiers: int,
        note: Callable[[str], object],
    ):
        self.config, self.stream, self.buffer = config, stream, buffer
        self._seldom = RateLimit(note)
        self.drops = DropWatch(config, self._seldom)
        self.dispatcher = Dispatcher(num_engines, config.rollout.max_new_tokens)
        self.num_verifiers = num_verifiers
        self.at_verifier: dict[int, Grade | Ask] = {}
        self._grades: deque[Grade | Ask] = deque()  # these and turns wait for a free verifier
        self._turns: deque[Grade | Ask] = deque()  # go first, since a sequence waits for the reply
        self._is_repeatable = config.is_synchronous and stream is not None  # one seed, one run
        self.states: dict[int, GroupState] = {}
        self.evaluation: Evaluation | None = None
        self._eval_ids = itertools.count(FIRST_EVAL_ID)
        self._replies: dict[int, dict[tuple[int, int], tuple[int, ...]]] = defaultdict(dict)
        self._num_losses: Counter[tuple[bool, int]] = Counter()  # of a prompt, with its engine
        # Steps of the checkpoints that a rollback may go back to, and what was trained since.
        self._saved_steps: deque[int] = deque(maxlen=config.checkpoint.keep)
        self._trained: list[tuple[int, list[Ticket]]] = []
        self._num_to_score = 0  # answers, for the batch in training
        self._outbox: Sends = []

    # -- to the engines

    def begin(self, num_needed: int, served: Sequence[int | None], step: int, now: float) -> Sends:
        """Starts as many groups as the buffer admits, of the `num_needed` that the rest of the run
        takes. `served`: under which version each engine would begin a group; None: it cannot. One
        whose box is more than η behind gets none either: no token of it could be trained."""
        assert self.stream is not None
        begun, size = [], self.config.rollout.group_size
        oldest = self.buffer.version - self.buffer.max_staleness
        heads = {e: v for e, v in enumerate(served) if v is not None and v >= oldest}
        num = self.buffer.num_to_admit(num_needed, min(heads.values())) if heads else 0
        for _ in range(num):
            prompt, limit = self.stream.next(), self.config.tasks.max_prompt_tokens
            if len(prompt.tokens) > limit:
                ticket = self.buffer.admit(prompt.index, self.buffer.version)
                self._settle(self.buffer.drop(ticket.group_id, Drop.TOO_LONG), Drop.TOO_LONG)
                continue
            assignment = self.dispatcher.assign(size, heads)
            ticket = self.buffer.admit(prompt.index, heads[assignment.engine], now)
            cells = tuple(range(ticket.slot * size, (ticket.slot + 1) * size))
            begun.append(GroupState(ticket.group_id, prompt, cells, assignment, size))
        return self._submit(begun, f"{self.config.seed}/{step}" if self._is_repeatable else "")

    def evaluate(self, evaluation: Evaluation, among: Collection[int] | None = None) -> Sends:
        """Starts an evaluation by these engines (default all), or continues it with the cells that
        have become free."""
        begun = []
        for place, cell in evaluation.next_to_ask():
            if self._num_losses[True, place] >= MAX_LOSSES:
                evaluation.end(place, Ended(0, cell, None, None, DEADLY))
                continue
            assignment, prompt = self.dispatcher.assign(1, among), evaluation.prompts[place]
            state = GroupState(next(self._eval_ids), prompt, (cell,), assignment, 1)
            state.evaluation, state.eval_place = evaluation, place
            begun.append(state)
        evaluation.pinning |= {state.assignment.engine for state in begun}
        is_new, self.evaluation = self.evaluation is None, evaluation
        is_seeded = is_new and (self._is_repeatable or evaluation.version is None)
        seed = f"{self.config.seed}/{evaluation.step}/eval" if is_seeded else ""
        return self._submit(begun, seed)

    def _submit(self, states: list[GroupState], seed: str) -> Sends:
        """One message per engine, so that a synchronous engine begins with all it will get. Seeds
        are by the prompt, not by the group: a repeated step has new groups of its prompts."""
        by_engine: dict[int, list[GroupState]] = defaultdict(list)
        for state in states:
            self.states[state.id] = state
            by_engine[state.assignment.engine].append(state)
        for engine, own in by_engine.items():
            groups = tuple(
                messages.GroupRequest(s.id, s.prompt.tokens, s.cells, s.evaluation is not None)
                for s in own
            )
            dice = random.Random(f"{seed}/{own[0].prompt.index}/{engine}")
            self._to_engine(engine, messages.Submit(groups, dice.getrandbits(31) if seed else None))
        return self._outgoing()

    def take_evaluation(self) -> Evaluation | None:
        """The evaluation, once, when every prompt has ended."""
        if self.evaluation is None or not self.evaluation.is_done:
            return None
        ended, self.evaluation = self.evaluation, None
        return ended

    def expire(self) -> Sends:
        """Aborts the running groups that on_stale = "drop" gives up."""
        for group_id in self.buffer.expired():
            self._abort(self.states[group_id], Drop.STALE)
        return self._outgoing()

    def _abort(self, state: GroupState, reason: Drop) -> None:
        """No effect on a group that is being graded: it will be ready soon."""
        if state.phase is Phase.SAMPLING and state.abort is None:
            state.abort = reason
            self._to_engine(state.assignment.engine, messages.Abort(state.id))

    # -- from the engines and the verifiers

    def handle(self, rank: int, message: object, now: float) -> Sends:
        """`rank` is the sender's, among engines or among verifiers."""
        match message:
            case messages.Finished(are_turns=False):
                for group_id, place, trajectory in message.trajectories:
                    self._on_trajectory(self.states[group_id], place, trajectory)
            case messages.Finished():
                for group_id, place, trajectory in message.trajectories:
                    if (state := self.states[group_id]).abort is None:
                        ask = Ask(group_id, place, state.prompt.example, trajectory)
                        state.asked[place] = ask
                        self._turns.append(ask)
            case messages.Pinned():
                if self.evaluation is not None:
                    self.evaluation.pinning.discard(rank)
                    self.evaluation.saw(message.version)
            case messages.Gone():
                self._on_gone(message)
            case messages.Graded():
                self._on_graded(rank, message, now)
            case messages.Replied():
                self._on_reply(rank, message)
        return self._outgoing()

    def _on_trajectory(self, state: GroupState, place: int, trajectory: Trajectory) -> None:
        self.dispatcher.trajectory_done(state.assignment, trajectory.num_written)
        state.num_left -= 1
        state.done[place] = trajectory
        if state.evaluation is not None:
            state.evaluation.saw(trajectory.head_version, trajectory.tail_version)
        elif self._num_to_score and trajectory.tail_version == self.buffer.version:
            self._num_to_score -= 1
            score = messages.Score(trajectory.tail_version, ((trajectory.cell, state.id),))
            self._outbox.append((f"{Role.TRAIN}-0", score))
        if state.num_left or state.abort is not None:
            return
        state.phase = Phase.GRADING
        self._num_losses.pop(state.prompt_key, None)
        if self.num_verifiers:
            in_order = tuple(state.done[i] for i in range(len(state.done)))
            self._grades.append(Grade(state.id, state.prompt.example, in_order))
        else:
            self._evaluated(state, messages.Graded(state.id))

    def _on_reply(self, verifier: int, replied: messages.Replied) -> None:
        request = self.at_verifier.pop(verifier)
        assert isinstance(request, Ask) and request.group_id == replied.group_id
        state, place = self.states.get(request.group_id), request.place
        if replied.error:
            self._failed(request, replied.error)
            return
        if state is None or state.asked.get(place) is not request:
            return  # its group is gone
        del state.asked[place]
        done, rollout, tokens = request.trajectory, self.config.rollout, replied.tokens
        num_new = done.num_new + len(tokens)
        has_room = done.num_turns < rollout.max_turns and num_new < rollout.max_new_tokens
        self._replies[state.assignment.engine][state.id, place] = tokens if has_room else ()
        if not tokens:
            self._on_trajectory(state, place, done)
        elif not has_room:
            self._on_trajectory(state, place, done._replace(stop=StopReason.LENGTH))

    def _failed(self, request: Grade | Ask, why: str, is_late: bool = False) -> None:
        """There is no reward, or no reply: then the group ends when the engine has let go of it
        (`_on_gone`)."""
        if (state := self.states.get(request.group_id)) is None:
            return
        if isinstance(request, Grade):
            reason = Drop.REWARD_TIMEOUT if is_late else Drop.REWARD_ERROR
            self._end_without_reward(state, reason, why)
        elif state.asked.get(request.place) is request:
            state.error = why
            state.done[request.place] = request.trajectory  # what there is of the answer
            self._forget_turns(state)
            self._abort(state, Drop.REPLY_TIMEOUT if is_late else Drop.REPLY_ERROR)

    def _on_gone(self, gone: messages.Gone) -> None:
        """An engine gave a group up: it was asked to abort it, or refused it."""
        state = self.states.get(gone.group_id)
        if state is None:
            return  # a refusal and an abort have crossed
        self._leave_engine(state)
        reason = Drop.REFUSED if gone.why else state.abort or Drop.STALE
        self._end_without_reward(state, reason, gone.why or state.error)

    def _on_graded(self, verifier: int, graded: messages.Graded, now: float) -> None:
        request = self.at_verifier.pop(verifier)
        assert isinstance(request, Grade) and request.group_id == graded.group_id
        if graded.error:
            self._failed(request, graded.error)
            return
        state = self.states[request.group_id]
        if state.evaluation is not None:
            self._evaluated(state, graded)
            return
        self.drops.faults.clear()
        given = Group(state.id, state.prompt.index, request.trajectories, graded.rewards)
        group = filter_group(self.config, given)
        if isinstance(group, Drop) or state.abort:
            self._drop(state, group if isinstance(group, Drop) else Drop.WORKER_DIED)
        else:
            state.texts, state.phase = graded.texts, Phase.READY
            self.buffer.finish(group, now)

    # -- losses

    def engine_lost(self, engine: int) -> Sends:
        self._replies.pop(engine, None)
        if self.evaluation is not None:
            self.evaluation.pinning.discard(engine)
        for state in [state for state in self._of(engine) if state.phase is Phase.SAMPLING]:
            self._leave_engine(state)
            self._num_losses[state.prompt_key] += 1
            if self._num_losses[state.prompt_key] >= MAX_LOSSES:
                self._end_without_reward(state, Drop.REFUSED, DEADLY)
            elif state.evaluation is not None:
                state.evaluation.lost(state.eval_place, state.cells[0])
                del self.states[state.id]
            else:
                self._drop(state, Drop.WORKER_DIED)
        return self._outgoing()

    def verifier_lost(
        self, verifier: int, why: str, is_late: bool = False, is_outside: bool = False
    ) -> Sends:
        """A verifier that was killed from outside: retry its request once. Any other crash, and a
        time limit (`is_late`), is blamed on the reward or the reply, and the group is dropped."""
        request = self.at_verifier.pop(verifier, None)
        if request is None or (state := self.states.get(request.group_id)) is None:
            return self._outgoing()
        if is_outside and not state.was_retried:
            state.was_retried = True
            (self._turns if isinstance(request, Ask) else self._grades).append(request)
        else:
            self._failed(request, why, is_late)
        return self._outgoing()

    def roll_back(self, step: int, version: int) -> Sends:
        """The ranks restarted from the checkpoint of `step`, whose weights are republished as
        `version`. What was trained since, and the batch in training, is requeued. Groups that the
        new version makes too old are abandoned."""
        assert self.stream is not None
        if step < self._saved_steps[0]:  # what was trained since is forgotten
            raise MinirlError(f"all checkpoints after step {step} are broken; use --resume")
        untrained = [t for at, tickets in self._trained if at > step for t in tickets]
        self._trained = [(at, tickets) for at, tickets in self._trained if at <= step]
        while self._saved_steps[-1] > step:
            self._saved_steps.pop()
        lost, too_old = self.buffer.roll_back(version, len(untrained))
        self._num_to_score = 0
        for ticket in lost + untrained:
            self._settle(ticket, Drop.WORKER_DIED)
        for state in [self.states[group_id] for group_id in too_old]:
            if state.phase is Phase.READY:
                self._drop(state, Drop.WORKER_DIED)
            else:  # its cells may still be written or read: the slot is free when that has ended
                self._abort(state, Drop.WORKER_DIED)
                state.abort = Drop.WORKER_DIED
        if self.evaluation is not None and self.evaluation.step > step:
            self.evaluation.is_cancelled = True
        return self._outgoing()

    # -- batches

    def next_batch(self, step: int, now: float) -> Batch | None:
        for ticket in self.buffer.take_untrainable():
            self._settle(ticket, Drop.STALE)
        if (batch := self.buffer.next_batch(step, now)) is not None:
            self._num_to_score = MAX_SCORED
            for group in batch.groups:
                self.states[group.id].phase = Phase.TRAINING
        return batch

    def published(self, step: int, now: float) -> None:
        """The batch of `step` has become the next version. Its slots come back with `release`."""
        self._num_to_score = 0
        self.drops.filtered.clear()
        self._trained.append((step, self.buffer.published(now)))

    def release(self) -> None:
        """Nothing reads the cells of the batch that was published last any more."""
        _, tickets = self._trained[-1]
        self.buffer.release(tickets)
        for ticket in tickets:
            self._settle(ticket)

    def saved(self, step: int) -> None:
        """A checkpoint, or what the run begins with, holds all that was trained until `step`."""
        if step not in self._saved_steps:  # else its checkpoint was written again
            self._saved_steps.append(step)
        oldest = self._saved_steps[0]
        self._trained = [(at, tickets) for at, tickets in self._trained if at > oldest]

    @property
    def own(self) -> list[GroupState]:
        """Of training. All are copied first: the dashboard asks from its own thread."""
        return [state for state in list(self.states.values()) if state.evaluation is None]

    @property
    def slots(self) -> dict[str, int]:
        held = Counter(state.phase for state in self.own)
        return {**{str(phase): held[phase] for phase in Phase}, "free": self.buffer.num_free}

    @property
    def prompts_in_flight(self) -> list[int]:
        assert self.stream is not None
        return sorted([state.prompt.index for state in self.own] + self.stream.waiting)

    def stall_facts(self) -> dict[str, object]:
        num_abandoned = sum(state.abort is Drop.WORKER_DIED for state in self.states.values())
        slots = {**self.slots, "abandoned": num_abandoned}
        return {
            "slots": ", ".join(f"{count} {name}" for name, count in slots.items()),
            "ledger": ", ".join(f"{n} {name}" for name, n in self.buffer.ledger._asdict().items()),
            "verifiers": f"{len(self.at_verifier)} busy, {len(self._turns + self._grades)} wait",
            "evaluation": "under way" if self.evaluation else "none",
        }

    # -- ends

    def _drop(self, state: GroupState, reason: Drop, why: str = "") -> None:
        reason = Drop.WORKER_DIED if state.abort is Drop.WORKER_DIED else reason
        self._settle(self.buffer.drop(state.id, reason), reason, why)

    def _settle(self, ticket: Ticket, reason: Drop | None = None, why: str = "") -> None:
        """For good, unless a worker's death did it: then the prompt is requeued under a new group
        id. Without a reason it was trained."""
        assert self.stream is not None
        self.states.pop(ticket.group_id, None)
        if reason is not None:
            self.drops.dropped(reason, why)
        if reason is Drop.WORKER_DIED:
            self.stream.put_back(ticket.prompt_index)
        else:
            self.stream.consumed.add(ticket.prompt_index)

    def _end_without_reward(self, state: GroupState, reason: Drop, why: str) -> None:
        """Rule 7: what could not be graded is never a reward of 0."""
        is_held_out = state.evaluation is not None
        if why:  # else the controller itself gave the group up
            what = f"held-out prompt {state.eval_place}" if is_held_out else f"group {state.id}"
            self._seldom.note(reason, f"no reward for {what} ({reason}): {why}")
        if is_held_out:
            self._evaluated(state, messages.Graded(state.id, error=why))
        else:
            self._drop(state, reason, why)

    def _evaluated(self, state: GroupState, graded: messages.Graded) -> None:
        assert state.evaluation is not None
        reward, text = (*graded.rewards, None)[0], (*graded.texts, None)[0]
        answer, error = state.done.get(0), graded.error
        ended = Ended(state.id, state.cells[0], answer, reward, error, text)
        state.evaluation.end(state.eval_place, ended)
        del self.states[state.id]

    def _leave_engine(self, state: GroupState) -> None:
        self.dispatcher.release(state.assignment, state.num_left)
        self._forget_turns(state)

    def _forget_turns(self, state: GroupState) -> None:
        state.asked.clear()
        self._turns = deque(ask for ask in self._turns if ask.group_id != state.id)

    # -- what is sent

    def _to_engine(self, engine: int, message: object) -> None:
        self._outbox.append((f"{Role.ROLLOUT}-{engine}", message))

    def _outgoing(self) -> Sends:
        for engine in [engine for engine in self._replies if self._may_continue(engine)]:
            replies = self._replies.pop(engine)
            in_order = tuple((*at, replies[at]) for at in sorted(replies))
            self._to_engine(engine, messages.Continue(in_order))
        for rank in range(self.num_verifiers):
            if rank not in self.at_verifier and (waiting := self._turns or self._grades):
                self.at_verifier[rank] = waiting.popleft()
                self._outbox.append((f"{Role.VERIFY}-{rank}", self.at_verifier[rank]))
        sends, self._outbox = self._outbox, []
        return sends

    def _may_continue(self, engine: int) -> bool:
        """At η = 0 only when every sequence of the engine has ended its turn and has a reply."""
        if not self._is_repeatable:
            return True
        replies = self._replies[engine].items()
        num_ready = sum(bool(tokens) and at[0] in self.states for at, tokens in replies)
        return num_ready >= sum(state.num_left for state in self._of(engine))

    def _of(self, engine: int) -> list[GroupState]:
        return [state for state in self.states.values() if state.assignment.engine == engine]


def filter_group(config: Config, group: Group) -> Group | Drop:
    """The group for the buffer, or why it is not worth training. A truncated answer may be masked
    out of the loss: it counts in the mean."""
    if config.buffer.mask_truncated:
        stops = [trajectory.stop for trajectory in group.trajectories]
        cut = frozenset(i for i, stop in enumerate(stops) if stop is StopReason.LENGTH)
        group = group._replace(masked=cut)
    if not group.trained:
        return Drop.TRUNCATED
    is_equal = min(group.rewards) == max(group.rewards)
    return Drop.EQUAL_REWARDS if is_equal and config.buffer.drop_equal_rewards else group
