"""Computes the loss of a saved batch again: which trajectory, which parameter, which number.

Takes a folder that nonfinite.py wrote, gives findings. One process, on the CPU, however many ranks
the run had.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from minirl.train import nonfinite
from minirl.train.batch import MicroBatch
from minirl.train.loss import MicroLoss, micro_loss
from minirl.train.policy import load_policy


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


def replay(folder: Path) -> Replay:
    saved = nonfinite.read(folder)
    config, record = saved.config, saved.record
    policy = load_policy(str(saved.weights), trust_remote_code=config.model.trust_remote_code)
    total, bad = 0.0, []
    for rank, part in enumerate(saved.parts):
        for i, micro in enumerate(part):
            found = micro_loss(policy, micro, config, record["progress"])
            (found.loss.sum / record["num_trainable"]).backward()
            total += found.loss.sum.item() / record["num_trainable"]
            bad += [BadTrajectory(rank, i, *place) for place in _bad_places(micro, found)]
    grads = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.get_total_norm(list(grads.values()))
    names = [name for name, grad in grads.items() if not grad.isfinite().all()]
    return Replay(record["step"], total, float(norm), bad, names)


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
