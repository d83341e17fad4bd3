"""Stage 7, update: AdamW over a model, its learning rate, DDP or FSDP2, its state by name.

Takes a model, gives a replica of it that takes steps. With train.shard = "optimizer" each rank
keeps the state of its share of the parameters (ZeRO's first stage), updates those, and broadcasts
them. With "full" a rank has a slice of every parameter, of its gradient and its state (FSDP2): a
forward is then a collective. Leaves out: tensor parallelism, offloading.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from minirl.config import TrainConfig
from minirl.messages import RankSetup
from minirl.train import policy
from minirl.train.attention import boundaries


def build_optimizer(
    parameters: Iterable[Tensor], lr: float, train: TrainConfig, is_zero: bool = False
) -> optim.Optimizer:
    """AdamW; norms and biases (fewer than two axes) are not decayed."""
    trained = [p for p in parameters if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    decays = ((matrices, train.weight_decay), (vectors, 0.0))
    groups = [{"params": own, "weight_decay": decay} for own, decay in decays if own]
    options: dict[str, Any] = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8}
    if train.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit as cls
    else:  # Fused, also on CPU: 27 ms against 96 ms (20 M weights).
        cls, options["fused"] = optim.AdamW, True
    if is_zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(groups, cls, **options)
    return cls(groups, **options)


def learning_rate(step: int, base: float, train: TrainConfig) -> float:
    """Of step 0, 1, …: rises in equal parts over `warmup_steps` to `base`, and stays there
    ("constant") or falls so that it would be 0 at `steps` ("linear", "cosine")."""
    if step < train.warmup_steps:
        return base * ((step + 1) / (train.warmup_steps + 1))
    done = min(1.0, (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps))
    scale = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + cos(pi * done)) / 2}
    return base * scale[train.schedule]


def join_ranks(setup: RankSetup) -> None:
    """The process group of DDP, where there are several ranks. They wait while one may save."""
    if setup.num_ranks > 1:
        backend, where = setup.placement.process_group_backend, f"file://{setup.rendezvous}"
        dist.init_process_group(backend, where, timedelta(minutes=30), setup.num_ranks, setup.rank)


def over_ranks(value: Tensor) -> Tensor:
    """Its sum over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def own_slice(tensor: Tensor) -> Tensor:
    """What this rank holds, without a copy: all of it, or under FSDP2 a slice."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def slice_for(parameter: Tensor, given: Tensor) -> Tensor:
    """The part of a whole tensor that belongs to this rank's slice of a parameter."""
    given = given.to(parameter.device)
    if not isinstance(parameter, DTensor) or not given.ndim:
        return given
    mesh, how = parameter.device_mesh, parameter.placements
    return distribute_tensor(given, mesh, how, src_data_rank=None).to_local()


def is_fully_sharded(setup: RankSetup) -> bool:
    return setup.num_ranks > 1 and setup.config.train.shard == "full"


def placed(module: nn.Module, setup: RankSetup) -> nn.Module:
    """On its device: whole, or this rank's slices, in place. FSDP2 moves one layer after another,
    so that the device never holds the whole model. What is gathered is freed after each forward, at
    the root too: it would outlive the update, and the next forward would run on old weights."""
    if is_fully_sharded(setup):
        from transformers.modeling_layers import GradientCheckpointingLayer

        kind = setup.placement.kind
        is_half = kind in policy.AUTOCAST_ON and setup.config.model.dtype == "bfloat16"
        # The residual stream stays float32, as under autocast: inputs are not cast.
        dtype = torch.bfloat16 if is_half else None
        precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
        layers = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
        for part in (*layers, module):
            fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
    return module.to(setup.placement.torch_device)


