"""An evaluation counts what was graded and leaves out what could not be. That it is of one version
on all engines, while training goes on and engines die, is in test_groups.py and test_turns_loop.py.
"""

from minirl.evaluation import Ended, Evaluation
from minirl.records import Example, Prompt, StopReason, Trajectory


def evaluation(count: int, num_cells: int = 99) -> Evaluation:
    prompts = [Prompt(i, Example(str(i), str(i)), (i,)) for i in range(count)]
    return Evaluation(prompts, range(num_cells))


def ended(reward: float | None, stop: StopReason = StopReason.STOP) -> Ended:
    return Ended(0, Trajectory(0, 2, 1, stop, 7, 7), reward)


def test_accuracy_is_the_mean_of_what_was_graded() -> None:
    run = evaluation(4)
    assert list(run.next_to_ask()) == [(i, i) for i in range(4)]
    run.end(0, ended(0.0, StopReason.LENGTH))
    run.end(1, ended(1.0))
    run.end(2, ended(1.0))
    assert not run.is_done
    run.end(3, ended(None))  # no verdict is not a 0
    assert run.is_done
    result = run.result
    assert result["low"] < result["accuracy"] == 2 / 3 < result["high"]
    assert (result["count"], result["failures"], result["truncated_frac"]) == (3, 1, 0.25)
    ungraded = evaluation(1)
    ungraded.end(0, Ended(0, None, None))
    assert ungraded.is_done and ungraded.result["accuracy"] is None


def test_where_there_is_one_version_lost_prompts_are_requeued_and_cells_reused() -> None:
    run = evaluation(3, num_cells=2)
    assert list(run.next_to_ask()) == [(0, 0), (1, 1)]
    run.lost(0)
    run.end(1, ended(1.0))
    assert list(run.next_to_ask()) == [(2, 0)], "the cell of 1 may still be read"
    assert [place for place, _ in run.take_ended()] == [1] and list(run.take_ended()) == []
    assert list(run.next_to_ask()) == [(0, 1)] and not run.is_void
