"""The verifier, as the real process it is: a reward that fails is never a 0."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from minirl.config import Config
from minirl.devices import Placement
from minirl.records import Example, StopReason, Trajectory
from minirl.shm.board import State
from minirl.shm.ring import TrajectoryRing
from minirl.tasks.turns import Dialogue
from minirl.tasks.verifier import Ask, Grade, Graded, Replied, VerifierSetup
from minirl.workers import Died, Role, Worker, Workers

WORDS = ["<end>", "question", "right", "wrong", "raise", "nan", "inf", "hang", "exit", "text"]
WORDS += ["huge"]
LONG_S = 60.0
EXAMPLE = Example("question", "right")
TASK = """
import os, time
from types import SimpleNamespace

class Moody:
    num_train = 1

    def __init__(self, config, seed):
        pass

    def reward(self, example, answer):
        if "huge" in answer.text:
            return len(bytearray(2**30))
        if "raise" in answer.text:
            raise ValueError("no idea")
        if "hang" in answer.text:
            time.sleep(600)
        if "exit" in answer.text:
            os._exit(5)
        if "nan" in answer.text or "inf" in answer.text:
            return float(answer.text.split()[0])
        if "text" in answer.text:
            return "not a number"
        return answer.text == example.reference

    def reply(self, example, turns):
        if len(turns) > 1:
            assert turns[1::2] == ("text right",) * (len(turns) // 2), turns
        match turns[-1]:
            case "huge" | "raise" | "hang" | "exit" as word:
                return self.reward(example, SimpleNamespace(text=word)) and None
            case "nan":
                return ""
            case "inf":
                return 3
            case "wrong":
                return "text right"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verifier")
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "moody.py").write_text(TASK)
    return folder


class Bench:
    """One verifier and a ring to put answers into."""

    def __init__(self, folder: Path, log_dir: Path, task: str = "Moody"):
        self.ring = TrajectoryRing(num_cells=8, cell_tokens=16)
        self.workers = Workers(log_dir, num_workers=1)
        config = Config()
        kind = f"{folder / 'moody.py'}:{task}"
        config = replace(config, tasks=replace(config.tasks, kind=kind, memory_gib=0.75))
        setup = VerifierSetup(config, str(folder), self.ring, Dialogue())
        self.worker: Worker = self.workers.spawn(
            Role.VERIFY, 0, "minirl.tasks.verifier:run", setup, Placement("cpu")
        )

    def write(self, cell: int, group_id: int, turns: tuple[str, ...]) -> Trajectory:
        """The model's texts and the replies, in turn."""
        tokens, versions = [], []
        for number, text in enumerate(turns):
            ids = [WORDS.index(word) for word in text.split()]
            tokens += ids
            versions += [-1 if number % 2 else 3] * len(ids)
        self.ring.write(cell, group_id, [1, 1], tokens, [-1.0] * len(tokens), versions)
        written = sum(version >= 0 for version in versions)
        return Trajectory(cell, 2 + len(tokens), written, StopReason.STOP, 3, 3)

    def ask(self, group_id: int, *texts: str, **limits: Any) -> None:
        answers = tuple(self.write(i, group_id, (text,)) for i, text in enumerate(texts))
        self.worker.send(Grade(group_id, EXAMPLE, answers, **limits))

    def ask_reply(self, group_id: int, *turns: str) -> None:
        self.worker.send(Ask(group_id, 0, EXAMPLE, self.write(0, group_id, turns)))

    def receive(self) -> Any:
        deadline = time.monotonic() + LONG_S
        while time.monotonic() < deadline:
            for _, message in self.workers.receive(1.0):
                return message
        raise AssertionError("the verifier said nothing")


