"""The overlong penalty: what a reward loses beside the task's own verdict. A pure function.

Training sees the reward less the penalty; evaluations and reward/mean see the task's own.
"""

from minirl.config import Config
from minirl.records import Trajectory


def overlong(config: Config, trajectory: Trajectory) -> float:
    """DAPO, eq. 13: 0 up to tasks.overlong_tokens before the limit, then rising to 1 at it. A
    task's replies count towards the limit."""
    zone = config.tasks.overlong_tokens
    if not zone:
        return 0.0
    over = trajectory.num_new - (config.rollout.max_new_tokens - zone)
    return min(1.0, max(0.0, over / zone))
