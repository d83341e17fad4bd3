"""Which graded groups are worth training, and by which rewards (between 3 and 4).

Takes a group's trajectories and rewards, gives the Group that the buffer gets, or the reason why
it gets none. Pure functions of the recipe.

    failures      a trajectory whose reward failed is left out; past tasks.max_failures the group is
    overlong      an answer near the limit loses reward (tasks/shaping.py)
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
from minirl.tasks.shaping import overlong


def judge(
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
    trained = tuple(r - overlong(config, t) for t, r in graded)
    masked = frozenset[int]()
    if config.buffer.mask_truncated:
        masked = frozenset(i for i, t in enumerate(kept) if t.stop is StopReason.LENGTH)
    if len(masked) == len(kept):
        return Drop.TRUNCATED
    if config.buffer.drop_equal_rewards and min(trained) == max(trained):
        return Drop.EQUAL_REWARDS
    is_shaped = config.tasks.overlong_tokens > 0
    return Group(*ticket, kept, trained, masked, plain if is_shaped else ())
