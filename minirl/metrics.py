"""Every metric, named and defined once, and the file they go to.

Takes a step's numbers, gives `metrics.jsonl`: one line a step. A name that is not in the table is
our own mistake and fails. A value that a step does not have (no evaluation, no token at equal
version) is left out of its line. `docs/metrics.md` is printed from the table:
`python -m tests.docs.metrics > docs/metrics.md`.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirl.buffer import Drop
from minirl.lines import Lines, keep_lines, read_lines, replace_text


@dataclass(frozen=True)
class Metric:
    name: str
    formula: str


WHY = {
    Drop.STALE: "it was too old to be trained",
    Drop.REWARD_ERROR: "its rewards failed",
    Drop.REWARD_TIMEOUT: "a reward took longer than tasks.timeout_s",
    Drop.REPLY_ERROR: "a reply of its task failed",
    Drop.REPLY_TIMEOUT: "a reply took longer than tasks.timeout_s",
    Drop.TOO_LONG: "its prompt is longer than tasks.max_prompt_tokens",
    Drop.REFUSED: "the engine would not take its prompt",
    Drop.EQUAL_REWARDS: "its rewards were all equal (buffer.drop_equal_rewards)",
    Drop.TRUNCATED: "all its answers were cut (buffer.mask_truncated)",
    Drop.WORKER_DIED: "its worker died; its prompt comes again",
}
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
    Metric("eval/accuracy", "mean held-out reward, of the last evaluation that ended in this step"),
    Metric("eval/low", "lower end of its 95 % interval (docs/evaluation.md)"),
    Metric("eval/high", "upper end of the same"),
    Metric("eval/version", "the version that answered in that evaluation, on every engine"),
    Metric("eval/count", "answers it graded"),
    Metric("eval/failures", "answers it could not grade; left out of the mean"),
    Metric("eval/truncated_frac", "share of its answers that was cut at rollout.max_new_tokens"),
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
    *(Metric(DROPPED[r], f"groups dropped since the run began: {WHY[r]}") for r in Drop),
    Metric(
        "sft/loss", "`minirl sft`: mean -logprob of the step's answer tokens, before its update"
    ),
    Metric("sft/heldout_loss", "the same over eval.num_prompts held-out examples, after the step"),
    Metric("faults/workers_replaced", "workers that died or froze, since the run began"),
    Metric("faults/steps_redone", "steps taken back since the run began: a trainer rank died"),
    Metric("weights/publish_s", "seconds rank 0 took to publish: canary, copy into the store"),
    Metric(
        "weights/reload_pause_s", "mean seconds an engine stood still for a reload in this step"
    ),
    Metric("train/loss", "minus the objective, weighted by train.loss_norm, per trained token"),
    Metric("train/grad_norm", "gradient norm before clipping, mean over minibatches"),
    Metric("train/skipped_updates", "updates left out: loss or gradient was not finite"),
    Metric("train/kl", "mean KL to the first model over trained tokens"),
    Metric("train/value_loss", "critic: half the squared error, mean over trained tokens"),
    Metric("train/entropy", "mean entropy of the policy's distribution at trained tokens, in nats"),
    Metric("train/clip_frac", "share of trained tokens whose ratio was clipped"),
    Metric("train/behav_ratio_mean", "mean over trained tokens of w = π_prox / π_behav"),
    Metric("train/capped_frac", "share of trained tokens with w > train.behav_cap"),
    Metric(
        "train/logprob_gap",
        "mean |vLLM's logprob - the trainer's| over tokens written by the step's starting version",
    ),
    Metric(
        "train/spliced_gap",
        'the same over those that follow older versions\' tokens: what rollout.on_update = "keep" '
        "makes inexact",
    ),
    Metric("train/tokens_per_s", "tokens trained on (prompts too) / seconds the ranks were at it"),
    Metric("train/tokens", "trained tokens of this step"),
    Metric("train/idle_frac", "time rank 0 waited for a batch in this step / its seconds"),
    Metric("train/devices", "devices that trained in this step"),
    Metric("train/lr", "learning rate of this step"),
    Metric("guard/warnings", "rules of [guard] that this step broke, told of or not"),
)
NAMES = frozenset(metric.name for metric in TABLE)
TIMED = ("seconds", "_per_s", "_s", "idle_frac")


def is_timed(name: str) -> bool:
    """Of a clock: the only values in which two runs of one seed at η = 0 differ."""
    return name.endswith(TIMED)


def cut(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Takes the lines after a step away, and a line that was torn. Gives those that are left."""
    return keep_lines(path, lambda line: has_step(line) and line["step"] <= last_step)


def has_step(line: dict[str, Any]) -> bool:
    return type(line.get("step")) is int


class MetricsLog:
    """Appends whole lines. On resume, lines past the checkpoint's step are taken back."""

    def __init__(self, path: Path, last_step: int = 0):
        self.path = path
        self.lines = cut(path, last_step)
        self.file = Lines(path)

    def roll_back(self, last_step: int) -> None:
        """From memory: the file may have been torn while it was written."""
        self.lines = [line for line in self.lines if line["step"] <= last_step]
        self.file.close()
        try:
            replace_text(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))
        except OSError:  # a full disk: cutting needs no room
            cut(self.path, last_step)
        self.file = Lines(self.path)

    def write(self, values: dict[str, float | None]) -> dict[str, Any]:
        unknown = values.keys() - NAMES
        assert not unknown, f"not in the table: {unknown}"
        line = {
            metric.name: values[metric.name]
            for metric in TABLE
            if values.get(metric.name) is not None and math.isfinite(values[metric.name])  # type: ignore[arg-type]
        }
        self.file.write(json.dumps(line))
        self.lines.append(line)
        return line

    def close(self) -> None:
        self.file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file. One that was cut, by a crash or a full disk, is left out."""
    return [line for line in read_lines(path) if has_step(line)]
