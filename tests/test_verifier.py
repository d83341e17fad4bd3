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
from minirl.records import Answer, Example, StopReason, Trajectory
from minirl.shm.board import State, Total
from minirl.shm.ring import TrajectoryRing
from minirl.tasks.limits import RewardCache
from minirl.tasks.turns import Dialogue
from minirl.tasks.verifier import Ask, Grade, Graded, Replied, VerifierSetup
from minirl.workers import Died, Fleet, Role, Worker

WORDS = ["<end>", "question", "right", "wrong", "raise", "nan", "inf", "hang", "exit", "text"]
WORDS += ["count", "huge", "print"]
LONG_S = 60.0
TASK = """
import os, sys, time
from types import SimpleNamespace

class Moody:
    num_train = 1

    def __init__(self, config, seed):
        self.num_calls = 0

    def reward(self, example, answer):
        self.num_calls += 1
        if "count" in answer.text:
            return self.num_calls
        if "huge" in answer.text:
            return len(bytearray(2**30))
        if "print" in answer.text:
            print("p" * 10**6)
            sys.stderr.write("e" * 10**6)
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
            case "huge" | "print" | "raise" | "hang" | "exit" as word:
                return self.reward(example, SimpleNamespace(text=word)) and None
            case "nan":
                return ""
            case "inf":
                return 3
            case "wrong":
                return "text right"


class Random(Moody):
    is_random = True
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
        self.fleet = Fleet(log_dir, num_workers=1)
        config = Config()
        kind = f"{folder / 'moody.py'}:{task}"
        config = replace(config, tasks=replace(config.tasks, kind=kind, memory_gib=0.75))
        setup = VerifierSetup(config, str(folder), self.ring, Dialogue())
        self.worker: Worker = self.fleet.spawn(
            Role.VERIFY, 0, "minirl.tasks.verifier:run", setup, Placement("cpu")
        )

    def answer(self, cell: int, group_id: int, text: str) -> Trajectory:
        tokens = [WORDS.index(word) for word in text.split()]
        n = len(tokens)
        self.ring.write(cell, group_id, [1, 1], tokens, [-1.0] * n, [0] * n)
        return Trajectory(cell, 2 + n, n, StopReason.STOP, 0, 0)

    def ask(self, group_id: int, *texts: str) -> None:
        answers = tuple(self.answer(i, group_id, text) for i, text in enumerate(texts))
        self.worker.send(Grade(group_id, Example("question", "right"), answers))

    def hear(self) -> Any:
        deadline = time.monotonic() + LONG_S
        while time.monotonic() < deadline:
            for _, message in self.fleet.hear(1.0):
                return message
        raise AssertionError("the verifier said nothing")


@pytest.fixture
def bench(folder: Path, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(folder, tmp_path)
    yield bench
    bench.fleet.kill()


def test_rewards_and_texts_come_in_the_order_of_the_group(bench: Bench) -> None:
    bench.ask(4, "right <end>", "wrong", "right", "wrong right")
    texts = ("right", "wrong", "right", "wrong right")  # no prompt, no special token
    assert bench.hear() == Graded(4, (1.0, 0.0, 1.0, 0.0), texts)
    bench.ask(5, "wrong")
    assert bench.hear() == Graded(5, (0.0,), ("wrong",))


def test_a_reward_that_fails_is_an_error_for_the_whole_group_and_never_a_0(bench: Bench) -> None:
    failures = {
        "raise": "ValueError: no idea",
        "nan": "reward is nan",
        "inf": "reward is inf",
        "text": "ValueError: could not convert string to float: 'not a number'",
    }
    for group_id, (text, error) in enumerate(failures.items()):
        bench.ask(group_id, "right", text)
        assert bench.hear() == Graded(group_id, (), (), error)
    bench.ask(9, "right")  # and it goes on
    assert bench.hear() == Graded(9, (1.0,), ("right",))


def test_a_reward_that_hangs_is_seen_on_the_board_and_its_verifier_can_be_replaced(
    bench: Bench,
) -> None:
    bench.ask(1, "right", "hang")
    deadline = time.monotonic() + LONG_S
    while True:
        row = bench.fleet.board.row(bench.worker.row)
        if row.state is State.GRADING and row.since_s > 0.3:
            break
        assert time.monotonic() < deadline, row
        assert list(bench.fleet.hear(0.02)) == []
    bench.fleet.replace(bench.worker)
    bench.ask(2, "right")
    assert bench.hear() == Graded(2, (1.0,), ("right",))


def test_a_verifier_that_waits_is_not_grading(bench: Bench) -> None:
    bench.ask(1, "right")
    bench.hear()
    deadline = time.monotonic() + LONG_S
    while bench.fleet.board.row(0).state is not State.WAITING_FOR_ANSWERS:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_reward_that_takes_its_process_down_is_a_death(bench: Bench) -> None:
    bench.ask(1, "exit")
    assert bench.hear() == Died("ended with exit code 5", is_final=False)


def test_an_answer_of_another_group_is_not_graded(bench: Bench) -> None:
    trajectory = bench.answer(0, 1, "right")
    bench.worker.send(Grade(2, Example("question", "right"), (trajectory,)))
    died = bench.hear()
    assert isinstance(died, Died) and "sealed for 1, not for 2" in died.how


def test_a_task_that_cannot_be_loaded_is_final(folder: Path, tmp_path: Path) -> None:
    bench = Bench(folder, tmp_path, task="Missing")
    died = bench.hear()
    bench.fleet.kill()
    assert isinstance(died, Died) and died.is_final
    assert "tasks.kind" in died.how and "Missing" in died.how


def test_goodbye_ends_it(bench: Bench) -> None:
    bench.ask(1, "right")
    bench.hear()
    process = bench.worker.process
    bench.fleet.stop(goodbye="anything else")
    assert process.exitcode == 0


def test_as_many_rewards_may_fail_as_the_request_says(bench: Bench) -> None:
    texts = ("right", "raise", "wrong")
    answers = tuple(bench.answer(i, 3, text) for i, text in enumerate(texts))
    bench.worker.send(Grade(3, Example("question", "right"), answers, max_failures=1))
    assert bench.hear() == Graded(3, (1.0, None, 0.0), texts, "ValueError: no idea")
    answers = tuple(bench.answer(i, 4, text) for i, text in enumerate(("hang", "raise", "right")))
    bench.worker.send(Grade(4, Example("question", "right"), answers, max_failures=2, skip=(0,)))
    assert bench.hear() == Graded(
        4, (None, None, 1.0), ("", "raise", "right"), "ValueError: no idea"
    )


def test_the_same_answer_to_the_same_example_is_graded_once(bench: Bench) -> None:
    bench.ask(1, "count", "count", "count count", "raise")
    assert bench.hear() == Graded(1, (), (), "ValueError: no idea")
    bench.ask(2, "count", "count count")
    assert bench.hear() == Graded(2, (1.0, 2.0), ("count", "count count"))
    bench.worker.send(Grade(3, Example("another", "right"), (bench.answer(0, 3, "count"),)))
    assert bench.hear() == Graded(3, (4.0,), ("count",))
    assert bench.fleet.board.total(bench.worker.row, Total.CACHED) == 3
    bench.ask(4, "raise")  # a failure is not kept
    assert bench.hear() == Graded(4, (), (), "ValueError: no idea")


def test_a_task_that_is_random_is_asked_each_time(folder: Path, tmp_path: Path) -> None:
    bench = Bench(folder, tmp_path, task="Random")
    try:
        bench.ask(1, "count", "count")
        assert bench.hear() == Graded(1, (1.0, 2.0), ("count", "count"))
        assert bench.fleet.board.total(bench.worker.row, Total.CACHED) == 0
    finally:
        bench.fleet.kill()


def test_a_reward_that_takes_too_much_memory_costs_its_verifier(bench: Bench) -> None:
    bench.ask(1, "right", "huge")
    died = bench.hear()
    assert isinstance(died, Died) and died.how.startswith("MemoryError") and not died.is_final
    row = bench.fleet.board.row(bench.worker.row)
    assert (row.state, row.running) == (State.GRADING, 1)  # what the controller goes by
    bench.fleet.replace(bench.worker)
    bench.ask(2, "right")
    assert bench.hear() == Graded(2, (1.0,), ("right",))


def test_what_a_reward_prints_does_not_flood_the_log(bench: Bench, tmp_path: Path) -> None:
    bench.ask(1, "print right", "right")
    assert bench.hear() == Graded(1, (0.0, 1.0), ("print right", "right"))
    log = (tmp_path / "verify-0.log").read_text()
    assert log.startswith("pppp") and len(log) < 3000
    assert "(a reward printed 1,998,001 characters more)" in log


def test_the_cache_is_bounded_and_keeps_what_was_used_last() -> None:
    cache = RewardCache(size=2)
    example, answers = Example("?", "!"), [Answer(t, StopReason.STOP, 1) for t in "abc"]
    cache.put(example, answers[0], 0.0)
    cache.put(example, answers[1], 1.0)
    assert cache.get(example, answers[0]) == 0.0
    cache.put(example, answers[2], 1.0)
    assert [cache.get(example, a) for a in answers] == [0.0, None, 1.0] and len(cache) == 2
    assert cache.get(example, replace(answers[0], stop=StopReason.LENGTH)) is None
    assert cache.get(replace(example, reference="x"), answers[0]) is None


# Several turns ------------------------------------------------------------------------------------


def ask(bench: Bench, group_id: int, *turns: str) -> None:
    """The model's texts and the replies, in turn."""
    trajectory = conversation(bench, group_id, turns)
    bench.worker.send(Ask(group_id, 0, Example("question", "right"), trajectory))


