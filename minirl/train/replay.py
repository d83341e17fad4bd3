"""Computes a saved batch again: which trajectory, which parameter, which number.

Takes a folder that nonfinite.py wrote (a loss that was not finite), or a black box (a logprob gap,
an entropy, a canary), gives findings. One process, on the CPU, however many ranks the run had.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from minirl import blackbox, record
from minirl.config import Config
from minirl.errors import MinirlError, one_line
from minirl.lines import BROKEN
from minirl.recipe import load
from minirl.shm.weights import CANARY_TOKENS, canary_tokens
from minirl.train import attention, nonfinite
from minirl.train.batch import MicroBatch, items_of, pack
from minirl.train.objective import MicroLoss, forward, micro_loss
from minirl.train.policy import Policy, load_policy


@dataclass(frozen=True)
class BadTrajectory:
    """The first token at which something is not finite, and what that is."""

    rank: int
    micro_batch: int
    sequence: int
    token: int
    what: str


@dataclass(frozen=True)
class Replay:
    step: int
    loss: float
    grad_norm: float
    bad_trajectories: list[BadTrajectory]
    bad_gradients: list[str]  # names of parameters


@contextmanager
def _computing(folder: Path) -> Iterator[None]:
    """A file may be whole and still make no sense to a model: that is one line too."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, *BROKEN) as error:
        why = one_line(f"{type(error).__name__}: {error}")
        raise MinirlError(f"{folder} cannot be computed again ({why})") from None


def replay(folder: Path) -> Replay:
    with _computing(folder):
        return _replay(folder)


def _replay(folder: Path) -> Replay:
    saved = nonfinite.read(folder)
    config, numbers = saved.config, saved.record
    policy = _policy(saved.weights, config)
    total, bad = 0.0, []
    for rank, part in enumerate(saved.parts):
        for i, micro in enumerate(part):
            found = micro_loss(policy, micro, config, numbers["progress"])
            (found.loss.sum / numbers["num_trainable"]).backward()
            total += found.loss.sum.item() / numbers["num_trainable"]
            bad += [BadTrajectory(rank, i, *place) for place in _bad_places(micro, found)]
    grads = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.get_total_norm(list(grads.values()))
    names = [name for name, grad in grads.items() if not grad.isfinite().all()]
    return Replay(numbers["step"], total, float(norm), bad, names)


def _bad_places(micro: MicroBatch, found: MicroLoss) -> list[tuple[int, int, str]]:
    columns = {
        "log π_θ": found.logprobs_T,
        "log π_behav": micro.behav_T,
        "log π_prox": found.prox_T,
        "log π_ref": micro.ref_T,
        "the advantage": micro.advantages_T,
    }
    places: dict[int, tuple[int, int, str]] = {}
    for what, column_T in columns.items():
        if column_T is None:
            continue
        for at in (~column_T.isfinite() & micro.trainable_T).nonzero()[:, 0].tolist():
            sequence = int(micro.sequence_T[at])
            places.setdefault(sequence, (sequence, int(micro.positions_T[at]), what))
    return list(places.values())


def _policy(folder: Path, config: Config) -> Policy:
    if not (folder / "config.json").is_file():
        raise MinirlError(f"{folder} has no config.json: its weights were not saved whole")
    return load_policy(str(folder), trust_remote_code=config.model.trust_remote_code)


# A black box ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorstToken:
    group: int
    place: int  # in the group
    token: int
    vllm: float  # logprobs
    trainer: float


@dataclass(frozen=True)
class Look:
    """What a black box says when it is computed again; None where it does not hold that."""

    rule: str
    message: str
    gap: float | None = None
    entropy: float | None = None
    worst: tuple[WorstToken, ...] = ()
    canary_gap: float | None = None  # what was published against the saved weights, here


def look_into(box: Path, num_worst: int = 3) -> Look:
    with _computing(box):
        return _look_into(box, num_worst)


def _look_into(box: Path, num_worst: int) -> Look:
    found = blackbox.read(box)
    config = load(box / "recipe.toml").config
    look = Look(found.why["rule"], str(found.why.get("message", "")))
    if found.weights is None:
        return look
    policy = _policy(found.weights, config)
    canary = found.why.get("canary")
    canary_gap = None
    if canary is not None and len(canary) == CANARY_TOKENS:
        published_T = torch.tensor(canary)
        canary_gap = float((_canary(policy) - published_T)[1:].abs().mean())
    if found.batch is None:
        return Look(look.rule, look.message, canary_gap=canary_gap)
    gap, entropy, worst = _gaps(policy, found.batch, config)
    top = sorted(worst, key=lambda w: -abs(w.vllm - w.trainer))[:num_worst]
    return Look(look.rule, look.message, gap, entropy, tuple(top), canary_gap)


@torch.no_grad()
def _canary(policy: Policy) -> torch.Tensor:
    tokens = canary_tokens(policy.model.config.get_text_config().vocab_size)
    bounds = attention.boundaries([CANARY_TOKENS], torch.device("cpu"))
    logprobs_T, _ = policy(
        torch.tensor(tokens), bounds.positions_T, bounds.cu_seqlens_S1, bounds.max_seqlen
    )
    return logprobs_T.float()


@torch.no_grad()
def _gaps(
    policy: Policy, recorded: record.Recorded, config: Config
) -> tuple[float | None, float | None, list[WorstToken]]:
    """As the step saw them: the gap over tokens of its own version, entropy over trained ones."""
    ring = record.ring_for([recorded])
    batch = record.put(recorded, ring)
    gap = entropy = 0.0
    num_equal = num_trained = 0
    worst = []
    groups = items_of(batch, ring, config.buffer.max_staleness)
    for group, items in zip(batch.groups, groups, strict=True):
        for place, item in enumerate(items):
            micro = pack([item], "cpu")
            logprobs_T, entropy_T = forward(policy, micro, config, micro.trainable_T)
            equal_T = micro.at_equal_version_T & micro.trainable_T
            gap_T = torch.where(equal_T, (logprobs_T - micro.behav_T).abs(), 0.0)
            gap, num_equal = gap + float(gap_T.sum()), num_equal + int(equal_T.sum())
            entropy += float(entropy_T[micro.trainable_T].sum())
            num_trained += int(micro.trainable_T.sum())
            at = int(gap_T.nan_to_num(torch.inf).argmax())
            pair = (float(micro.behav_T[at]), float(logprobs_T[at]))
            worst.append(WorstToken(group.id, place, at, *pair))
    return (
        gap / num_equal if num_equal else None,
        entropy / num_trained if num_trained else None,
        worst,
    )
