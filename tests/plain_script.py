"""What minirl must agree with, written the plain way: one sequence at a time through Hugging Face's
own forward, eq. 5 as it stands in the paper, torch's AdamW. No packing, no ranks, no micro-batches.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean, pstdev
from typing import NamedTuple

import numpy as np
import torch
from processes import publish
from tiny_models import EOS, VOCAB
from torch import Tensor

from minirl.config import Config
from minirl.devices import hide_broken_torchvision
from minirl.model import weight_table
from minirl.records import Batch, Group
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import WeightStore, canary_tokens

hide_broken_torchvision()

from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402

Weights = dict[str, Tensor]
SUMMED = ("train/loss", "train/entropy", "train/clip_frac")


def load(folder: Path) -> PreTrainedModel:
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def distributions(model: PreTrainedModel, tokens: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probabilities over the vocabulary that each token but the first was drawn from."""
    logits_TV = model(torch.tensor([tokens])).logits[0, :-1].float()
    return (logits_TV / temperature).log_softmax(-1)


def logprobs(model: PreTrainedModel, tokens: list[int], temperature: float = 1.0) -> Tensor:
    """Of each token; the first has none and is 0."""
    return own(distributions(model, tokens, temperature), tokens)


def own(all_TV: Tensor, tokens: list[int]) -> Tensor:
    chosen_T = all_TV.gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), chosen_T])


@torch.no_grad()
def canary_of(model: PreTrainedModel) -> np.ndarray:
    return logprobs(model, canary_tokens(VOCAB)).numpy()


class Sequence(NamedTuple):
    tokens: list[int]
    advantage: float
    behav_T: Tensor
    prox_T: Tensor
    trains_T: Tensor
    is_fresh_T: Tensor


class PlainScript:
    def __init__(self, folder: Path, config: Config):
        self.model, self.config = load(folder), config
        options = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), config.train.lr, **options)

    def weights(self) -> Weights:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def momentum(self) -> Weights:
        """Adam's running mean of the gradient. Unlike an update it has its size, and no part of it
        is a rounding error that was divided by itself."""
        state = self.optimizer.state
        return {name: state[p]["exp_avg"].clone() for name, p in self.model.named_parameters()}

    def train(self, batch: Batch, ring: TrajectoryRing) -> dict[str, float]:
        """One step, in place. Gives what the trainer's metrics must say."""
        by_group = [[*self.read(group, batch.version, ring)] for group in batch.groups]
        size = len(by_group) // self.config.train.num_minibatches
        sums: Counter[str] = Counter()  # over the trained tokens of the step
        norms, cap = [], self.config.train.behav_cap
        for start in range(0, len(by_group), size):
            part = [s for sequences in by_group[start : start + size] for s in sequences]
            self.optimizer.zero_grad()
            num_tokens = sum(int(s.trains_T.sum()) for s in part)
            (self.loss(part, sums) / max(1, num_tokens)).backward()
            clip = self.config.train.grad_clip
            norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip).item())
            self.optimizer.step()
        everything = [s for sequences in by_group for s in sequences]
        w_N = torch.cat([(s.prox_T - s.behav_T)[s.trains_T].exp() for s in everything])
        gap_N = torch.cat([(s.prox_T - s.behav_T)[s.is_fresh_T].abs() for s in everything])
        values = {
            **{name: sums[name] / max(1, len(w_N)) for name in SUMMED},
            "train/grad_norm": fmean(norms),
            "train/tokens": len(w_N),
            "train/behav_ratio_mean": w_N.mean().item(),
            "train/capped_frac": (w_N > cap).float().mean().item(),
            "train/logprob_gap": gap_N.mean().item(),
        }
        return {name: value for name, value in values.items() if value == value}  # nan: of nothing

    def read(self, group: Group, version: int, ring: TrajectoryRing) -> Iterator[Sequence]:
        oldest = version - self.config.buffer.max_staleness
        for trajectory, reward in zip(group.trajectories, group.rewards, strict=True):
            view = ring.read(trajectory.cell, group.id)
            tokens, versions = view.tokens.tolist(), torch.tensor(view.versions)
            written_T = torch.tensor(view.mask) == 1
            advantage = (reward - fmean(group.rewards)) / (pstdev(group.rewards) + 1e-4)
            with torch.no_grad():
                prox_T = logprobs(self.model, tokens, self.config.rollout.temperature)
            of = torch.tensor(view.logprobs), prox_T
            used = written_T & (versions >= oldest), written_T & (versions == version)
            yield Sequence(tokens, advantage, *of, *used)

    def loss(self, sequences: list[Sequence], sums: Counter[str]) -> Tensor:
        """Minus eq. 5, summed over the trained tokens."""
        train = self.config.train
        total = torch.zeros(())
        for s in sequences:
            all_TV = distributions(self.model, s.tokens, self.config.rollout.temperature)
            logprobs_T = own(all_TV, s.tokens)
            w_T = (s.prox_T - s.behav_T).exp()
            u_T = (logprobs_T - s.prox_T).exp()
            bound_T = u_T.clamp(1 - train.clip_low, 1 + train.clip_high) * s.advantage
            kept_T = s.trains_T & (w_T <= train.behav_cap)
            total = total - (w_T * torch.minimum(u_T * s.advantage, bound_T))[kept_T].sum()
            entropy_T = -(all_TV.exp() * all_TV).sum(-1).detach()
            sums["train/entropy"] += entropy_T[s.trains_T[1:]].sum().item()
            sums["train/clip_frac"] += int((bound_T < u_T * s.advantage)[kept_T].sum())
        sums["train/loss"] += total.item()
        return total


