"""Asks and grades: a plain loop over one session's engines and verifiers.

    feed      while there are free cells, send problems to the engines, each with its k answers
    collect   answers to grade, rewards, deaths

An engine that dies is replaced and its problems are asked again; a verifier that hangs or dies
costs the one answer that it was at, and so does a reply that fails, where a task has several turns.
No reward is ever made up (rule 7).
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from minirl.config import Config
from minirl.conversations import Conversations
from minirl.records import Prompt, Trajectory
from minirl.rollout.dispatch import Dispatcher
from minirl.rollout.worker import Finished, Gone, GroupRequest, Submit, TurnEnded
from minirl.shm.board import State
from minirl.tasks.grading import GradingQueue
from minirl.tasks.turns import readable, texts_of
from minirl.tasks.verifier import Ask, Grade, Graded, Replied
from minirl.tools.evaluate.results import Attempt, Result
from minirl.tools.evaluate.session import LISTEN_S, MAX_STARTS, Session, View
from minirl.workers import Died, Role, Worker


class Examiner:
    """Group ids are the problems' places in `prompts`; `keep` is told each result as it comes."""

    def __init__(
        self,
        config: Config,
        session: Session,
        prompts: Sequence[Prompt],
        k: int,
        tokenizer: Any,
        view: View,
        keep: Callable[[Result], None],
    ):
        self.config, self.session, self.prompts, self.k = config, session, prompts, k
        self.tokenizer, self.view, self.keep = tokenizer, view, keep
        self.dispatcher = Dispatcher(len(session.engines), config.rollout.max_new_tokens)
        self.grading = GradingQueue()
        self.conversations = Conversations(config, self.dispatcher, self.grading, in_step=False)
        self.to_ask = list(range(len(prompts) - 1, -1, -1))  # the next is the last
        self.free = list(range(session.ring.num_cells // k))
        self.slots: dict[int, int] = {}  # by group, while it is asked or graded
        self.done: dict[int, dict[int, Trajectory]] = defaultdict(dict)
        self.errors: dict[int, dict[int, str]] = defaultdict(dict)  # by group and answer
        self.is_seeded: set[int] = set()
        self.num_ended = self.num_refused = 0
        self.engine_news = time.monotonic()

    def run(self) -> None:
        while self.num_ended < len(self.prompts):
            self.feed()
            self.collect()

    # -- feed

    def feed(self) -> None:
        requests: dict[int, list[GroupRequest]] = defaultdict(list)
        while self.to_ask and self.free:
            group_id, slot = self.to_ask.pop(), self.free.pop()
            self.slots[group_id] = slot
            engine = self.dispatcher.assign(group_id, self.k)
            cells = tuple(range(slot * self.k, (slot + 1) * self.k))
            prompt = self.prompts[group_id].tokens
            requests[engine].append(GroupRequest(group_id, prompt, cells, is_eval=True))
        for engine, groups in requests.items():
            self.session.engines[engine].send(Submit(tuple(groups), self.seed(engine)))

    def seed(self, engine: int) -> int | None:
        """Once an engine: where all problems fit at once, one engine and one seed give one exam
        (not where a task has several turns: replies come when they come)."""
        if engine in self.is_seeded:
            return None
        self.is_seeded.add(engine)
        return random.Random(f"{self.config.seed}/exam/{engine}").getrandbits(31)

    # -- collect

    def collect(self) -> None:
        for worker, message in self.session.fleet.hear(LISTEN_S):
            match message:
                case Finished():
                    for group_id, place, trajectory in message.trajectories:
                        self.on_answer(group_id, place, trajectory)
                case TurnEnded():
                    for group_id, place, trajectory in message.trajectories:
                        example = self.prompts[group_id].example
                        self.conversations.ask(group_id, place, example, trajectory)
                case Gone():
                    self.on_refusal(message)
                case Graded():
                    self.on_graded(worker, message)
                case Replied():
                    self.on_reply(worker, message)
                case Died():
                    self.on_death(worker, message)
        for engine, replies in self.conversations.outgoing():
            self.session.engines[engine].send(replies)
        verifiers = self.session.verifiers
        for name, request in self.grading.assign(verifiers):
            verifiers[name].send(request)
        self.end_slow_rewards()
        self.session.check_beats(self.config.log.stall_s)

    def on_answer(self, group_id: int, place: int, trajectory: Trajectory) -> None:
        self.dispatcher.trajectory_done(group_id, trajectory.num_written)
        done = self.done[group_id]
        done[place] = trajectory
        if len(done) == self.k:
            in_order = tuple(done[i] for i in range(self.k))
            example = self.prompts[group_id].example
            skip = tuple(self.errors[group_id])  # those whose reply failed
            self.grading.add(Grade(group_id, example, in_order, self.k, skip))

    def on_reply(self, verifier: Worker, replied: Replied) -> None:
        request = self.grading.done(verifier.name)
        assert isinstance(request, Ask) and request.group_id == replied.group_id
        if replied.error:
            self.reward_failed(request, request.place, replied.error)
        else:
            self.go_on(request, replied.tokens)

    def go_on(self, request: Ask, tokens: tuple[int, ...]) -> None:
        if self.conversations.is_awaited(request):
            ended = self.conversations.reply(request, tokens)
            if ended is not None:
                self.on_answer(request.group_id, request.place, ended)

    def on_refusal(self, gone: Gone) -> None:
        self.view.note(f"the engine refused problem {gone.group_id}: {gone.why}")
        self.dispatcher.forget(gone.group_id)
        self.conversations.forget(gone.group_id)
        self.num_refused += 1
        self.end(gone.group_id)

    def on_graded(self, verifier: Worker, graded: Graded) -> None:
        request = self.grading.done(verifier.name)
        assert isinstance(request, Grade) and request.group_id == graded.group_id
        group_id, errors = request.group_id, self.errors[request.group_id]
        prompt, answers = self.prompts[group_id], []
        for place, trajectory in enumerate(request.trajectories):
            reward = graded.rewards[place]
            error = "" if reward is not None else errors.get(place, graded.error)
            text = graded.texts[place] or self.text_of(trajectory, group_id)
            stop = trajectory.stop.name.lower()
            answers.append(Attempt(text, reward, trajectory.num_written, stop, error))
        example = prompt.example
        self.keep(Result(prompt.index, example.prompt, example.reference, tuple(answers)))
        self.end(group_id)

    def text_of(self, trajectory: Trajectory, group_id: int) -> str:
        view = self.session.ring.read(trajectory.cell, group_id)
        return readable(texts_of(view, self.tokenizer, self.session.dialogue))

    def end(self, group_id: int) -> None:
        self.free.append(self.slots.pop(group_id))
        self.done.pop(group_id, None)
        self.num_ended += 1

    # -- faults

    def on_death(self, worker: Worker, death: Died) -> None:
        if death.is_final or (worker.role is Role.ROLLOUT and worker.num_starts >= MAX_STARTS):
            raise self.session.no_use(worker, death)
        self.view.note(f"{worker.name} {death.how}: replaced")
        place = self.session.fleet.board.row(worker.row).running
        self.session.fleet.replace(worker)
        if worker.role is Role.VERIFY:
            request = self.grading.done(worker.name)
            if request is not None:
                self.reward_failed(request, place, f"its verifier {death.how}")
            return
        self.conversations.lost(worker.rank)
        for group_id in self.dispatcher.lost(worker.rank):  # cells are its own until it is done
            self.free.append(self.slots.pop(group_id))
            self.done.pop(group_id, None)
            self.errors.pop(group_id, None)
            self.to_ask.append(group_id)

    def end_slow_rewards(self) -> None:
        for name, verifier in self.session.verifiers.items():
            row = self.session.fleet.board.row(verifier.row)
            is_late = row.state is State.GRADING and row.since_s > self.config.tasks.timeout_s
            if is_late and self.grading.is_busy(name):
                request = self.grading.done(name)
                assert request is not None
                self.session.fleet.replace(verifier)
                limit = f"took longer than tasks.timeout_s = {self.config.tasks.timeout_s:g}"
                self.reward_failed(request, row.running, limit)

    def reward_failed(self, request: Grade | Ask, place: int, why: str) -> None:
        """It took its verifier down: the others are graded again, without it. An answer whose
        reply failed ends there, and is not graded."""
        if isinstance(request, Ask):
            if self.conversations.is_awaited(request):
                self.errors[request.group_id][request.place] = why
                self.go_on(request, ())
            return
        self.errors[request.group_id][place] = why
        self.grading.add(replace(request, skip=(*request.skip, place)))
