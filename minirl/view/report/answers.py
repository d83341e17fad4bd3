"""What the model wrote, as HTML: the same held-out prompts under each version, and single tokens,
coloured by the version that wrote them, or by how far the trainer's logprob is from the engine's.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from minirl.run_dir import Line, RunDir

NUM_TOKEN_STEPS = 8  # of a run, evenly spread
GAP_LEVELS = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1)


def plain(prompt: object) -> str:
    """A prompt is text, or chat messages."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return "\n".join(
            f"{m.get('role', '')}: {m.get('content', '')}" for m in prompt if isinstance(m, dict)
        )
    return str(prompt)


def spread(steps: Sequence[int], num: int) -> list[int]:
    """The first, the last, and some between."""
    if len(steps) <= num:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (num - 1))] for i in range(num)]


# -- time travel


def time_travel(run: RunDir) -> str:
    by_prompt: dict[str, list[tuple[Any, Line]]] = {}
    for line in run.evals:
        for answer in line.get("answers", []):
            by_prompt.setdefault(plain(answer.get("prompt")), []).append((line["version"], answer))
    return "".join(
        _one_prompt(prompt, answers, is_open=n == 0)
        for n, (prompt, answers) in enumerate(by_prompt.items())
    )


def _one_prompt(prompt: str, answers: list[tuple[Any, Line]], is_open: bool) -> str:
    reference = escape(str(answers[0][1].get("reference", "")))
    rows = []
    for version, answer in answers:
        text, reward = answer.get("answer"), answer.get("reward")
        words = "no answer could be graded" if text is None else text.strip()
        rows.append(
            f"<tr><td>version {escape(str(version))}</td><td>{reward_badge(reward)}</td>"
            f"<td class='answer'>{escape(words)}</td></tr>"
        )
    return (
        f"<details{' open' if is_open else ''}><summary>{escape(prompt)}"
        f" <span class='dim'>reference: {reference}</span></summary>"
        f"<table class='travel'>{''.join(rows)}</table></details>"
    )


def reward_badge(reward: object) -> str:
    if not isinstance(reward, (int, float)):
        return "<span class='badge'>—</span>"
    kind = "good" if reward >= 1 else "bad" if reward <= 0 else "some"
    return f"<span class='badge {kind}'>{reward:g}</span>"


# -- tokens


def token_view(run: RunDir) -> str:
    """Two radio buttons choose the colours: no script."""
    shown = [sample for sample in run.samples if sample.get("tokens")]
    if not shown:
        return ""
    eta = run.recipe.get("buffer.max_staleness", 0)
    began = {line["step"]: line.get("version", 0) for line in run.batches}
    steps = spread(sorted({sample["step"] for sample in shown}), NUM_TOKEN_STEPS)
    kept = [sample for step in reversed(steps) for sample in shown if sample["step"] == step]
    blocks = [
        _trajectory(sample, began.get(sample["step"]), is_open=n == 0)
        for n, sample in enumerate(kept)
    ]
    name = escape(run.name)
    return (
        "<div class='tokens'>"
        f"<input type='radio' name='{name}' id='{name}-v' class='by-version' checked>"
        f"<label for='{name}-v'>by version</label>"
        f"<input type='radio' name='{name}' id='{name}-g' class='by-gap'>"
        f"<label for='{name}-g'>by logprob gap</label>"
        f"{_legend(eta)}{''.join(blocks)}</div>"
    )


def _legend(eta: object) -> str:
    num = eta if isinstance(eta, int) else 0
    ages = "".join(f"<span class='tok a{min(a, 5)}'>{a}</span> " for a in range(min(num, 5) + 1))
    names = ["0", *(f"{level:g}" for level in GAP_LEVELS)]
    gaps = "".join(f"<span class='tok g{i}'>≥ {name}</span> " for i, name in enumerate(names))
    return (
        f"<p class='key key-v'>versions behind the step that trained it: {ages}"
        "</p>"
        f"<p class='key key-g'>|trainer's logprob − engine's|, in nats: {gaps}"
        "of tokens that are versions behind, also what training has changed since</p>"
    )


def _trajectory(sample: Line, version: int | None, is_open: bool) -> str:
    """`version` is the one that the step started from."""
    facts = f"group {sample.get('group')}, trained from version {version}"
    return (
        f"<details{' open' if is_open else ''}><summary>step {sample['step']} "
        f"{reward_badge(sample.get('shaped'))} <span class='dim'>{escape(facts)}</span></summary>"
        f"<p class='text'>{''.join(_tokens(sample, version))}</p></details>"
    )


def _tokens(sample: Line, began: int | None) -> Iterator[str]:
    columns = (sample.get(n, []) for n in ("tokens", "token_versions", "token_gaps"))
    for text, version, gap in zip(*columns, strict=False):
        age = max(0, (version if began is None else began) - version)
        classes = f"tok a{min(age, 5)} g{gap_level(gap)}"
        words = "not known" if gap is None else f"{gap:.2g}"
        tip = f"version {version} ({age} behind)\ngap {words}"
        shown = escape(text).replace("\n", "⏎<br>")
        yield f"<span class='{classes}' title='{escape(tip)}'>{shown}</span>"


def gap_level(gap: float | None) -> int:
    """0 to 5; what is not known is 0."""
    if gap is None or not math.isfinite(gap):
        return 0
    return sum(abs(gap) >= level for level in GAP_LEVELS)