class Replica:
    """One rank's copy of a model that is trained (the policy or the critic), with its optimizer.
    DDP starts from rank 0's weights, and sums gradients over the ranks in the last backward of a
    step, which `syncing` marks. Under FSDP2 every backward does: gradients kept for the last would
    have to stay whole. Its optimizer sees slices as plain tensors, and skips empty ones."""

    def __init__(self, module: nn.Module, setup: RankSetup, lr: float):
        self.config, self.lr, self.rank = setup.config.train, lr, setup.rank
        self.is_sharded = is_fully_sharded(setup)
        self.num_shares = setup.num_ranks if self.config.shard != "none" else 1
        self.module = self.parallel = placed(module, setup)
        self.named: Any = getattr(module, "model", module)  # whose names a checkpoint has
        is_critic, is_exact = self.named is module, module.dtype == torch.float32
        self.files = ("critic_optimizer", "critic") if is_critic else ("optimizer", "master")
        # The model's own file does not hold its weights as they are.
        self.has_masters = is_critic or not is_exact or self.config.lora_rank > 0
        trained = {n: p for n, p in self.named.named_parameters() if p.requires_grad}
        if self.is_sharded:
            parts = {n: own_slice(p.detach()) for n, p in trained.items()}
            trained = {n: nn.Parameter(part) for n, part in parts.items() if part.numel()}
        self.slices, self.is_8bit = trained, self.config.optimizer == "adamw8bit"
        is_zero = self.num_shares > 1 and not self.is_sharded
        self.optimizer = build_optimizer(trained.values(), lr, self.config, is_zero)
        self._local: Any = getattr(self.optimizer, "optim", self.optimizer)  # of its own share
        if setup.num_ranks > 1 and not self.is_sharded:
            ids = [0] if setup.placement.kind == "cuda" else None
            self.parallel = DistributedDataParallel(module, ids, gradient_as_bucket_view=True)
            # The first backward orders the buckets, and only with the next that syncs are gradients
            # views of them. Until then there are two copies; now there is no AdamW state beside
            # them. These lengths compile to a graph that serves any: were all sizes 2, it would
            # serve no other.
            device = setup.placement.torch_device
            tokens_T, bounds = torch.arange(11, device=device), boundaries([5, 3, 3], device)
            for _ in range(2):
                out = self.parallel(tokens_T, bounds)
                (out[0] if isinstance(out, tuple) else out).sum().backward()

    def zero_grad(self) -> None:
        """In place under DDP, or the gradient would leave its bucket."""
        self.module.zero_grad(set_to_none=self.parallel is self.module)
        if self.is_sharded:
            self.optimizer.zero_grad()  # slices hold the same gradients

    def begin_step(self, step: int) -> float:
        """Sets the learning rate of step 0, 1, … and gives it."""
        lr = learning_rate(step, self.lr, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def syncing(self, is_last: bool) -> AbstractContextManager[None]:
        if is_last or self.parallel is self.module:
            return nullcontext()
        return self.parallel.no_sync()  # type: ignore[operator]

    def clip(self) -> Tensor:
        """The gradient's norm before it was clipped. If it is not finite, nothing is clipped: that
        would spread over the whole gradient and hide its origin."""
        named = dict(self.named.named_parameters())
        for name, part in self.slices.items():
            part.grad = own_slice(named[name].grad)
        own = list(self.slices.values())
        norm = torch.nn.utils.get_total_norm([p.grad for p in own if p.grad is not None])
        if self.is_sharded:
            norm = over_ranks(norm.square()).sqrt()
        if norm.isfinite():
            torch.nn.utils.clip_grads_with_norm_(own, self.config.grad_clip, norm)
        return norm

    def bad_gradients(self) -> list[str]:
        """Names of those that are not finite, in what this rank holds."""
        named = self.module.named_parameters()
        grads = ((name, own_slice(p.grad)) for name, p in named if p.grad is not None)
        return [name for name, grad in grads if not grad.isfinite().all()]

    def bad_weight(self) -> str:
        """The first on any rank, or "". By norms: one pass over the weights."""
        named = list(self.module.named_parameters())
        norms = torch._foreach_norm([own_slice(p.detach()) for _, p in named], dtype=torch.float32)
        bad = over_ranks((~torch.stack(norms).isfinite()).int()).nonzero()
        return named[int(bad[0, 0])][0] if len(bad) else ""

    def state_by_name(self) -> dict[str, Tensor]:
        """Of a sharded optimizer: this rank's share. All 8-bit states share one table of values,
        and a file takes no tensors that share memory."""
        return {
            f"{name}/{field}": value.clone() if "qmap" in field else torch.as_tensor(value)
            for name, parameter in self._owned()
            for field, value in self._local.state.get(parameter, {}).items()
        }

    def save(self, folder: Path) -> None:
        """This rank's part of the optimizer's state, and of weights."""
        if self.rank >= self.num_shares:
            return
        end = f"-{self.rank}-of-{self.num_shares}" if self.num_shares > 1 else ""
        _write(folder, self.files[0] + end, self.state_by_name())
        if self.has_masters and (self.is_sharded or self.rank == 0):
            _write(folder, self.files[1] + (end if self.is_sharded else ""), self.slices)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Each rank is given all that was saved, and keeps what is its own."""
        named, owned = dict(self.named.named_parameters()), dict(self._owned())
        weights = shares(folder, self.files[1])
        for name, own in self.slices.items() if self.has_masters else ():
            own.copy_(slice_for(named[name], weights[name]()))
        # The blocks of an 8-bit state are those of a rank's own slices.
        only = self.rank if self.is_8bit and self.is_sharded else None
        for key, read in shares(folder, self.files[0], only).items():
            name, _, field = key.rpartition("/")
            if (part := owned.get(name)) is not None:
                value = read() if self.is_8bit else slice_for(named[name], read())
                # A fused AdamW keeps it where the weights are, an 8-bit one as a number.
                is_number = self.is_8bit and field == "step"
                self._local.state[part][field] = int(value) if is_number else value.to(part.device)

    def _owned(self) -> list[tuple[str, Tensor]]:
        """Names and what the optimizer updates."""
        names = {id(own): name for name, own in self.slices.items()}
        groups = self._local.param_groups
        return [(names[id(p)], p) for group in groups for p in group["params"]]


def _write(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    on_cpu = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    save_file(on_cpu, folder / f"{name}.safetensors")


def shares(folder: Path, name: str, only: int | None = None) -> dict[str, Callable[[], Tensor]]:
    """Tensors that ranks saved (or one of them), each read when it is asked for: whole, or the
    slices of all ranks in order."""
    found = folder.glob(f"{name}[-.]*")
    paths = sorted(found, key=lambda path: int(f"{path.stem}-0".split("-")[1]))
    files = defaultdict(list)
    for path in paths if only is None else [paths[only]]:
        file = safe_open(path, framework="pt")
        for key in file.keys():  # noqa: SIM118
            files[key].append(file)
    return {key: partial(_joined, key, some) for key, some in files.items()}


def _joined(key: str, files: list[Any]) -> Tensor:
    first, *rest = [file.get_tensor(key) for file in files]
    return torch.cat([first, *rest]) if rest and first.ndim else first
