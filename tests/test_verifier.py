"""The verifier, as the real process it is: a reward that fails is never a 0."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import DATA
from processes import Inbox, crew
from tiny_models import tokenizer

from minirl.config import Config, TasksConfig
from minirl.devices import Placement
from minirl.messages import Ask, Died, Grade, Graded, Replied, Role
from minirl.records import Example, StopReason, Trajectory
from minirl.shm.board import State
from minirl.shm.ring import TrajectoryRing
from minirl.tasks.turns import Dialogue
from minirl.tasks.verifier import VerifierSetup

TOKENIZER = tokenizer(512)
EXAMPLE = Example("q", "right")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verifier")
    TOKENIZER.save_pretrained(folder)
    (folder / "moody.py").write_text((DATA / "moody_task.txt").read_text())
    return folder


class Bench:
    """One verifier and a ring to put answers into."""

    def __init__(self, folder: Path, inbox: Inbox, task: str = "Moody"):
        self.ring, self.inbox, self.workers = TrajectoryRing(8, 64), inbox, inbox.workers
        tasks = TasksConfig(kind=f"{folder / 'moody.py'}:{task}", memory_gib=0.75)
        setup = VerifierSetup(Config(tasks=tasks), str(folder), self.ring, Dialogue())
        body, place = "minirl.tasks.verifier:run", Placement("cpu")
        self.worker = self.workers.spawn(Role.VERIFY, 0, body, setup, place)

    def write(self, cell: int, group_id: int, turns: tuple[str, ...]) -> Trajectory:
        """The model's texts and the replies, in turn."""
        said = [(t, i % 2) for i, text in enumerate(turns) for t in TOKENIZER.encode(text)]
        tokens = [token for token, _ in said]
        versions = [-1 if is_reply else 3 for _, is_reply in said]
        self.ring.write(cell, group_id, [1, 1], tokens, [-1.0] * len(tokens), versions)
        return Trajectory(cell, 2 + len(tokens), versions.count(3), StopReason.STOP, 3, 3)

    def ask(self, request: Grade | Ask) -> Any:
        self.worker.send(request)
        return self.receive()

    def grade(self, group_id: int, *texts: str) -> Grade:
        answers = tuple(self.write(i, group_id, (text,)) for i, text in enumerate(texts))
        return Grade(group_id, EXAMPLE, answers)

    def turn(self, group_id: int, *turns: str) -> Ask:
        return Ask(group_id, 0, EXAMPLE, self.write(0, group_id, turns))

    def receive(self) -> Any:
        self.inbox.wait_until(lambda: bool(self.inbox.messages))
        return self.inbox.messages.pop(0)[1]


@pytest.fixture
def bench(folder: Path, tmp_path: Path) -> Iterator[Bench]:
    with crew(tmp_path, 1) as inbox:
        yield Bench(folder, inbox)


def test_rewards_and_texts_come_in_order_and_a_failure_is_never_a_0(bench: Bench) -> None:
    texts = ("right", "wrong", "right", "wrong right")  # no prompt, no special token
    request = bench.grade(4, "right<eos>", *texts[1:])
    assert bench.ask(request) == Graded(4, (1.0, 0.0, 1.0, 0.0), texts)
    numbers = {"nan": "nan", "inf": "inf", "text": "'not a number'"}
    failures = {word: f"the reward is {n}, not a finite number" for word, n in numbers.items()}
    failures["raise"] = "no idea (moody.py, line 13, in reward)"
    for i, (text, error) in enumerate(failures.items()):
        assert bench.ask(bench.grade(i, "right", text)) == Graded(i, error=f"ValueError: {error}")


def test_a_reward_that_takes_too_much_memory_costs_its_verifier(bench: Bench) -> None:
    died = bench.ask(bench.grade(1, "right", "huge"))
    assert isinstance(died, Died) and died.how.startswith("MemoryError") and not died.is_final
    state = bench.workers.board.row(bench.worker.row).state
    assert state is State.GRADING  # the controller blames the reward


def test_a_task_that_cannot_be_loaded_is_final(folder: Path, tmp_path: Path) -> None:
    with crew(tmp_path, 1) as inbox:
        died = Bench(folder, inbox, task="Missing").receive()
    assert isinstance(died, Died) and died.is_final
    assert "tasks.kind" in died.how and "Missing" in died.how


def test_a_reply_is_given_as_its_own_tokens_and_none_ends_the_conversation(bench: Bench) -> None:
    reply = tuple(TOKENIZER.encode("text right"))
    assert bench.ask(bench.turn(1, "wrong")) == Replied(1, 0, reply)
    turns = ("wrong<eos>", "text right", "right wrong", "text right", "wrong")
    assert bench.ask(bench.turn(1, *turns)) == Replied(1, 0, reply)  # it saw its own replies
    ended = bench.turn(1, "wrong", "text right", "right<eos>")
    assert bench.ask(ended) == Replied(1, 0, ())
    graded = bench.ask(Grade(1, EXAMPLE, (ended.trajectory,)))  # by the last turn; people see all
    assert graded == Graded(1, (1.0,), ("wrong⟦text right⟧right",))
    state, process = State.WAITING_FOR_ANSWERS, bench.worker.process
    bench.inbox.wait_until(lambda: bench.workers.board.row(0).state is state, listen_s=0.01)
    bench.workers.stop(goodbye="anything else")
    assert process.exitcode == 0


def test_a_reply_that_fails_says_why(bench: Bench) -> None:
    failures = {"raise": "KeyError: 'no idea'", "nan": "ValueError: the reply has no token"}
    for text, error in {**failures, "inf": "TypeError"}.items():  # 3 is no text
        replied = bench.ask(bench.turn(2, text))
        assert replied.tokens == () and replied.error.startswith(error)
    lost = bench.turn(3, "wrong")._replace(group_id=2)  # its group was dropped meanwhile
    assert "sealed for 3, not for 2" in bench.ask(lost).error
    assert bench.ask(bench.turn(4, "exit")) == Died("ended with exit code 5", is_final=False)
    assert bench.workers.board.row(bench.worker.row).state is State.GRADING
