"""Weights of any version, in a plain model and in a weight store: the test plays the trainer.

Versions differ by far more than an update would make them, so that a token under the wrong weights,
a stale prefix or a tensor left behind is off by whole nats, not by a rounding error.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plain_script
import torch
from crew import publish
from plain_script import PreTrainedModel
from tiny_models import EOS
from torch import Tensor

from minirl.model import weight_table
from minirl.shm.weights import WeightStore

EXACT = 1e-4  # nats between vLLM and a plain float32 forward; measured: 4e-6


class Versions:
    def __init__(self, folder: Path, dtype: str = "float32", ends: Sequence[int] = (EOS,)):
        self.model = plain_script.load(folder)
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
                canary = plain_script.canary(model)
        publish(self.store, version, in_order, canary)

    def publish_next(self, end_scale: float = 1.0) -> int:
        version = self.store.latest + 1
        self.end_scale[version] = end_scale
        self.publish(version)
        return version

    @torch.no_grad()
    def distributions(self, version: int, tokens: list[int], temperature: float = 1.0) -> Tensor:
        return plain_script.distributions(self.load(version), tokens, temperature)

    def exact(self, tokens: list[int], versions: list[int], temperature: float) -> np.ndarray:
        """Of each token that has a version: its logprob under that version, over all before it."""
        exact = np.zeros(len(tokens))
        for version in set(versions) - {-1}:
            all_TV = self.distributions(version, tokens, temperature)
            is_own = np.array(versions) == version
            exact[is_own] = plain_script.own(all_TV, tokens).numpy()[is_own]
        return exact
