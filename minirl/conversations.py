"""Answers of several turns, on the controller's side: who waits for a reply, and who gets it.

    worker ──TurnEnded──► ask ──Ask──► a verifier ──Replied──► reply ──Continue──► the same worker

Takes turns that ended and replies, gives what to tell each engine, and the trajectories that have
come to their end: where the task has no reply; and, as cut, where the reply leaves no room for a
written token in rollout.max_new_tokens, or where rollout.max_turns are over. The last turn is in
the ring already, so its descriptor is the trajectory's.

A reply to a group that is gone is nobody's: asks are told apart as objects, since an evaluation's
group ids come again. A pure structure: the loop sends and hears.

At η = 0 replies are held back until every sequence of an engine has ended its turn, and are given
to it all at once, in order: what the engine does next does not depend on when a reply came.
"""

from collections import defaultdict
from collections.abc import Iterator

from minirl.config import Config
from minirl.records import Example, StopReason, Trajectory
from minirl.rollout.dispatch import Dispatcher
from minirl.rollout.worker import Continue
from minirl.tasks.grading import GradingQueue
from minirl.tasks.verifier import Ask

Place = tuple[int, int]  # group id, place in the group


class Conversations:
    def __init__(
        self, config: Config, dispatcher: Dispatcher, grading: GradingQueue, in_step: bool
    ):
        self._config, self._dispatcher, self._grading = config, dispatcher, grading
        self._in_step = in_step
        self._asked: dict[Place, tuple[int, Ask]] = {}  # with the engine
        self._replies: dict[int, dict[Place, tuple[int, ...]]] = defaultdict(dict)  # by engine

    def ask(self, group_id: int, place: int, example: Example, trajectory: Trajectory) -> None:
        engine = self._dispatcher.worker_of(group_id)
        assert engine is not None
        request = Ask(group_id, place, example, trajectory)
        self._asked[group_id, place] = (engine, request)
        self._grading.add(request)

    def is_awaited(self, request: Ask) -> bool:
        return self._asked.get((request.group_id, request.place), (0, None))[1] is request

    def reply(self, request: Ask, tokens: tuple[int, ...]) -> Trajectory | None:
        """The trajectory, if it ends here; no tokens: it does."""
        engine, _ = self._asked.pop((request.group_id, request.place))
        done, rollout = request.trajectory, self._config.rollout
        is_cut = bool(tokens) and (
            done.num_turns >= rollout.max_turns
            or done.num_new + len(tokens) >= rollout.max_new_tokens
        )
        goes_on = bool(tokens) and not is_cut
        self._replies[engine][request.group_id, request.place] = tokens if goes_on else ()
        if goes_on:
            return None
        return done._replace(stop=StopReason.LENGTH) if is_cut else done

    def forget(self, group_id: int) -> None:
        """Nothing more will come of it."""
        self._asked = {at: entry for at, entry in self._asked.items() if at[0] != group_id}
        for replies in self._replies.values():
            for at in [at for at in replies if at[0] == group_id]:
                del replies[at]

    def lost(self, engine: int) -> None:
        """It died, with all that it had begun."""
        self._asked = {at: entry for at, entry in self._asked.items() if entry[0] != engine}
        self._replies.pop(engine, None)

    def outgoing(self) -> Iterator[tuple[int, Continue]]:
        """One message an engine."""
        for engine in [engine for engine, replies in self._replies.items() if replies]:
            replies = self._replies[engine]
            num_ready = sum(bool(tokens) for tokens in replies.values())
            if self._in_step and num_ready < self._dispatcher.num_left(engine):
                continue
            del self._replies[engine]
            yield engine, Continue(tuple((*at, replies[at]) for at in sorted(replies)))
