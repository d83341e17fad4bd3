"""Each finished group goes to one free verifier, oldest first."""

from minirl.records import Example
from minirl.tasks.grading import GradingQueue
from minirl.tasks.verifier import Grade


def request(group_id: int) -> Grade:
    return Grade(group_id, Example("", ""), ())


def assigned(queue: GradingQueue, *verifiers: str) -> dict[str, int]:
    return {name: grade.group_id for name, grade in queue.assign(verifiers)}


def test_one_group_to_a_free_verifier_in_order() -> None:
    queue = GradingQueue()
    for group_id in range(3):
        queue.add(request(group_id))
    assert assigned(queue, "a", "b") == {"a": 0, "b": 1}
    assert assigned(queue, "a", "b") == {}  # both are at it
    assert (queue.is_busy("a"), queue.is_busy("c"), len(queue)) == (True, False, 3)
    assert queue.done("b") == request(1)
    assert (queue.is_busy("b"), len(queue)) == (False, 2)
    assert assigned(queue, "a", "b") == {"b": 2}


def test_nothing_waits_nothing_is_assigned() -> None:
    queue = GradingQueue()
    assert assigned(queue, "a") == {} and len(queue) == 0


def test_what_a_dead_verifier_was_at_is_known_once() -> None:
    queue = GradingQueue()
    queue.add(request(5))
    assert assigned(queue, "a") == {"a": 5}
    assert queue.done("a") == request(5)
    assert queue.done("a") is None
    assert len(queue) == 0
