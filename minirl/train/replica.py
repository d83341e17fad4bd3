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
        """The gradient's norm before it was clipped. One that is not finite would spoil all of the
        gradient, so that its origin could no longer be seen: then nothing is clipped."""
        parameters = list(self.module.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if norm.isfinite():
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.grad_clip, norm)
        return norm

    def step(self) -> None:
        self.optimizer.step()

    # -- what is not finite, by name

    def bad_gradients(self) -> list[str]:
        grads = ((name, p.grad) for name, p in self.module.named_parameters())
        return [name for name, grad in grads if grad is not None and not grad.isfinite().all()]

    def bad_weight(self) -> str:
        """The first, or "". By norms: one pass over the weights."""
        named = list(self.module.named_parameters())
        norms = torch.stack(torch._foreach_norm([p.detach() for _, p in named]))
        if norms.isfinite().all():
            return ""
        return named[int((~norms.isfinite()).nonzero()[0, 0])][0]

    def bad_state(self) -> str:
        """The same of what the optimizer keeps."""
        for state in self.optimizer.state.values():
            for name, value in (state or {}).items():  # None: another rank's share
                if torch.is_tensor(value) and not value.isfinite().all():
                    return f"{name} of an optimizer"
        return ""
