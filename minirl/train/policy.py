"""The policy: a Hugging Face causal LM over packed sequences, giving logprobs instead of logits.

Takes tokens packed end to end with their boundaries (`attention.boundaries`), gives for each needed
token its logprob under the prefix, with gradient, and the entropy of the distribution it came from,
without. Weights are float32 masters; with "bfloat16" the forward runs under autocast, on CUDA or
where LoRA keeps resting weights in it. The residual stream is float32 in any case.
Leaves out heads that do more than a product (bias, soft cap, scaling): `load_policy` refuses them.
The critic of the estimator "gae" is a copy of the policy's backbone with a value head.

Axes: T tokens of all sequences, N tokens whose logprob is needed, C of them in one chunk,
V vocabulary, E width of the model, S1 sequences + 1, U tokens that the backbone sees (sharing.py).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minirl.config import Config
from minirl.devices import hide_broken_torchvision
from minirl.errors import MinirlError, RecipeError
from minirl.train import attention, checkpoint, lora
from minirl.train.attention import Boundaries, boundaries
from minirl.train.packing import Unit
from minirl.train.sharing import Shared, share

hide_broken_torchvision()

from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402

CHUNK = 1024  # rows of logits in memory at once: 600 MB at a vocabulary of 150 k
SEPARABLE = {"full_attention", "sliding_attention", "attention"}  # layers that can be packed
AUTOCAST_ON = {"cuda"}  # on a CPU bfloat16 is slower than float32
Gathered = tuple[dict[str, Tensor], dict[str, Tensor]]  # of the model, and of its adapters


class Policy(nn.Module):
    """Wraps `model`, which must use packed attention. Callable through DDP."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.model, self.dtype, self.head = model, dtype, Head()
        self.can_share = True  # a prompt between answers

    def forward(
        self,
        tokens_T: Tensor,
        bounds: Boundaries,
        temperature: float = 1.0,
        needed_T: Tensor | None = None,
        shared: Shared | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(logprobs_T, entropy_T) of the tokens that `needed_T` marks (default: all).

        Elsewhere, and at the first token of each sequence, both are 0. Every parameter is part of
        the graph even when no token is needed: a dummy micro-batch gives zero gradients to DDP."""
        # transformers shares config objects between models: another may have switched ours.
        assert self.model.config._attn_implementation == attention.NAME
        backbone, predicted_T = self.model.base_model, bounds.positions_T > 0
        hidden_UE, dtype = hidden_states(backbone, self.dtype, tokens_T, bounds, shared)
        at_N = (predicted_T if needed_T is None else predicted_T & needed_T).nonzero()[:, 0]
        before_N = at_N - 1 if shared is None else shared.unique_T[at_N - 1]
        hidden_NE = hidden_UE.index_select(0, before_N)
        weight_VE = self.model.get_output_embeddings().weight
        head = self.head._replace(temperature=temperature, dtype=dtype)
        logprobs_N, entropy_N = HeadLogprobs.apply(hidden_NE, weight_VE, tokens_T[at_N], head)
        zeros_T = logprobs_N.new_zeros(len(tokens_T))
        return zeros_T.index_put((at_N,), logprobs_N), zeros_T.index_put((at_N,), entropy_N)

    def gather(self, must_keep: bool) -> Gathered:
        """All weights, merged, and those of adapters: in the memory of the one rank that keeps
        them. Where weights are sharded each is a collective: every rank calls this."""

        def kept(weights: lora.Weights, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
            whole = ((name, weight()) for name, weight in weights.items())
            return {name: tensor.to(dtype).cpu() for name, tensor in whole if must_keep}

        return kept(lora.merged(self.model), self.dtype), kept(lora.adapter(self.model))

    def save(self, folder: Path, gathered: Gathered, source: Path) -> None:
        """Weights, config and, from the folder `source`, the tokenizer: what transformers and vLLM
        load; with LoRA, the adapter."""
        weights, adapter = gathered
        self.model.config.dtype = self.dtype
        self.model.save_pretrained(folder, state_dict=weights, max_shard_size="1TB")
        checkpoint.copy_tokenizer(source, folder)
        if adapter:
            lora.save_adapter(self.model, adapter, folder / "adapter", str(source))


class Critic(nn.Module):
    """What reward is still to come, at every token. The head starts at 0: the first step's
    advantages are then the rewards themselves."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.backbone, self.dtype = policy.model.base_model, policy.dtype
        self.head = nn.Linear(policy.model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens_T: Tensor, bounds: Boundaries, shared: Shared | None = None) -> Tensor:
        """The value of the tokens before each token; 0 for the first of a sequence."""
        hidden_UE, _ = hidden_states(self.backbone, self.dtype, tokens_T, bounds, shared)
        values_U = self.head(hidden_UE.float())[:, 0]
        values_T = values_U if shared is None else values_U.index_select(0, shared.unique_T)
        return torch.where(bounds.positions_T > 0, F.pad(values_T[:-1], (1, 0)), 0.0 * values_T)


def hidden_states(
    backbone: nn.Module,
    dtype: torch.dtype,
    tokens_T: Tensor,
    bounds: Boundaries,
    shared: Shared | None,
) -> tuple[Tensor, torch.dtype]:
    """(hidden_UE, the dtype that products are computed in). Nothing is shared: U is T."""
    if shared is not None:
        tokens_T, positions_U = tokens_T[shared.rows_U], bounds.positions_T[shared.rows_U]
        bounds = shared.segments._replace(positions_T=positions_U)
    kind = tokens_T.device.type
    held = backbone.get_input_embeddings().weight.dtype  # type: ignore[operator, union-attr]
    use_bf16 = dtype == torch.bfloat16 and (kind in AUTOCAST_ON or held == dtype)
    with torch.autocast(kind, torch.bfloat16, enabled=use_bf16):
        hidden_UE = backbone(
            input_ids=tokens_T[None],
            position_ids=bounds.positions_T[None],
            cu_seqlens=bounds.cu_seqlens_S1,
            max_seqlen=bounds.max_seqlen,
            keys=shared and shared.keys,
            use_cache=False,
        ).last_hidden_state[0]
    return hidden_UE, torch.bfloat16 if use_bf16 else hidden_UE.dtype


def _logits(hidden_CE: Tensor, weight_VE: Tensor, temperature: float) -> Tensor:
    logits_CV = (hidden_CE @ weight_VE.T).float()
    return logits_CV if temperature == 1 else logits_CV.div_(temperature)


def _chunk_forward(
    hidden_CE: Tensor, targets_C1: Tensor, weight_VE: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs_C, entropy_C, the logits' log-sum-exp)."""
    logits_CV = _logits(hidden_CE, weight_VE, temperature)
    lse_C = logits_CV.logsumexp(-1)
    probs_CV = (logits_CV - lse_C[:, None]).exp_()
    entropy_C = lse_C - torch.einsum("cv,cv->c", probs_CV, logits_CV)
    return logits_CV.gather(1, targets_C1)[:, 0] - lse_C, entropy_C, lse_C


def _chunk_backward(
    hidden_CE: Tensor, weight_VE: Tensor, columns_C1: list[Tensor], temperature: float
) -> Tensor:
    """The gradient of the product. The columns: targets, log-sum-exp, gradient of logprobs."""
    targets_C1, lse_C1, grad_C1 = columns_C1
    probs_CV = _logits(hidden_CE, weight_VE, temperature).sub_(lse_C1).exp_()
    d_logits_CV = probs_CV.mul_(-grad_C1).scatter_add_(1, targets_C1, grad_C1)
    d_logits_CV = d_logits_CV if temperature == 1 else d_logits_CV.div_(temperature)
    return d_logits_CV.to(hidden_CE.dtype)


class Head(NamedTuple):
    """How logprobs are computed; `train.compile` compiles what is done with one chunk."""

    forward: Callable[..., Any] = _chunk_forward
    backward: Callable[..., Any] = _chunk_backward
    temperature: float = 1.0
    dtype: torch.dtype = torch.float32  # of products; everything else is float32


class HeadLogprobs(torch.autograd.Function):
    """(logprobs_N with gradient, entropy_N without) of softmax(hidden · weight / temperature), in
    chunks whose logits are computed again in backward: d logprob / d logits = onehot(target) -
    softmax."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, head: Head
    ) -> tuple[Tensor, Tensor]:
        given = weight_VE.to(head.dtype), head.temperature
        pairs = zip(hidden_NE.split(CHUNK), targets_N[:, None].split(CHUNK), strict=True)
        chunks = [head.forward(x_CE.to(head.dtype), at_C1, *given) for x_CE, at_C1 in pairs]
        logprobs_N, entropy_N, lse_N = map(torch.cat, zip(*chunks, strict=True))
        ctx.save_for_backward(hidden_NE, weight_VE, targets_N, lse_N)
        ctx.head = head
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_NE, weight_VE, targets_N, lse_N), grad_N = ctx.saved_tensors, grads[0]
        head, product_VE = ctx.head, weight_VE.to(ctx.head.dtype)
        d_hidden_NE = torch.empty_like(hidden_NE)
        # Under LoRA the weight is not trained.
        is_trained, wide = ctx.needs_input_grad[1], torch.float32  # also where FSDP2 gathers less
        d_weight_VE = torch.zeros_like(weight_VE, dtype=wide) if is_trained else None
        columns = [x_N[:, None].split(CHUNK) for x_N in (targets_N, lse_N, grad_N)]
        rows = hidden_NE.split(CHUNK), d_hidden_NE.split(CHUNK)
        for hidden_CE, d_hidden_CE, *columns_C1 in zip(*rows, *columns, strict=True):
            hidden_CE = hidden_CE.to(head.dtype)
            d_product_CV = head.backward(hidden_CE, product_VE, columns_C1, head.temperature)
            d_hidden_CE.copy_(d_product_CV @ product_VE)
            if d_weight_VE is not None:
                d_weight_VE += d_product_CV.T @ hidden_CE
            del d_product_CV  # or it would lie beside the next chunk's logits
        return d_hidden_NE, d_weight_VE, None, None


def build_policy(config: Config, folder: str) -> Policy:
    """The policy as a recipe trains it: whole or by LoRA adapters, compiled or not."""
    model, train = config.model, config.train
    policy = load_policy(folder, model.dtype, train.gradient_checkpointing)
    if train.lora_rank:
        torch.manual_seed(config.seed)  # every rank draws the same adapters
        lora.add_adapters(policy.model, train.lora_rank, policy.dtype)
        if train.gradient_checkpointing:
            policy.model.enable_input_require_grads()
    if train.compile:
        policy.model.base_model.compile(dynamic=True)
        forward = torch.compile(_chunk_forward, dynamic=True)
        policy.head = Head(forward, torch.compile(_chunk_backward, dynamic=True))
    return policy


def model_flops(policy: Policy, lengths: Sequence[int], keys: Sequence[int] = ()) -> float:
    """Of a forward and a backward over sequences, which see `keys` or themselves: 6 per weight and
    token (4 where it is not trained), and causal attention. Recomputation does not count."""
    config = policy.model.config.get_text_config()
    heads, size = config.num_attention_heads, getattr(config, "head_dim", None)
    width = heads * (size or config.hidden_size // heads) * config.num_hidden_layers
    per_token = sum((4 + 2 * p.requires_grad) * p.numel() for p in policy.parameters())
    pairs = zip(lengths, keys or lengths, strict=True)
    return float(sum(per_token * n + 6 * width * n * (2 * k - n) for n, k in pairs))


def load_policy(
    folder: str, dtype_str: str = "float32", gradient_checkpointing: bool = False
) -> Policy:
    """From a Hugging Face folder or hub name. Weights are float32 whatever the file holds;
    `dtype_str` is what the forward computes in on CUDA."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=attention.NAME,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # check_loaded reports it: transformers' error is a page long
        output_loading_info=True,
    )
    check_loaded(folder, info)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # The policy that is trained must be the one that sampled, also in training mode.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    # Embeddings may be held or gathered in less than float32, which the residual stream is not.
    model.get_input_embeddings().register_forward_hook(widen)
    policy = Policy(model, getattr(torch, dtype_str))
    check_head(policy)
    return policy.train()


def widen(_module: nn.Module, _args: Any, out: Tensor) -> Tensor:
    return out.float() if out.dtype in attention.HALF else out


def check_loaded(folder: str, info: dict[str, Any]) -> None:
    """transformers fills what it does not find with random numbers, and only says so in a log."""
    wrong = [
        *(f"{n} is {[*a]}, and config.json makes it {[*b]}" for n, a, b in info["mismatched_keys"]),
        *(f"lacks {name}" for name in info["missing_keys"]),
        *(f"has, for no layer, {name}" for name in info["unexpected_keys"]),
    ]
    if wrong:
        remedy = "its weights are not those of its config.json: fetch the model again"
        raise RecipeError("model.path", folder, min(wrong), remedy)


@torch.no_grad()
def check_head(policy: Policy) -> None:
    """The policy's logprobs, packed, must be those of the model's own forward of one sequence. If
    they differ only where a prompt is shared, prompts are never shared."""
    model, exact = policy.model, Policy(policy.model)  # in float32, also where autocast is used
    name, rest = type(model).__name__, "minirl cannot train it yet"
    kinds = {*(getattr(model.config.get_text_config(), "layer_types", None) or ())} - SEPARABLE
    across = f"{', '.join(sorted(kinds)) or 'its'} layers look across packed sequences"
    tokens_T, lengths = torch.arange(1, 9, device=next(model.parameters()).device), [8, 8, 5]
    alone, packed = (boundaries(n, tokens_T.device) for n in (lengths[:1], lengths))
    bounds = {"cu_seqlens": alone.cu_seqlens_S1, "max_seqlen": alone.max_seqlen}
    try:
        logits_TV = model(tokens_T[None], use_cache=False, **bounds).logits[0]
        inputs = torch.cat([tokens_T[:n] for n in lengths]), packed
        ours_A, _ = exact(*inputs)
    except TypeError:  # of a layer that takes the boundaries for another's
        raise MinirlError(f"{name}: {across}: {rest}") from None
    own_T = logits_TV[:-1].float().log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]
    own_A = torch.cat([F.pad(own_T, (1, 0))[:n] for n in lengths])
    first, *others = [gap_T.max().item() for gap_T in (ours_A - own_A).abs().split(lengths)]
    if not first < 1e-3:
        does = f"does more to its logits than a product (logprobs differ by {first:.1e})"
        raise MinirlError(f"{name} {does}: {rest}")
    if not max(others) < 1e-3:
        raise MinirlError(f"{name}: {across}: {rest}")
    once = share([Unit([0, 1, 2], 3, [n - 3 for n in lengths])], str(tokens_T.device))
    policy.can_share = bool((exact(*inputs, shared=once)[0] - own_A).abs().max() < 1e-3)
