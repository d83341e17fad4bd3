"""Stage 7, update: one rank's copy of a model that is trained: the policy, or the critic.

Takes a model, gives it DDP where there are several ranks, an optimizer, and a step that is taken or
not. Gradients are summed over ranks in the backward that `syncing` is told is the last.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minirl.config import TrainConfig
from minirl.train.optimizer import build_optimizer, learning_rate


class Replica:
    def __init__(self, module: nn.Module, config: TrainConfig, lr: float, is_sharded: bool = False):
        self.module, self.config, self.lr = module, config, lr
        self.optimizer = build_optimizer(module, lr, config.weight_decay, is_sharded)
        self.parallel: nn.Module = module

    def join(self, num_ranks: int, kind: str) -> None:
        """The other ranks. After a checkpoint was loaded: DDP sends what rank 0 has."""
        if num_ranks > 1:
            ids = [0] if kind == "cuda" else None
            self.parallel = nn.parallel.DistributedDataParallel(self.module, device_ids=ids)

    def begin_step(self, step: int) -> float:
        """Sets the learning rate of step 0, 1, … and gives it."""
        config = self.config
        lr = learning_rate(step, self.lr, config.warmup_steps, config.schedule, config.steps)
        self.set_learning_rate(lr)
        return lr

    def set_learning_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    @contextlib.contextmanager
    def syncing(self, is_last: bool) -> Iterator[None]:
        if self.parallel is not self.module and not is_last:
            with self.parallel.no_sync():  # type: ignore[operator]
                yield
        else:
            yield

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def clip(self) -> Tensor:
        """The gradient's norm before it was clipped."""
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.config.grad_clip)

    def step(self) -> None:
        self.optimizer.step()
