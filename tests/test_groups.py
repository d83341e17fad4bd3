"""A group's life without processes. By example: turns, retries, blame. And under random histories:
engines, verifiers and ranks that die, several turns, filters, aborts, rollbacks and evaluations.
Every group ends exactly once, nothing of it is left in any table, no cell is reused while a worker
may touch it, the ledger adds up, and the staleness bound holds.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from cases import each_case

from minirl import messages
from minirl.buffer import Buffer, OnStale, republished_as
from minirl.config import Config
from minirl.evaluation import Ended, Evaluation
from minirl.groups import FIRST_EVAL_ID, MAX_LOSSES, MAX_SCORED, Groups, Phase, Sends
from minirl.recipe import build
from minirl.records import Batch, Drop, Example, Prompt, StopReason, Trajectory
from minirl.tasks.prompts import PromptStream

TURN = Trajectory(0, 14, 4, StopReason.STOP, 0, 0)  # of a prompt of ten tokens
TOO_LONG = 17  # every so manieth prompt


class Numbers:
    """A task and its tokenizer: a prompt is its own number, and some are too long."""

    num_train = 10**9

    def train(self, index: int) -> Example:
        return Example(str(index), "")

    def encode(self, text: str) -> list[int]:
        return [int(text)] * (9 if int(text) % TOO_LONG == TOO_LONG - 1 else 1)


def config_of(eta: int = 2, batch: int = 2, size: int = 2) -> Config:
    values = {"tasks.max_prompt_tokens": 8, "rollout.max_new_tokens": 20, "rollout.max_turns": 3}
    values |= {"rollout.group_size": size, "buffer.max_staleness": eta}
    values |= {"train.batch_size": batch, "train.steps": 10**6}
    return build({**values, "buffer.drop_equal_rewards": True})


def groups_of(config: Config, engines: int, verifiers: int, rule: OnStale = OnStale.MASK) -> Groups:
    stream = PromptStream(Numbers(), Numbers(), 0)  # type: ignore[arg-type]
    buffer = Buffer(config.train.batch_size, config.buffer.max_staleness, rule)
    return Groups(config, stream, buffer, engines, verifiers, note=bool)


# By example ---------------------------------------------------------------------------------------


class Desk:
    """Two groups of two, at two engines, and one verifier."""

    def __init__(self) -> None:
        self.groups = groups_of(config_of(), engines=2, verifiers=1)
        sends = self.groups.begin(2, [0, 0], 0, 0.0)
        assert [name for name, _ in sends] == ["rollout-0", "rollout-1"]

    def turn(self, group_id: int, place: int = 0, turn: Trajectory = TURN) -> Sends:
        ended = messages.Finished(((group_id, place, turn),), are_turns=True)
        return self.groups.handle(group_id, ended, 0.0)

    def reply(self, group_id: int, place: int, *tokens: int) -> Sends:
        return self.groups.handle(0, messages.Replied(group_id, place, tokens), 0.0)

    def finish(self, group_id: int) -> messages.Grade:
        both = tuple((group_id, place, TURN) for place in (0, 1))
        ((name, request),) = self.groups.handle(group_id, messages.Finished(both), 0.0)
        assert name == "verify-0" and isinstance(request, messages.Grade)
        return request


@each_case("replies")
def test_reply_continues(case: dict[str, Any]) -> None:
    """The answer goes on unless there is no room for more."""
    changes, num_tokens, continues, why = case.values()
    turn, reply = TURN._replace(**changes), (7,) * num_tokens
    desk = Desk()
    ((name, ask),) = desk.turn(1, 0, turn)
    assert name == "verify-0" and isinstance(ask, messages.Ask) and ask.trajectory == turn
    sends = desk.reply(1, 0, *reply)
    assert sends == [("rollout-1", messages.Continue(((1, 0, reply if continues else ()),)))]
    ended = {True: {}, False: {0: turn._replace(stop=StopReason.LENGTH)}, None: {0: turn}}
    assert desk.groups.states[1].done == ended[continues], why


def test_turns_are_graded_before_groups_and_those_of_a_lost_engine_not_at_all() -> None:
    desk = Desk()
    desk.finish(0)
    assert desk.turn(1, 0) == desk.turn(1, 1) == []
    graded = messages.Graded(0, (1.0, 0.0), ("a", "b"))
    ((_, asked),) = desk.groups.handle(0, graded, 0.0)
    assert isinstance(asked, messages.Ask) and desk.groups.slots["ready"] == 1
    desk.groups.engine_lost(1)
    assert desk.reply(1, 0, 7) == [] and not desk.groups.at_verifier and not desk.groups._turns
    assert desk.groups.buffer.drops == {Drop.WORKER_DIED: 1} and desk.groups.stream is not None
    assert desk.groups.stream.waiting == [1]


def test_at_eta_0_an_engine_gets_all_its_replies_at_once_in_order() -> None:
    groups = groups_of(config_of(eta=0), engines=1, verifiers=4)
    ((_, submit),) = groups.begin(2, [0], 0, 0.0)
    assert isinstance(submit, messages.Submit) and submit.seed is not None
    for group_id, place in ((1, 1), (0, 1), (1, 0), (0, 0)):
        groups.handle(0, messages.Finished(((group_id, place, TURN),), are_turns=True), 0.0)
    assert groups.handle(0, messages.Replied(1, 1, (7,)), 0.0) == []
    assert groups.handle(1, messages.Replied(0, 1, (8,)), 0.0) == []
    assert groups.handle(2, messages.Replied(1, 0, ()), 0.0) == []  # it ends
    replies = ((0, 0, (9,)), (0, 1, (8,)), (1, 0, ()), (1, 1, (7,)))
    assert groups.handle(3, messages.Replied(0, 0, (9,)), 0.0) == [
        ("rollout-0", messages.Continue(replies))
    ]


def test_a_verifier_killed_from_outside_is_retried_once_and_then_the_reward_is_blamed() -> None:
    desk = Desk()
    request = desk.finish(0)
    assert desk.groups.verifier_lost(0, "SIGKILL", is_outside=True) == [("verify-0", request)]
    assert desk.groups.verifier_lost(0, "SIGKILL", is_outside=True) == []
    assert desk.groups.buffer.drops == {Drop.REWARD_ERROR: 1} and 0 not in desk.groups.states
    desk.finish(1)
    assert desk.groups.verifier_lost(0, "too slow", is_late=True) == []
    assert desk.groups.buffer.drops[Drop.REWARD_TIMEOUT] == 1


@pytest.mark.parametrize("is_late", [True, False])
def test_a_reply_that_fails_aborts_its_group(is_late: bool) -> None:
    desk = Desk()
    desk.turn(0)
    assert desk.groups.verifier_lost(0, "!", is_late) == [("rollout-0", messages.Abort(0))]
    assert desk.groups.handle(0, messages.Gone(0, ""), 0.0) == []
    reason = Drop.REPLY_TIMEOUT if is_late else Drop.REPLY_ERROR
    assert desk.groups.buffer.drops == {reason: 1}


def evaluation(count: int, num_cells: int = 99) -> Evaluation:
    prompts = [Prompt(i, Example(str(i), str(i)), (i,)) for i in range(count)]
    return Evaluation(prompts, range(num_cells))


def ended(reward: float | None, stop: StopReason = StopReason.STOP, cell: int = 0) -> Ended:
    return Ended(0, cell, Trajectory(cell, 2, 1, stop, 7, 7), reward)


def test_accuracy_is_the_mean_of_what_was_graded() -> None:
    run = evaluation(4)
    assert list(run.next_to_ask()) == [(i, i) for i in range(4)]
    run.end(0, ended(0.0, StopReason.LENGTH))
    for place, reward in ((1, 1.0), (2, 1.0), (3, None)):  # no verdict is not a 0
        assert not run.is_done
        run.end(place, ended(reward))
    assert run.is_done
    result = run.line(0)
    assert result["low"] < result["accuracy"] == 2 / 3 < result["high"]
    assert (result["count"], result["failures"], result["truncated_frac"]) == (3, 1, 0.25)
    ungraded = evaluation(1)
    ungraded.end(0, Ended(0, 0, None, None))
    assert ungraded.is_done and ungraded.line(0)["accuracy"] is None


def test_where_there_is_one_version_lost_prompts_are_requeued_and_cells_reused() -> None:
    run = evaluation(3, num_cells=2)
    assert list(run.next_to_ask()) == [(0, 0), (1, 1)]
    run.lost(0, 0)
    run.end(1, ended(1.0, cell=1))
    assert list(run.next_to_ask()) == [(2, 0)], "the cell of 1 may still be read"
    assert [place for place, _ in run.take_ended()] == [1] and list(run.take_ended()) == []
    assert list(run.next_to_ask()) == [(0, 1)] and not run.is_void


def test_a_held_out_prompt_that_kills_its_engine_each_time_is_refused() -> None:
    groups = groups_of(config_of(), engines=1, verifiers=0)
    for i in range(MAX_LOSSES + 1):
        run = replace(evaluation(2), version=0)
        groups.evaluate(run)
        answered = messages.Finished(((min(groups.states), 0, TURN),))
        groups.handle(0, messages.Pinned(0), 0.0)
        groups.handle(0, answered, 0.0)
        assert len(groups.states) == (i < MAX_LOSSES), "it is not asked again"
        groups.engine_lost(0)
        assert groups.take_evaluation() is run and run.is_void == (i < MAX_LOSSES - 1)
    assert run.line(0)["failures"] == 2 and not groups.drops.faults, "that is of training alone"


# Under random histories ---------------------------------------------------------------------------


@dataclass
class Answer:
    """A trajectory that an engine writes."""

    cell: int
    head: int
    turns: int = 0
    is_parked: bool = False


@dataclass
class Engine:
    version: int = 0
    is_far: bool = False  # in another box, which newer weights reach some time later
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    said: deque[object] = field(default_factory=deque)  # not received yet

    @property
    def running(self) -> list[tuple[int, int]]:
        return [at for at, answer in self.answers.items() if not answer.is_parked]

    @property
    def is_pinned(self) -> bool:
        return any(group_id >= FIRST_EVAL_ID for group_id, _ in self.answers)


class House:
    """Workers around `Groups`, and what must be true of it."""

    def __init__(self, seed: int):
        self.dice = dice = random.Random(seed)
        eta, batch, size = dice.randint(0, 3), dice.randint(1, 4), dice.randint(2, 3)
        self.config = config_of(eta, batch, size)
        self.engines = [Engine(is_far=dice.random() < 0.3) for _ in range(dice.randint(1, 3))]
        rule = dice.choice(list(OnStale))
        self.groups = groups_of(self.config, len(self.engines), dice.randint(1, 3), rule)
        self.buffer = self.groups.buffer
        self.asked: dict[int, messages.Grade | messages.Ask] = {}  # what each verifier has
        self.latest = self.step = 0
        self.saves = {0: 0}  # those that may be on the disk: step and version
        self.reserved = 0
        self.groups.saved(0)
        self.batch: Batch | None = None
        self.evaluation: Evaluation | None = None
        self.seen: Counter[str] = Counter()
        self.scored: Counter[int] = Counter()  # by version

    def run(self, num_events: int) -> None:
        often = [self.feed, self.write, self.receive, self.grade, self.learn, self.publish]
        rarely = [self.evaluate, self.save, self.kill_engine, self.kill_verifier, self.kill_ranks]
        weights = [8.0] * len(often) + [0.2] * len(rarely)
        for event in self.dice.choices([*often, *rarely], weights, k=num_events):
            event()
            self.check()
        self.drain()

    def deliver(self, sends: Sends) -> None:
        for name, message in sends:
            role, _, rank = name.partition("-")
            if role == "verify":
                assert int(rank) not in self.asked, "one request at a time"
                assert isinstance(message, messages.Grade | messages.Ask)
                self.asked[int(rank)] = message
            else:
                self.tell(self.engines[int(rank)], message)

    def tell(self, engine: Engine, message: object) -> None:
        match message:
            case messages.Submit():
                self.load_weights(engine)
                if any(group.is_eval for group in message.groups):
                    engine.said.append(messages.Pinned(engine.version))
                for group in message.groups:
                    self.start(engine, group)
            case messages.Abort():
                for at in [at for at in engine.answers if at[0] == message.group_id]:
                    del engine.answers[at]
                engine.said.append(messages.Gone(message.group_id, ""))
            case messages.Continue():
                for *at, tokens in message.replies:
                    if tokens and tuple(at) in engine.answers:
                        engine.answers[*at].is_parked = False
                    else:
                        engine.answers.pop(tuple(at), None)
            case messages.Score(version, cells):
                # Of the weights that the batch in training started from, before the next are out.
                assert self.batch is not None and version == self.batch.version == self.latest
                for cell, scored_id in cells:
                    assert cell in self.groups.states[scored_id].cells
                    assert self.groups.states[scored_id].evaluation is None
                self.scored[version] += len(cells)
                assert self.scored[version] <= MAX_SCORED
                self.seen["scored"] += 1

    def start(self, engine: Engine, group: messages.GroupRequest) -> None:
        if self.dice.random() < 0.03:
            engine.said.append(messages.Gone(group.group_id, "too long for the engine"))
            return
        for place, cell in enumerate(group.cells):
            engine.answers[group.group_id, place] = Answer(cell, engine.version)

    def load_weights(self, engine: Engine) -> None:
        if not engine.is_pinned and (not engine.is_far or self.dice.random() < 0.2):
            engine.version = self.latest

    # -- what happens

    def feed(self) -> None:
        if not (self.buffer.max_staleness == 0 and self.groups.evaluation):
            older = [e.version if e.is_pinned or e.is_far else self.latest for e in self.engines]
            served: list[int | None] = [min(version, self.buffer.version) for version in older]
            if self.engines[0].is_far and self.dice.random() < 0.2:
                served[0] = None
            self.deliver(self.groups.begin(10**6, served, self.step, 0.0))

    def write(self) -> None:
        self.write_answers(self.dice.choice(self.engines), self.dice.randint(0, 8), 0.3)

    def write_answers(self, engine: Engine, most: int, share_of_turns: float) -> None:
        self.load_weights(engine)
        for at in engine.running[:most]:
            answer = engine.answers[at]
            versions = (answer.head, engine.version)
            turns, replied = answer.turns + 1, 2 * answer.turns
            done = Trajectory(answer.cell, 30, 4, StopReason.STOP, *versions, replied, turns)
            if self.dice.random() < share_of_turns:
                answer.turns, answer.is_parked = turns, True
                engine.said.append(messages.Finished(((*at, done),), are_turns=True))
                self.seen["turns"] += 1
            else:
                del engine.answers[at]
                engine.said.append(messages.Finished(((*at, done),)))

    def receive(self) -> None:
        self.receive_from(self.dice.randrange(len(self.engines)), self.dice.randint(1, 4))

    def receive_from(self, rank: int, most: int) -> None:
        said = self.engines[rank].said
        for message in [said.popleft() for _ in range(min(most, len(said)))]:
            self.deliver(self.groups.handle(rank, message, 0.0))

    def grade(self) -> None:
        for rank in list(self.asked):
            request = self.asked.pop(rank)
            error = "!" if self.dice.random() < 0.1 else ""
            if isinstance(request, messages.Ask):
                tokens = () if error or self.dice.random() < 0.4 else (7, 7)
                message: object = messages.Replied(request.group_id, request.place, tokens, error)
            else:
                texts = () if error else ("text",) * len(request.trajectories)
                rewards = tuple(self.dice.choice([0.0, 1.0]) for _ in texts)
                message = messages.Graded(request.group_id, rewards, texts, error)
            self.deliver(self.groups.handle(rank, message, 0.0))

    def learn(self) -> None:
        self.deliver(self.groups.expire())
        is_pinning = self.groups.evaluation is not None and self.groups.evaluation.pinning
        if self.batch is not None or is_pinning:
            return
        self.batch = self.groups.next_batch(self.step + 1, 0.0)
        if self.batch is not None:
            oldest = self.buffer.version - self.buffer.max_staleness
            for group in self.batch.groups:
                assert self.groups.states[group.id].phase is Phase.TRAINING
                is_masked = self.buffer.on_stale is OnStale.MASK
                assert (group.newest_version if is_masked else group.head_version) >= oldest

    def publish(self) -> None:
        if self.batch is None:
            return
        self.step, self.latest = self.step + 1, self.buffer.version + 1
        self.groups.published(self.step, 0.0)
        assert self.buffer.version == self.latest
        assert all(group.id in self.groups.states for group in self.batch.groups)
        self.groups.release()
        self.batch = None
        self.seen["steps"] += 1

    def save(self) -> None:
        if self.batch is None:
            self.groups.saved(self.step)
            self.saves[self.step] = self.buffer.version
            if len(self.saves) > self.config.checkpoint.keep:
                del self.saves[min(self.saves)]

    def evaluate(self) -> None:
        if self.batch is None and self.groups.evaluation is None:
            prompts = [Prompt(i, Example(str(i), ""), (1,)) for i in range(self.dice.randint(1, 6))]
            first = self.buffer.num_slots * self.config.rollout.group_size
            cells = range(first, first + len(prompts))
            self.evaluation = Evaluation(prompts, cells, self.step, self.buffer.version)
            engines = enumerate(self.engines)
            able = [i for i, e in engines if not e.is_far or e.version == self.latest]
            self.deliver(self.groups.evaluate(self.evaluation, able or None))

    def kill_engine(self) -> None:
        rank = self.dice.randrange(len(self.engines))
        while self.engines[rank].said:  # every message is received before the death
            self.receive_from(rank, 1)
        self.engines[rank] = Engine(self.latest, self.engines[rank].is_far)
        self.deliver(self.groups.engine_lost(rank))
        self.seen["engine lost"] += 1

    def kill_verifier(self) -> None:
        if self.asked:
            rank = self.dice.choice(list(self.asked))
            del self.asked[rank]
            how = self.dice.choice([{}, {"is_late": True}, {"is_outside": True}])
            self.deliver(self.groups.verifier_lost(rank, "it died", **how))
            self.seen["verifier lost"] += 1

    def kill_ranks(self) -> None:
        """Perhaps again while they load, and perhaps the newest checkpoint is broken."""
        while True:
            if len(self.saves) > 1 and self.dice.random() < 0.2:
                del self.saves[max(self.saves)]
                self.seen["broken"] += 1
            self.step, self.batch = max(self.saves), None
            self.reserved = republished_as(self.saves[self.step], self.latest, self.reserved)
            self.deliver(self.groups.roll_back(self.step, self.reserved))
            self.seen["rollback"] += 1
            assert self.buffer.ledger.trained == self.step * self.buffer.batch_size
            if self.dice.random() < 0.7:
                break
        self.latest = self.reserved

    # -- what is true

    def check(self) -> None:
        if (ended := self.groups.take_evaluation()) is not None:
            assert ended is self.evaluation
            versions = [e.trajectory for e in ended.ended.values() if e.trajectory]
            if not ended.is_void:
                assert len(ended.ended) == len(ended.prompts) and not ended.pinning
                assert all(t.head_version == t.tail_version == ended.version for t in versions)
            self.seen["void" if ended.is_void else "evaluated"] += 1
        states, stream, ledger = self.groups.states, self.groups.stream, self.buffer.ledger
        assert stream is not None
        own = [state for state in states.values() if state.evaluation is None]
        assert ledger.in_flight == self.buffer.num_in_flight == len(own)
        assert ledger.submitted == ledger.trained + ledger.dropped + ledger.in_flight
        indices = [state.prompt.index for state in own] + stream.waiting
        assert len(set(indices)) == len(indices), "a prompt is in two places"
        assert not any(index in stream.consumed for index in indices)
        cells = [cell for state in states.values() for cell in state.cells]
        assert len(set(cells)) == len(cells), "a cell has two groups"
        for engine in self.engines:
            for group_id, _ in engine.running:
                assert states[group_id].phase is Phase.SAMPLING, "its cells are still written to"
        for request in self.asked.values():
            is_needed = isinstance(request, messages.Grade)
            assert not is_needed or states[request.group_id].phase is Phase.GRADING

    def drain(self) -> None:
        """When nothing more is begun all groups end, and nothing is left of any."""
        for _ in range(10_000):
            for rank, engine in enumerate(self.engines):
                self.write_answers(engine, 10**6, 0.0)
                self.receive_from(rank, 10**6)
            self.grade()
            self.check()
            waiting = [s for s in self.groups.states.values() if s.phase is not Phase.TRAINING]
            if all(state.phase is Phase.READY for state in waiting):
                break
        for state in waiting:
            self.groups._drop(state, Drop.STALE)
        self.publish()
        self.check()
        groups = self.groups
        assert not groups.states and not groups.at_verifier and not self.asked
        assert not (groups._grades or groups._turns or groups._replies)
        assert not any(groups.dispatcher._load)
        assert self.buffer.num_free == self.buffer.num_slots and not self.groups.evaluation


@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_random_histories_hold_and_go_through_what_they_claim(count: int) -> None:
    """By plain seeds: a failure names the one to run again."""
    seen, drops = Counter[str](), Counter[Drop]()
    for seed in range(count):
        house = House(seed)
        try:
            house.run(random.Random(seed).randint(1, 500))
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        seen += house.seen
        drops += house.buffer.drops
    expected = {"turns", "engine lost", "verifier lost", "rollback", "void", "evaluated", "scored"}
    expected |= {"broken"}
    assert expected <= seen.keys()
    missing = set(Drop) - {Drop.TRUNCATED} - drops.keys()
    assert not missing and seen["steps"] > 150, (missing, seen)
