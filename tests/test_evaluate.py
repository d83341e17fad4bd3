"""An evaluation counts what was graded, and leaves out what could not be."""

from minirl.evaluate import EVAL_IDS, Evaluation, is_evaluation
from minirl.records import Example, Prompt, StopReason, Trajectory


def evaluation(count: int) -> Evaluation:
    prompts = [Prompt(i, Example(str(i), str(i)), (i,)) for i in range(count)]
    return Evaluation(prompts, first_cell=100)


def answer(version: int) -> Trajectory:
    return Trajectory(0, 2, 1, StopReason.STOP, version, version)


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
    for group_id, version in zip(run.group_ids, (7, 6, 7, 7), strict=True):
        assert not run.is_done
        run.answered(answer(version))
        if group_id == EVAL_IDS + 3:
            run.failed()  # no verdict is not a 0
        else:
            run.graded(group_id, float(group_id != EVAL_IDS))
    assert run.is_done
    assert run.accuracy == 2 / 3
    assert run.version == 6  # the oldest that answered


def test_one_without_any_verdict_ends_too() -> None:
    run = evaluation(1)
    run.failed()
    assert run.is_done and run.accuracy == 0.0 and run.version == -1