# Any version's weights ----------------------------------------------------------------------------

EXACT = 1e-4  # nats between vLLM and a plain float32 forward; measured: 4e-6


class Versions:
    """In a plain model and in a weight store: the test plays the trainer. Versions differ by far
    more than an update would make them, so that a token under the wrong weights, a stale prefix or
    a tensor left behind is off by whole nats, not by a rounding error."""

    def __init__(self, folder: Path, dtype: str = "float32", ends: Iterable[int] = (EOS,)):
        self.model = load(folder)
        self.base = {name: w.clone() for name, w in self.model.state_dict().items()}
        self.scale = 0.05  # of what makes versions differ
        self.store = WeightStore(weight_table(folder), dtype)
        # By version: the rows of the tokens that end an answer are multiplied by it.
        self.ends, self.end_scale = list(ends), defaultdict[int, float](lambda: 1.0)

    def load(self, version: int) -> PreTrainedModel:
        noise = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                away = self.scale * torch.randn(parameter.shape, generator=noise)
                parameter.copy_((self.base[name] + away).to(self.store.torch_dtype))
            self.model.get_output_embeddings().weight[self.ends] *= self.end_scale[version]
        return self.model

    def publish(self, version: int, canary: np.ndarray | None = None) -> None:
        model = self.load(version)
        in_order = [model.state_dict()[spec.name] for spec in self.store.table]
        if canary is None:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.store.dtype == "bfloat16"):
                canary = canary_of(model)
        publish(self.store, version, in_order, canary)

    def publish_next(self, end_scale: float = 1.0) -> int:
        version = self.store.latest + 1
        self.end_scale[version] = end_scale
        self.publish(version)
        return version

    @torch.no_grad()
    def distributions(self, version: int, tokens: list[int], temperature: float = 1.0) -> Tensor:
        return distributions(self.load(version), tokens, temperature)

    def exact(self, tokens: list[int], versions: list[int], temperature: float) -> np.ndarray:
        """Of each token that has a version: its logprob under that version, over all before it."""
        exact = np.zeros(len(tokens))
        for version in set(versions) - {-1}:
            all_TV = self.distributions(version, tokens, temperature)
            is_own = np.array(versions) == version
            exact[is_own] = own(all_TV, tokens).numpy()[is_own]
        return exact
