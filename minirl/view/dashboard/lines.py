"""What the lines of metrics.jsonl and samples.jsonl say, in the dashboard's words. Pure, and light:
`minirl watch` loads no torch.
"""

from typing import Any

from minirl.balance import balance
from minirl.view.dashboard.snapshot import Curve, Sample, thinned

CURVES = (
    "reward/mean",
    "rollout/tokens_per_s",
    "train/tokens_per_s",
    "rollout/length_mean",
    "rollout/truncated_frac",
    "train/logprob_gap",
)
RECENT_STEPS = 20  # for the ETA, the verdict and the histogram
MAX_PROMPT, MAX_ANSWER = 1000, 2000  # letters of a sample


def step_text(line: dict[str, Any]) -> str:
    """A step in one plain line."""

    def told(name: str, form: str) -> str:
        return form.format(line[name]) if name in line else "?"

    return (
        f"reward {told('reward/mean', '{:.3f}')}  "
        f"staleness {told('buffer/staleness_mean', '{:.2f}')} "
        f"(max {told('buffer/staleness_max', '{:.0f}')})  "
        f"gen {told('rollout/tokens_per_s', '{:,.0f}')} tok/s  "
        f"train {told('train/tokens_per_s', '{:,.0f}')} tok/s"
    )


def curves_of(lines: list[dict[str, Any]]) -> dict[str, Curve]:
    found = {}
    for name in CURVES:
        points = [(float(line["step"]), float(line[name])) for line in lines if name in line]
        if points:
            found[name] = thinned(Curve([x for x, _ in points], [y for _, y in points]))
    return found


def mean_step_s(recent: list[dict[str, Any]]) -> float | None:
    if len(recent) < 2:
        return None
    return (recent[-1]["seconds"] - recent[0]["seconds"]) / (len(recent) - 1)


def verdict(
    recent: list[dict[str, Any]], rollout: int, train: int, word: str, is_synchronous: bool
) -> str:
    """What holds the run back, in one sentence; empty where it is too early to tell."""
    found = balance(recent, rollout, train)
    return found.sentence(word, is_synchronous) if found else ""


def sample_of(line: dict[str, Any]) -> Sample:
    prompt = line["prompt"]
    if not isinstance(prompt, str):
        prompt = "\n".join(str(message.get("content", "")) for message in prompt)
    return Sample(
        step=line["step"],
        prompt=prompt[-MAX_PROMPT:],
        answer=_cut(line["answer"]),
        reference=str(line["reference"])[:200],
        reward=float(line["reward"]),
        versions=list(line["versions"]),
        stop=str(line["stop"]),
    )


def _cut(text: str) -> str:
    """A long answer by its two ends: the end is where the result is."""
    if len(text) <= MAX_ANSWER:
        return text
    half = MAX_ANSWER // 2
    return f"{text[:half]} […] {text[-half:]}"
