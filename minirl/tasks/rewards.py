"""Which graded groups are worth training, and by which rewards (between stages 3 and 4).

Takes a group's trajectories and rewards; gives the Group for the buffer, or the reason to drop it.
Another prompt takes a dropped group's slot at once: filtering makes nothing older.
Leaves out: any shaping but the over-long penalty. A task's own `reward` does that, in Python.
"""

from collections.abc import Sequence

from minirl.config import Config
from minirl.records import Drop, Group, StopReason, Trajectory


def filter_group(
    config: Config,
    ticket: tuple[int, int],
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
) -> Group | Drop:
    """`ticket` is the group's id and its prompt's index; a reward of None has failed."""
    graded = [(t, r) for t, r in zip(trajectories, rewards, strict=True) if r is not None]
    if len(rewards) - len(graded) > config.tasks.max_failures:
        return Drop.REWARD_ERROR
    kept, plain = tuple(t for t, _ in graded), tuple(r for _, r in graded)
    trained = tuple(reward - overlong_penalty(config, t) for t, reward in graded)
    is_masked = config.buffer.mask_truncated  # out of the loss, but in the group's mean
    masked = [i for i, t in enumerate(kept) if is_masked and t.stop is StopReason.LENGTH]
    if len(masked) == len(kept):
        return Drop.TRUNCATED
    if config.buffer.drop_equal_rewards and min(trained) == max(trained):
        return Drop.EQUAL_REWARDS
    own = plain if config.tasks.overlong_tokens else ()
    return Group(*ticket, kept, trained, frozenset(masked), own)


def overlong_penalty(config: Config, trajectory: Trajectory) -> float:
    """DAPO, eq. 13: 0 up to tasks.overlong_tokens before the limit, then rising to 1 at it."""
    zone = config.tasks.overlong_tokens
    over = trajectory.num_new - (config.rollout.max_new_tokens - zone)
    return min(1.0, max(0.0, over / zone)) if zone else 0.0
