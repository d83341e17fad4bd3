"""Every metric, named and defined once, and the limits on them.

Takes a step's numbers, gives its line of `metrics.jsonl` and the limits that it broke. A name that
is not in the table is our own mistake and fails. A value that a step does not have (no token at
equal version, …) is left out of its line. docs/metrics.md is printed from the tables.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minirl.records import Drop


@dataclass(frozen=True)
class Metric:
    name: str
    formula: str


DROPPED = {reason: f"buffer/dropped_{reason}" for reason in Drop}

# "This step" is the time between two publications; B groups are trained in it. "Trained tokens"
# are those with mask 1 that are not too stale.
TABLE = (
    Metric("step", "training steps done"),
    Metric("version", "version published by this step; the step started from version - 1"),
    Metric("seconds", "wall time since training began (first prompt sent)"),
    Metric("reward/mean", "mean reward over the step's trajectories, as the task itself gave it"),
    Metric("reward/std", "population standard deviation of the same rewards"),
    Metric("reward/shaped_mean", "mean of the rewards trained on: less the overlong penalty"),
    Metric("reward/penalty_mean", "mean reward those trajectories lost for being over-long"),
    Metric("reward/failures", "trajectories left out of the step's groups: no reward for them"),
    Metric("rollout/tokens_per_s", "tokens sampled by all engines in this step / its seconds"),
    Metric("rollout/length_mean", "mean number of written tokens of the step's trajectories"),
    Metric("rollout/turns_mean", "mean number of the model's turns to one of them, where > 1"),
    Metric("rollout/truncated_frac", "share of them that was cut at rollout.max_new_tokens"),
    Metric("rollout/batch_mean", "tokens sampled in this step / engine steps: sequences at once"),
    Metric("rollout/idle_frac", "mean over engines: time without a sequence to sample / seconds"),
    Metric("rollout/devices", "devices that generated in this step"),
    Metric("buffer/staleness_mean", "mean over trained tokens: version - 1 - the token's version"),
    Metric("buffer/staleness_max", "largest of the same; never above buffer.max_staleness"),
    Metric("buffer/masked_frac", "share of written tokens masked because they were too stale"),
    Metric("buffer/versions_per_trajectory", "mean number of different versions in a trajectory"),
    Metric("buffer/groups_submitted", "groups dispatched since the run began"),
    Metric("buffer/groups_trained", "groups trained since the run began"),
    Metric("buffer/groups_dropped", "groups dropped since the run began, for any reason"),
    Metric("buffer/groups_in_flight", "groups running, ready or in training now"),
    Metric("buffer/truncated_masked", "trajectories of this step kept out of the loss: cut off"),
    *(
        Metric(DROPPED[r], f"groups dropped since the run began: {r.replace('_', ' ')}")
        for r in Drop
    ),
    Metric("sft/loss", "`minirl sft`: mean -logprob of the answer tokens, before the update"),
    Metric("sft/heldout_loss", "the same over eval.num_prompts held-out examples, after the step"),
    Metric("faults/workers_replaced", "workers that died or froze, since the run began"),
    Metric("faults/steps_redone", "steps taken back since the run began: a trainer rank died"),
    Metric("weights/publish_s", "seconds rank 0 took to publish: canary, copy into the store"),
    Metric("weights/reload_pause_s", "mean seconds an engine paused for a reload in this step"),
    Metric("train/loss", "minus the objective, weighted by train.loss_norm, per trained token"),
    Metric("train/grad_norm", "gradient norm before clipping, mean over minibatches"),
    Metric("train/skipped_updates", "updates left out: loss or gradient was not finite"),
    Metric("train/kl", "mean KL to the first model over trained tokens"),
    Metric("train/value_loss", "critic: half the squared error, mean over trained tokens"),
    Metric("train/entropy", "mean entropy of the policy's distribution at trained tokens, in nats"),
    Metric("train/clip_frac", "share of trained tokens whose ratio was clipped"),
    Metric("train/behav_ratio_mean", "mean over trained tokens of w = π_prox / π_behav"),
    Metric("train/capped_frac", "share of trained tokens with w > train.behav_cap"),
    Metric("train/logprob_gap", "mean |vLLM's logprob - the trainer's|, tokens of staleness 0"),
    Metric("train/spliced_gap", "the same over those of them that follow older versions' tokens"),
    Metric("train/tokens_per_s", "tokens trained on (prompts too) / seconds the ranks were at it"),
    Metric("train/tokens", "trained tokens of this step"),
    Metric("train/idle_frac", "time rank 0 waited for a batch in this step / its seconds"),
    Metric("train/devices", "devices that trained in this step"),
    Metric("train/lr", "learning rate of this step"),
    Metric("guard/warnings", "limits that this step broke (docs/faults.md), shown or not"),
)
EVALS = (
    Metric("step", "training steps done when the evaluation began"),
    Metric("version", "the version that answered, on every engine"),
    Metric("seconds", "wall time since training began, when the evaluation ended"),
    Metric("accuracy", "mean reward of the answers; null where none could be graded"),
    Metric("low", "lower end of its 95 % interval (docs/evaluation.md)"),
    Metric("high", "upper end of the same"),
    Metric("count", "answers that were graded"),
    Metric("failures", "answers that could not be graded; left out of the mean"),
    Metric("length_mean", "mean number of written tokens of the answers"),
    Metric("truncated_frac", "share of the answers that was cut at rollout.max_new_tokens"),
    Metric("answers", "log.samples of them: prompt, reference, answer, reward"),
)
ORDER = tuple(metric.name for metric in TABLE)
NAMES = frozenset(ORDER)
TIMED = ("seconds", "_per_s", "_s", "idle_frac")


def is_timed(name: str) -> bool:
    """True for wall-clock metrics: the only ones that differ between two runs of one seed at
    η = 0."""
    return name.endswith(TIMED)


def metrics_line(values: Mapping[str, float | None]) -> dict[str, Any]:
    """In the order of the table, without what is not there or not finite."""
    unknown = values.keys() - NAMES
    assert not unknown, f"not in the table: {unknown}"
    known = {name: values[name] for name in ORDER if values.get(name) is not None}
    return {name: value for name, value in known.items() if value is None or math.isfinite(value)}


# Limits ----------------------------------------------------------------------------------------


MAX_LOGPROB_GAP = 0.1
MIN_ENTROPY = 0.001  # in nats
MAX_IDLE_STEPS = 3  # without any update: then the run stops


@dataclass(frozen=True)
class Breach:
    """A limit that a step broke. A fatal one stops the run."""

    text: str
    count: int = 1  # how often since the run was started
    is_fatal: bool = False

    @property
    def is_told(self) -> bool:
        """Warnings are shown the 1st, 10th, 100th … time, and counted at every step."""
        return math.log10(self.count).is_integer()


class Guard:
    """Compares the metrics of each step with the limits."""

    def __init__(self, num_minibatches: int):
        self._num_minibatches = num_minibatches
        self._num_idle = 0  # steps in a row without any update
        self._counts: Counter[str] = Counter()

    def judge(self, values: Mapping[str, float | None]) -> list[Breach]:
        is_updated = (values.get("train/skipped_updates") or 0) < self._num_minibatches
        self._num_idle = 0 if is_updated else self._num_idle + 1
        if self._num_idle >= MAX_IDLE_STEPS:
            why = "loss, gradient or logprobs were not finite; lower train.lr or train.grad_clip"
            text = f"no update in {self._num_idle} steps in a row: {why}"
            return [Breach(text, is_fatal=True)]
        gap, entropy = values.get("train/logprob_gap"), values.get("train/entropy")
        found = []
        # "not <=", so that NaN breaks the limit too.
        if gap is not None and not gap <= MAX_LOGPROB_GAP:
            why = 'vLLM and the trainer differ; try model.dtype = "float32"'
            found.append(self._warning(f"train/logprob_gap above {MAX_LOGPROB_GAP}", gap, why))
        if is_updated and entropy is not None and not entropy >= MIN_ENTROPY:
            why = "the policy hardly explores any more; raise train.clip_high or lower train.lr"
            found.append(self._warning(f"train/entropy below {MIN_ENTROPY}", entropy, why))
        return found

    def _warning(self, limit: str, value: float, why: str) -> Breach:
        self._counts[limit] += 1
        return Breach(f"{limit}: {value:.4g}: {why}", self._counts[limit])