def conversation(bench: Bench, group_id: int, turns: tuple[str, ...]) -> Trajectory:
    tokens, versions = [], []
    for number, text in enumerate(turns):
        ids = [WORDS.index(word) for word in text.split()]
        tokens += ids
        versions += [-1 if number % 2 else 3] * len(ids)
    bench.ring.write(0, group_id, [1, 1], tokens, [-1.0] * len(tokens), versions)
    written = sum(version >= 0 for version in versions)
    return Trajectory(0, 2 + len(tokens), written, StopReason.STOP, 3, 3)


def test_a_reply_is_given_as_its_own_tokens_and_none_ends_the_conversation(bench: Bench) -> None:
    reply = (WORDS.index("text"), WORDS.index("right"))
    ask(bench, 1, "wrong")
    assert bench.hear() == Replied(1, 0, reply)
    ask(bench, 1, "wrong <end>", "text right", "right wrong", "text right", "wrong")
    assert bench.hear() == Replied(1, 0, reply)  # and its task saw its own replies as they were
    ask(bench, 1, "wrong", "text right", "right <end>")
    assert bench.hear() == Replied(1, 0, ())


def test_a_reply_that_fails_says_why(bench: Bench) -> None:
    failures = {
        "raise": "ValueError: no idea",
        "nan": "ValueError: the reply has no token; None ends the conversation",
    }
    for text, error in failures.items():
        ask(bench, 2, text)
        assert bench.hear() == Replied(2, 0, (), error)
    ask(bench, 2, "inf")  # replies 3, which is no text
    assert bench.hear().error.startswith("TypeError")
    trajectory = conversation(bench, 3, ("wrong",))
    bench.worker.send(Ask(2, 0, Example("question", "right"), trajectory))
    assert "sealed for 3, not for 2" in bench.hear().error  # the group was given up, and it lives
    ask(bench, 4, "exit")
    assert bench.hear() == Died("ended with exit code 5", is_final=False)
    assert bench.fleet.board.row(bench.worker.row).state is State.GRADING


def test_a_reward_sees_the_last_turn_and_people_see_all(bench: Bench) -> None:
    trajectory = conversation(bench, 1, ("wrong", "text right", "right <end>"))
    bench.worker.send(Grade(1, Example("question", "right"), (trajectory,)))
    assert bench.hear() == Graded(1, (1.0,), ("wrong⟦text right⟧right",))