@pytest.fixture
def bench(folder: Path, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(folder, tmp_path)
    yield bench
    bench.workers.kill()


def test_rewards_and_texts_come_in_the_order_of_the_group(bench: Bench) -> None:
    bench.ask(4, "right <end>", "wrong", "right", "wrong right")
    texts = ("right", "wrong", "right", "wrong right")  # no prompt, no special token
    assert bench.receive() == Graded(4, (1.0, 0.0, 1.0, 0.0), texts)


def test_a_reward_that_fails_is_an_error_for_the_whole_group_and_never_a_0(bench: Bench) -> None:
    failures = {
        "raise": "ValueError: no idea",
        "nan": "ValueError: reward is nan",
        "inf": "ValueError: reward is inf",
        "text": "ValueError: could not convert string to float: 'not a number'",
    }
    for group_id, (text, error) in enumerate(failures.items()):
        bench.ask(group_id, "right", text)
        assert bench.receive() == Graded(group_id, (), (), error)
    texts = ("right", "raise", "wrong")  # but as many may fail as the request says
    bench.ask(5, *texts, max_failures=1)
    assert bench.receive() == Graded(5, (1.0, None, 0.0), texts, "ValueError: no idea")
    bench.ask(6, "hang", "raise", "right", max_failures=2, skip=(0,))
    assert bench.receive() == Graded(
        6, (None, None, 1.0), ("", "raise", "right"), "ValueError: no idea"
    )


def test_a_reward_that_hangs_is_seen_on_the_board_and_its_verifier_can_be_replaced(
    bench: Bench,
) -> None:
    bench.ask(1, "right", "hang")
    deadline = time.monotonic() + LONG_S
    while True:
        row = bench.workers.board.row(bench.worker.row)
        if row.state is State.GRADING and row.since_s > 0.3:
            break
        assert time.monotonic() < deadline, row
        assert list(bench.workers.receive(0.02)) == []
    bench.workers.replace(bench.worker)
    bench.ask(2, "right")
    assert bench.receive() == Graded(2, (1.0,), ("right",))


def test_a_reward_that_takes_too_much_memory_costs_its_verifier(bench: Bench) -> None:
    bench.ask(1, "right", "huge")
    died = bench.receive()
    assert isinstance(died, Died) and died.how.startswith("MemoryError") and not died.is_final
    row = bench.workers.board.row(bench.worker.row)
    assert (row.state, row.running) == (State.GRADING, 1)  # what the controller goes by


def test_an_answer_of_another_group_is_not_graded(bench: Bench) -> None:
    trajectory = bench.write(0, 1, ("right",))
    bench.worker.send(Grade(2, EXAMPLE, (trajectory,)))
    died = bench.receive()
    assert isinstance(died, Died) and "sealed for 1, not for 2" in died.how


def test_a_task_that_cannot_be_loaded_is_final(folder: Path, tmp_path: Path) -> None:
    bench = Bench(folder, tmp_path, task="Missing")
    died = bench.receive()
    bench.workers.kill()
    assert isinstance(died, Died) and died.is_final
    assert "tasks.kind" in died.how and "Missing" in died.how


def test_it_waits_for_answers_until_goodbye_ends_it(bench: Bench) -> None:
    bench.ask(1, "right")
    bench.receive()
    deadline = time.monotonic() + LONG_S
    while bench.workers.board.row(0).state is not State.WAITING_FOR_ANSWERS:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process = bench.worker.process
    bench.workers.stop(goodbye="anything else")
    assert process.exitcode == 0


def test_a_reply_is_given_as_its_own_tokens_and_none_ends_the_conversation(bench: Bench) -> None:
    reply = (WORDS.index("text"), WORDS.index("right"))
    bench.ask_reply(1, "wrong")
    assert bench.receive() == Replied(1, 0, reply)
    bench.ask_reply(1, "wrong <end>", "text right", "right wrong", "text right", "wrong")
    assert bench.receive() == Replied(1, 0, reply)  # and its task saw its own replies as they were
    bench.ask_reply(1, "wrong", "text right", "right <end>")
    assert bench.receive() == Replied(1, 0, ())
    trajectory = bench.write(0, 1, ("wrong", "text right", "right <end>"))
    bench.worker.send(Grade(1, EXAMPLE, (trajectory,)))  # a reward sees the last turn, people all
    assert bench.receive() == Graded(1, (1.0,), ("wrong⟦text right⟧right",))


def test_a_reply_that_fails_says_why(bench: Bench) -> None:
    failures = {
        "raise": "ValueError: no idea",
        "nan": "ValueError: the reply has no token; None ends the conversation",
    }
    for text, error in failures.items():
        bench.ask_reply(2, text)
        assert bench.receive() == Replied(2, 0, (), error)
    bench.ask_reply(2, "inf")  # replies 3, which is no text
    assert bench.receive().error.startswith("TypeError")
    bench.worker.send(Ask(2, 0, EXAMPLE, bench.write(0, 3, ("wrong",))))
    assert "sealed for 3, not for 2" in bench.receive().error  # the group is gone, it lives
    bench.ask_reply(4, "exit")
    assert bench.receive() == Died("ended with exit code 5", is_final=False)
    assert bench.workers.board.row(bench.worker.row).state is State.GRADING
