"""An evaluation is of one version, counts what was graded, and leaves out what could not be."""

import pytest

from minirl.evaluation import EVAL_IDS, Evaluation, is_evaluation
from minirl.records import Example, Prompt, StopReason, Trajectory


def evaluation(count: int) -> Evaluation:
    prompts = [Prompt(i, Example(str(i), str(i)), (i,)) for i in range(count)]
    return Evaluation(prompts, first_cell=100)


def answer(head: int, tail: int | None = None, stop: StopReason = StopReason.STOP) -> Trajectory:
    return Trajectory(0, 2, 1, stop, head, head if tail is None else tail)


def test_its_groups_are_told_from_training_by_their_ids() -> None:
    ids = evaluation(3).group_ids
    assert ids == [EVAL_IDS, EVAL_IDS + 1, EVAL_IDS + 2]
    assert all(is_evaluation(group_id) for group_id in ids)
    assert not is_evaluation(0) and not is_evaluation(EVAL_IDS - 1)


def test_each_prompt_has_a_cell_of_its_own_after_the_slots() -> None:
    run = evaluation(3)
    assert [run.cell(group_id) for group_id in run.group_ids] == [100, 101, 102]
    assert [run.prompt(group_id).index for group_id in run.group_ids] == [0, 1, 2]


def test_accuracy_is_the_mean_of_what_was_graded() -> None:
    run = evaluation(4)
    for group_id in run.group_ids:
        assert not run.is_done
        stop = StopReason.LENGTH if group_id == EVAL_IDS else StopReason.STOP
        run.answered(answer(7, stop=stop))
        if group_id == EVAL_IDS + 3:
            run.failed()  # no verdict is not a 0
        else:
            run.graded(group_id, float(group_id != EVAL_IDS))
    assert run.is_done and not run.is_void
    found = run.result
    low, high = found["low"], found["high"]
    assert found["accuracy"] == 2 / 3 and low is not None and high is not None
    assert low < 2 / 3 < high and run.version == 7
    assert (found["count"], found["failures"], found["truncated_frac"]) == (3, 1, 0.25)


def test_one_without_any_verdict_ends_too() -> None:
    run = evaluation(1)
    run.failed()
    assert run.is_done and run.result["accuracy"] is None and run.version is None


@pytest.mark.parametrize("case", ["pinned", "begun", "finished"])
def test_two_versions_make_it_void(case: str) -> None:
    run = evaluation(2)
    run.pinning |= {0, 1}
    run.pinned(0, 7)
    assert run.pinning == {1}
    run.pinned(1, 8 if case == "pinned" else 7)
    assert not run.pinning
    assert run.is_void == (case == "pinned")
    if case != "pinned":
        run.answered(answer(8) if case == "begun" else answer(7, 8))
    assert run.is_void


def test_a_dead_engine_s_prompts_are_lost_and_make_it_void() -> None:
    run = evaluation(3)
    run.pinning |= {0, 1}
    run.engine_died(1, 0)  # it had none
    assert run.pinning == {0} and not run.is_void
    run.engine_died(0, 2)
    assert run.is_void and not run.is_done
    run.graded(EVAL_IDS, 1.0)
    assert run.is_done
