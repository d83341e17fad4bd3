"""What a reward is made of, beside the task's own verdict. Pure functions of the recipe.

    shaped = clip( reward_weight · reward
                   + format_weight     where the answer has the form that tasks.format says
                   - length_weight · tokens / rollout.max_new_tokens
                   - overlong          0 up to tasks.overlong_tokens before the limit, 1 at it )

Training sees the shaped reward; evaluations and reward/mean see the task's own. The form is looked
at in the verifier, where a regular expression that takes for ever can be killed.
"""

import re

from minirl.config import Config
from minirl.tasks.answers import HASHES, boxes, numbers


def is_formed(format: str, text: str) -> bool:
    """Whether an answer has the form, by its name or as a regular expression for all of it."""
    text = text.strip()
    match format:
        case "boxed":
            return text.count(r"\boxed") == 1 and any(box.strip() for _, box in boxes(text))
        case "hashes":
            before, mark, after = text.rpartition(HASHES)
            is_one = bool(mark) and HASHES not in before and "\n" not in after.strip()
            return is_one and len(numbers(after)) == 1
        case "think":
            return _after_thinking(text) is not None
        case "think_answer":
            rest = _after_thinking(text)
            match = re.fullmatch(r"<answer>(.+)</answer>", rest or "", re.DOTALL)
            return match is not None and "answer>" not in match[1]
        case _:
            return re.fullmatch(format, text, re.DOTALL) is not None


def _after_thinking(text: str) -> str | None:
    """What follows <think>…</think>, if each tag is there once and something follows. The first
    tag may be missing: some chat templates write it."""
    thinking, end, rest = text.removeprefix("<think>").partition("</think>")
    if not end or not thinking.strip() or not rest.strip() or "think>" in thinking + rest:
        return None
    return rest.strip()


def overlong(config: Config, num_tokens: int) -> float:
    """DAPO, eq. 13: 0 up to tasks.overlong_tokens before the limit, then rising to 1 at it."""
    zone = config.tasks.overlong_tokens
    if not zone:
        return 0.0
    over = num_tokens - (config.rollout.max_new_tokens - zone)
    return min(1.0, max(0.0, over / zone))


def shaped(
    config: Config, reward: float, num_tokens: int, is_well_formed: bool, num_replied: int = 0
) -> float:
    """What is trained on. A task's replies count towards the limit, not as the model's length."""
    tasks = config.tasks
    total = tasks.reward_weight * reward
    if tasks.format and is_well_formed:
        total += tasks.format_weight
    total -= tasks.length_weight * num_tokens / config.rollout.max_new_tokens
    total -= overlong(config, num_tokens + num_replied)
    if tasks.reward_clip:
        low, high = tasks.reward_clip
        total = min(high, max(low, total))
    return total


def is_shaped(config: Config) -> bool:
    """Whether the recipe shapes rewards at all."""
    tasks = config.tasks
    parts = (tasks.format, tasks.length_weight, tasks.overlong_tokens, tasks.reward_clip)
    return any(parts) or tasks.reward_weight != 1.0
