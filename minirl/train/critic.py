"""The critic of the estimator "gae": what reward is still to come, at every token.

A value head on its own copy of the policy's backbone, trained in the same rank on the same
micro-batches. The head starts at 0: the first step's advantages are then the rewards themselves.

Axes: T tokens of all sequences, E width of the model.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minirl.config import Config
from minirl.train.attention import Boundaries
from minirl.train.batch import MicroBatch
from minirl.train.policy import hidden_states, load_policy


class Critic(nn.Module):
    def __init__(self, backbone: Any, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.backbone, self.dtype = backbone, dtype
        self.head = nn.Linear(backbone.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens_T: Tensor, *bounds: Any) -> Tensor:
        """The value of the tokens before each token; 0 for the first of a sequence."""
        at = Boundaries(*bounds)
        hidden_TE, _ = hidden_states(self.backbone, self.dtype, tokens_T, at)
        values_T = self.head(hidden_TE.float())[:, 0]
        return torch.where(at.positions_T > 0, F.pad(values_T[:-1], (1, 0)), 0.0 * values_T)


def build_critic(config: Config, folder: str) -> Critic:
    model, is_checkpointed = config.model, config.train.gradient_checkpointing
    policy = load_policy(folder, model.dtype, is_checkpointed, model.trust_remote_code)
    return Critic(policy.model.base_model, policy.dtype).train()


def value_loss(critic: nn.Module, micro: MicroBatch) -> Tensor:
    """Half the squared error, summed over the tokens that train."""
    assert micro.returns_T is not None
    errors_T = critic(*micro.inputs) - micro.returns_T
    return torch.where(micro.trainable_T, errors_T, 0.0).square().sum() / 2
