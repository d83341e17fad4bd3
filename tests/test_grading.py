"""Each finished group goes to one free verifier, oldest first."""

from minirl.records import Example, StopReason, Trajectory
from minirl.tasks.grading import GradingQueue
from minirl.tasks.verifier import Ask, Grade


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
    assert (queue.is_busy("b"), len(queue), queue.done("b")) == (False, 2, None)
    assert assigned(queue, "a", "b") == {"b": 2}


def test_a_turn_that_waits_for_its_reply_goes_first() -> None:
    queue, turn = GradingQueue(), Trajectory(0, 2, 1, StopReason.STOP, 0, 0)
    assert assigned(queue, "a") == {} and len(queue) == 0
    queue.add(request(1))
    queue.add(Ask(2, 0, Example("", ""), turn))
    assert assigned(queue, "a", "b") == {"a": 2, "b": 1}
