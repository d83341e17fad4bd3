"""Every metric, named and defined once, and the limits on metrics, drops and notes.

Takes a step's numbers, gives its line of metrics.jsonl and the limits that it broke. A name that is
not in the table is our own mistake and fails. A line has no entry for a value that its step does
not have (no token at equal version, …). docs/metrics.md is printed from the table. `RateLimit` is
for all notes that may come again and again; `DropWatch` takes what becomes of each group, in order:
faults in a row stop the run, a filter that keeps hardly anything warns and names the number to
change; `balance` names the pool that holds a run back. Leaves out: the counts of the run
(buffer.py), and how a run ends (loop.py).
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from minirl.config import Config
from minirl.errors import one_line
from minirl.records import Drop

Values = Mapping[str, float | None]
DROPPED = {reason: f"buffer/dropped_{reason}" for reason in Drop}
METRICS = {
    "step": "training steps done",
    "version": "version published by this step; the step started from version - 1",
    "seconds": "wall time since training began (first prompt sent)",
    "reward/mean": "mean reward of the step's trajectories",
    "reward/std": "population standard deviation of the same rewards",
    "rollout/tokens_per_s": "tokens sampled by all engines / seconds",
    "rollout/length_mean": "mean written tokens of a trajectory",
    "rollout/turns_mean": "mean turns of the model, where > 1",
    "rollout/truncated_frac": "share truncated at rollout.max_new_tokens",
    "rollout/batch_mean": "tokens sampled / engine steps: sequences at once",
    "rollout/idle_frac": "mean over engines: time without a sequence to sample / seconds",
    "rollout/devices": "devices that generated in this step",
    "buffer/staleness_mean": "mean over trained tokens: version - 1 - the token's version",
    "buffer/staleness_max": "largest of the same; never above buffer.max_staleness",
    "buffer/masked_frac": "share of written tokens masked because they were too stale",
    "buffer/versions_per_trajectory": "mean number of different versions in a trajectory",
    "buffer/groups_submitted": "groups dispatched since the run began",
    "buffer/groups_trained": "groups trained since the run began",
    "buffer/groups_dropped": "groups dropped since the run began, for any reason",
    "buffer/groups_in_flight": "groups running, ready or in training now",
    "buffer/truncated_masked": "truncated trajectories kept out of the loss",
    **{n: f"groups dropped since the run began: {r.words}" for r, n in DROPPED.items()},
    "sft/loss": "`minirl sft`: mean -logprob of the answer tokens, before the update",
    "sft/heldout_loss": "the same over eval.num_prompts held-out examples, after the step",
    "faults/workers_replaced": "workers that died or froze, since the run began",
    "faults/steps_redone": "steps rolled back since the run began",
    "weights/publish_s": "seconds rank 0 took to publish: canary, copy into the store",
    "weights/reload_pause_s": "mean seconds an engine paused for a reload in this step",
    "train/loss": "minus the objective, weighted by train.loss_norm, per trained token",
    "train/grad_norm": "gradient norm before clipping, mean over minibatches",
    "train/skipped_updates": "updates left out: loss or gradient was not finite",
    "train/kl": "mean KL to the first model over trained tokens",
    "train/value_loss": "critic: half the squared error, mean over trained tokens",
    "train/entropy": "mean entropy of the policy's distribution at trained tokens, in nats",
    "train/clip_frac": "share of trained tokens whose ratio was clipped",
    "train/behav_ratio_mean": "mean over trained tokens of w = π_prox / π_behav",
    "train/capped_frac": "share of trained tokens with w > train.behav_cap",
    "train/logprob_gap": "mean |vLLM's logprob - the trainer's|, tokens of the version that the "
    "step starts from: of its batch, and of two answers that end while it runs",
    "train/tokens_per_s": "tokens trained on, prompts included / seconds of training",
    "train/mfu": "model FLOPs (6·N a token, shared prompts once; attention) / the GPUs' rate",
    "train/tokens": "trained tokens of this step",
    "train/idle_frac": "time rank 0 waited for a batch / seconds",
    "train/devices": "devices that trained in this step",
    "train/lr": "learning rate of this step",
}


def metrics_line(values: Values) -> dict[str, float]:
    """In the order of the table, without what is not there or not finite."""
    assert values.keys() <= METRICS.keys(), f"not in the table: {values.keys() - METRICS.keys()}"
    known = ((name, values.get(name)) for name in METRICS)
    return {n: value for n, value in known if value is not None and math.isfinite(value)}


MAX_LOGPROB_GAP = 0.1
MIN_ENTROPY = 0.001  # in nats
MAX_IDLE_STEPS = 3  # without any update: then the run stops


class RateLimit:
    """Of the notes of one kind the 1st, 10th, 100th … is shown, with their count."""

    def __init__(self, note: Callable[[str], object]):
        self._note, self._counts = note, Counter[str]()

    def note(self, kind: str, text: str) -> None:
        self._counts[kind] += 1
        if math.log10(count := self._counts[kind]).is_integer():
            self._note(text if count == 1 else f"{text} ({count:,} times so far)")


def idle_fault(lines: Sequence[Values], num_minibatches: int) -> str:
    """Why the run must stop, or "": the last steps had no update."""
    last = [line.get("train/skipped_updates") or 0 for line in lines[-MAX_IDLE_STEPS:]]
    if len(last) < MAX_IDLE_STEPS or min(last) < num_minibatches:
        return ""
    why = "loss, gradient or logprobs were not finite; lower train.lr or train.grad_clip"
    return f"no update in {MAX_IDLE_STEPS} steps in a row: {why}"


def broken_limits(values: Values) -> dict[str, str]:
    """Limits that a step broke, with what that means."""
    gap, entropy, found = values.get("train/logprob_gap"), values.get("train/entropy"), {}
    if gap is not None and not gap <= MAX_LOGPROB_GAP:  # so that NaN breaks it too
        limit = f"train/logprob_gap above {MAX_LOGPROB_GAP}"
        found[limit] = f"{gap:.4g}: vLLM and the trainer differ"
    if entropy is not None and entropy < MIN_ENTROPY:
        why = "the policy hardly explores any more; raise train.clip_high or lower train.lr"
        found[f"train/entropy below {MIN_ENTROPY}"] = f"{entropy:.4g}: {why}"
    return found


# Drops --------------------------------------------------------------------------------------------

FILTERS = {  # they drop on purpose; what changes that
    Drop.EQUAL_REWARDS: "set buffer.drop_equal_rewards to false, raise rollout.temperature, or "
    "take prompts that are less easy or less hard",
    Drop.TRUNCATED: "raise rollout.max_new_tokens",
    Drop.STALE: "raise buffer.max_staleness",
    Drop.TOO_LONG: "raise tasks.max_prompt_tokens",
}
MIN_FAULTS = 24  # in a row; with small batches max_faults alone would stop a run for noise


class DropWatch:
    def __init__(self, config: Config, seldom: RateLimit):
        self._max_faults, self._seldom = config.buffer.max_faults, seldom
        self._limit = max(MIN_FAULTS, math.ceil(self._max_faults * config.train.batch_size))
        self._examples: dict[Drop, str] = {}
        self.faults: Counter[Drop] = Counter()  # since a group was last graded
        self.filtered: Counter[Drop] = Counter()  # since the last step

    @property
    def fault(self) -> str:
        """Why the run cannot train, or ""."""
        if (num := self.faults.total()) < self._limit:
            return ""
        ((reason, count),) = self.faults.most_common(1)
        return (
            f"no reward for {num:,} groups in a row: {reason.words} {count:,} times, such as "
            f"{one_line(self._examples[reason])}; mend that, or raise buffer.max_faults = "
            f"{self._max_faults:g}"
        )

    def dropped(self, reason: Drop, why: str) -> None:
        """The death of a worker has a limit of its own (supervisor.py)."""
        if reason in FILTERS:
            self.filtered[reason] += 1
            if (num := self.filtered.total()) % self._limit == 0:
                ((most, count),) = self.filtered.most_common(1)
                share = f"{num:,} groups dropped since the last step, {count / num:.0%} of them"
                self._seldom.note(most, f"warning: {share} {most.words}: {FILTERS[most]}")
        elif reason is not Drop.WORKER_DIED:
            self.faults[reason] += 1
            self._examples[reason] = why


# Which pool holds a run back ----------------------------------------------------------------------

# Of a pool that has all CPU cores instead of half: SmolLM2-135M on 2 cores. "tiny", which trains
# thousands of tokens/s there, gains nothing: its products are too small.
SPEEDUP, MAX_RATE = 1.5, 1000


def balance(
    config: Config, idle: Sequence[float], word: str = "GPU", is_held: bool = False, rate: float = 0
) -> str:
    """Each pool's capacity is what it did, divided by its busy share; the slower pool is the
    bottleneck. `idle`: the shares of rollout and training; `word`: "GPU" where there may be one
    more, "" where there is none left, "cores" on a CPU; `is_held`: admission control leaves slots
    free; `rate`: trained tokens/s, where known."""
    shares = f"engines idle {idle[0]:.0%}, trainers {idle[1]:.0%}"
    busy = [max(1e-3, 1 - share) for share in idle]
    why = ", admission control holds the engines back" if is_held and idle[0] > idle[1] else ""
    if config.devices.share:
        return f"both on the same {word or 'GPU'}: {shares}{why}"
    advice, gain = "", SPEEDUP / sum(busy) - 1
    if word == "cores" and config.num_devices == 2 and gain > 0.1 and 0 < rate < MAX_RATE:
        advice = f"; all cores in turn (devices.share, max_staleness 0) would give {gain:+.0%}"
    if config.is_synchronous:
        text = f"synchronous: {shares}; buffer.max_staleness = 1 or more would let both work"
        return text + advice
    if max(idle) < 0.05:
        return f"balanced: {shares}"
    text, pool, num = "training-bound: engines", "training", config.devices.train
    if idle[1] > idle[0]:
        text, pool, num = "generation-bound: trainers", "rollout", config.devices.rollout
    if word == "GPU":  # more help the slower pool until the other one is the slower
        gain = min((num + 1) / num, max(busy) / min(busy)) - 1
        advice = f", one {word} more for {pool} would give {gain:+.0%}"
    return f"{text} idle {max(idle):.0%}{why}{advice}"


def measured_balance(
    config: Config, lines: Sequence[dict[str, Any]], word: str, is_held: bool = False
) -> str:
    """Of the steps with these devices, without the first, which waits for the first answers; steps
    weigh by their time. Empty where there are too few."""
    now = {"rollout/devices": config.devices.rollout, "train/devices": config.devices.train}
    own = [line for line in lines if all(line.get(k, n) == n for k, n in now.items())]
    steps = [(line, line["seconds"] - before["seconds"]) for before, line in pairwise(own)]
    if not (total := sum(seconds for _, seconds in steps)):
        return ""
    idle = [
        sum(line.get(f"{pool}/idle_frac", 0.0) * seconds for line, seconds in steps) / total
        for pool in ("rollout", "train")
    ]
    return balance(config, idle, word, is_held, lines[-1].get("train/tokens_per_s", 0))
