"""What minirl must agree with, written the plain way: one sequence at a time through Hugging Face's
own forward, eq. 5 as it stands in the paper, torch's AdamW. No packing, no ranks, no micro-batches.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import torch
from torch import Tensor

from minirl.config import Config
from minirl.devices import hide_broken_torchvision
from minirl.records import Batch, Group
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import canary_tokens

hide_broken_torchvision()

from transformers import AutoModelForCausalLM  # noqa: E402

Weights = dict[str, Tensor]


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def distributions(model: torch.nn.Module, tokens: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probabilities over the vocabulary that each token but the first was drawn from."""
    logits_TV = model(torch.tensor([tokens])).logits[0, :-1].float()
    return (logits_TV / temperature).log_softmax(-1)


def logprobs(model: torch.nn.Module, tokens: list[int], temperature: float = 1.0) -> Tensor:
    """Of each token; the first has none and is 0."""
    all_TV = distributions(model, tokens, temperature)
    own_T = all_TV.gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), own_T])


@torch.no_grad()
def canary(model: torch.nn.Module) -> np.ndarray:
    return logprobs(model, canary_tokens(model.config.vocab_size)).numpy()


@dataclass
class Sequence:
    tokens: list[int]
    advantage: float
    behav_T: Tensor
    trains_T: Tensor
    is_fresh_T: Tensor
    prox_T: Tensor


class PlainScript:
    def __init__(self, folder: Path, config: Config):
        self.model, self.config = load(folder), config
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        )

    def weights(self) -> Weights:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def train(self, batch: Batch, ring: TrajectoryRing) -> dict[str, float]:
        """One step, in place. Gives what the trainer's metrics must say."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.train.lr
        by_group = [self.read(group, batch.version, ring) for group in batch.groups]
        size = len(by_group) // self.config.train.num_minibatches
        norms, losses = [], []
        for start in range(0, len(by_group), size):
            part = [s for sequences in by_group[start : start + size] for s in sequences]
            loss = self.loss(part)
            self.optimizer.zero_grad()
            loss.backward()
            parameters = self.model.parameters()
            norms.append(
                torch.nn.utils.clip_grad_norm_(parameters, self.config.train.grad_clip).item()
            )
            losses.append(loss.item() * count(part))
            self.optimizer.step()
        everything = [s for sequences in by_group for s in sequences]
        w_N = torch.cat([(s.prox_T - s.behav_T)[s.trains_T].exp() for s in everything])
        gap_N = torch.cat([(s.prox_T - s.behav_T)[s.is_fresh_T].abs() for s in everything])
        num_tokens = count(everything)
        values = {
            "train/loss": sum(losses) / max(1, num_tokens),
            "train/grad_norm": fmean(norms),
            "train/tokens": num_tokens,
        }
        if num_tokens:
            cap = self.config.train.behav_cap
            values["train/behav_ratio_mean"] = w_N.mean().item()
            values["train/capped_frac"] = (w_N > cap).float().mean().item()
        if len(gap_N):
            values["train/logprob_gap"] = gap_N.mean().item()
        return values

    def read(self, group: Group, version: int, ring: TrajectoryRing) -> list[Sequence]:
        sequences = []
        oldest = version - self.config.buffer.max_staleness
        for trajectory, reward in zip(group.trajectories, group.rewards, strict=True):
            view = ring.read(trajectory.cell, group.id)
            tokens, versions = view.tokens.tolist(), torch.tensor(view.versions)
            written_T = torch.tensor(view.mask) == 1
            with torch.no_grad():
                prox_T = logprobs(self.model, tokens, self.config.rollout.temperature)
            sequences.append(
                Sequence(
                    tokens=tokens,
                    advantage=(reward - fmean(group.rewards)) / (pstdev(group.rewards) + 1e-4),
                    behav_T=torch.tensor(view.logprobs),
                    trains_T=written_T & (versions >= oldest),
                    is_fresh_T=written_T & (versions == version),
                    prox_T=prox_T,
                )
            )
        return sequences

    def loss(self, sequences: list[Sequence]) -> Tensor:
        """Minus eq. 5, over the trained tokens of a whole minibatch."""
        train = self.config.train
        total = torch.zeros(())
        for s in sequences:
            logprobs_T = logprobs(self.model, s.tokens, self.config.rollout.temperature)
            w_T = (s.prox_T - s.behav_T).exp()
            u_T = (logprobs_T - s.prox_T).exp()
            clipped_T = u_T.clamp(1 - train.clip_low, 1 + train.clip_high)
            objective_T = w_T * torch.minimum(u_T * s.advantage, clipped_T * s.advantage)
            total = total - objective_T[s.trains_T & (w_T <= train.behav_cap)].sum()
        return total / max(1, count(sequences))


def count(sequences: list[Sequence]) -> int:
    return sum(int(s.trains_T.sum()) for s in sequences)
