"""Numbers that go bad: what is watched, its limit, and what happens then.

Takes a step's metrics and [guard], gives the rules that the step broke. Pure: who asks decides how
a person is told. Rules that only a trainer rank or a verifier can watch stand in the table too, so
that the table is the whole story (docs/faults.md prints it).

    skip   the update is left out on every rank, counted, and its batch saved; or the reward counts
           as failed. The run goes on
    warn   counted in guard/warnings at every step, told at the 1st, 10th, 100th … time
    stop   the run ends in one line with exit code 1; the last good checkpoint stays
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from minirl.config import Config, GuardConfig
from minirl.errors import MinirlError


class Action(StrEnum):
    SKIP = "skip"
    WARN = "warn"
    STOP = "stop"


@dataclass(frozen=True)
class Rule:
    name: str
    what: str
    action: str  # as docs/faults.md says it
    watched_by: str
    remedy: str


MAX_SKIPPED = 3
NOT_FINITE = Rule(
    "not_finite",
    "NaN or inf in the loss, a gradient, vLLM's or the trainer's logprobs",
    f"skip; stop after {MAX_SKIPPED} steps in a row without any update",
    "trainer",
    "look at the saved batch with the command below; a lower train.lr or train.grad_clip helps "
    "most often",
)
WEIGHTS = Rule(
    "weights",
    "NaN or inf in the weights or the optimizer's state: never published, never saved",
    "stop",
    "trainer",
    "go on from the last checkpoint with --resume; if it comes again, start anew with a lower "
    "train.lr",
)
REWARD = Rule(
    "reward",
    "a reward that is NaN or inf",
    "skip: the reward has failed, as tasks.max_failures says",
    "verifier",
    "mend the task's reward",
)
LOGPROB_GAP = Rule(
    "logprob_gap",
    "train/logprob_gap above guard.max_logprob_gap",
    "warn",
    "controller",
    'vLLM and trainer do not compute the same policy: try model.dtype = "float32" and '
    'rollout.on_update = "recompute", or raise guard.max_logprob_gap',
)
ENTROPY = Rule(
    "entropy",
    "train/entropy below guard.min_entropy",
    "warn",
    "controller",
    "the policy hardly explores any more: raise train.clip_high, add train.kl_coef, lower "
    "train.lr, or lower guard.min_entropy",
)
CANARY = Rule(
    "canary",
    "an engine that does not run the weights it was told to (rule 6)",
    "stop",
    "rollout worker",
    "go on from the last checkpoint with --resume; if it comes again, report it",
)
RULES = (NOT_FINITE, WEIGHTS, REWARD, LOGPROB_GAP, ENTROPY, CANARY)


class GuardStop(MinirlError):
    """A number went bad, and its rule says that the run ends."""


@dataclass(frozen=True)
class Breach:
    """A rule that a step broke."""

    rule: Rule
    action: Action
    value: float
    limit: str  # "guard.min_entropy = 0.01"
    count: int = 1  # how often since the run was started

    @property
    def is_told(self) -> bool:
        """A person hears of the 1st, 10th, 100th …: the rest is counted."""
        return self.action is Action.STOP or math.log10(self.count).is_integer()

    def line(self, step: int) -> str:
        again = f" (the {self.count}th time)" if self.count > 1 else ""
        found = f"step {step}: {self.rule.what}{again}: {self.value:.4g}, with {self.limit}"
        return f"{found}; {self.rule.remedy}"


class Guard:
    """Applied by the controller to the metrics of each step."""

    def __init__(self, config: Config):
        self.config: GuardConfig = config.guard
        self._num_minibatches = config.train.num_minibatches
        self._num_idle = 0  # steps in a row without any update
        self._counts: Counter[str] = Counter()

    def judge(self, values: Mapping[str, float | None]) -> list[Breach]:
        limits = self.config
        found = []
        gap, entropy = values.get("train/logprob_gap"), values.get("train/entropy")
        is_updated = (values.get("train/skipped_updates") or 0) < self._num_minibatches
        self._num_idle = 0 if is_updated else self._num_idle + 1
        if self._num_idle >= MAX_SKIPPED:
            limit = f"a limit of {MAX_SKIPPED} steps"
            found.append(self._breach(NOT_FINITE, Action.STOP, self._num_idle, limit))
        # "not <=", so that a value that is not a number breaks the rule too.
        if limits.max_logprob_gap and gap is not None and not gap <= limits.max_logprob_gap:
            limit = f"guard.max_logprob_gap = {limits.max_logprob_gap:g}"
            found.append(self._breach(LOGPROB_GAP, Action.WARN, gap, limit))
        # A step whose updates were all left out has said so already.
        if is_updated and entropy is not None and not entropy >= limits.min_entropy:
            limit = f"guard.min_entropy = {limits.min_entropy:g}"
            found.append(self._breach(ENTROPY, Action.WARN, entropy, limit))
        return found

    def _breach(self, rule: Rule, action: Action, value: float, limit: str) -> Breach:
        self._counts[rule.name] += 1
        return Breach(rule, action, value, limit, self._counts[rule.name])


def as_markdown() -> str:
    """The table as docs/faults.md shows it."""
    rows = [f"| {rule.what} | {rule.watched_by} | {rule.action} |" for rule in RULES]
    return "\n".join(["| what | watched by | then |", "|---|---|---|", *rows]) + "\n"
