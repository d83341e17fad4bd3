"""Which graded groups are worth training, and by which rewards (between 3 and 4).

Takes a group's trajectories and rewards, gives the Group that the buffer gets, or the reason why
it gets none. Pure functions of the recipe.

    failures      a trajectory whose reward failed is left out; past tasks.max_failures the group is
    shaping       what the recipe adds to a reward and takes off it (tasks/shaping.py)
    truncated     an answer that was cut may be kept out of the loss; its reward still counts in the
                  group's mean
    equal rewards a group that teaches nothing is dropped (DAPO's dynamic sampling)

What is dropped gives its slot back at once and another prompt takes it under the newest weights, so
the batch is always full and nothing gets older by filtering.
"""

from collections.abc import Sequence

from minirl.buffer import Drop
from minirl.config import Config
from minirl.records import Group, StopReason, Trajectory
from minirl.tasks.shaping import is_shaped, overlong, shaped


def judge(
    config: Config,
    ticket: tuple[int, int],
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
    formed: Sequence[bool] = (),
) -> Group | Drop:
    """`ticket` is the group's id and its prompt's index; a reward of None has failed. `formed` says
    which answers have the form of tasks.format, where it is set."""
    forms = formed or (False,) * len(rewards)
    graded = [
        (t, r, f) for t, r, f in zip(trajectories, rewards, forms, strict=True) if r is not None
    ]
    if len(rewards) - len(graded) > config.tasks.max_failures:
        return Drop.REWARD_ERROR
    trained = tuple(shaped(config, r, t.num_written, f, t.num_replied) for t, r, f in graded)
    kept = tuple(t for t, _, _ in graded)
    masked = frozenset[int]()
    if config.buffer.mask_truncated:
        masked = frozenset(i for i, t in enumerate(kept) if t.stop is StopReason.LENGTH)
    if len(masked) == len(kept):
        return Drop.TRUNCATED
    if config.buffer.drop_equal_rewards and min(trained) == max(trained):
        return Drop.EQUAL_REWARDS
    plain = tuple(r for _, r, _ in graded) if is_shaped(config) else ()
    return Group(
        *ticket, kept, trained, masked, plain, tuple(f for _, _, f in graded) if formed else ()
    )


def penalty(config: Config, trajectory: Trajectory) -> float:
    """What a trajectory lost for being over-long."""
    return overlong(config, trajectory.num_new)
