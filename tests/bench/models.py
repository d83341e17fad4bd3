"""The models of the benches: random Qwen3s, and a publisher that plays the trainer.

Takes a name, gives a folder with config.json alone: weights come from the store, as in a run.
The models have no token that ends an answer, so that a bench decides how long each one is.
"""

import json
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from minirl import devices
from minirl.shm.weights import CANARY, CANARY_TOKENS, TensorSpec, WeightStore, canary_tokens
from tests.tiny_models import COMMON as MODEL

POSITIONS = 2048


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    init: float

    @property
    def table(self) -> tuple[TensorSpec, ...]:
        """The checkpoint's tensors; the head is tied to the embedding."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        of_layer = {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }
        layers = [
            TensorSpec(f"model.layers.{layer}.{name}.weight", dims)
            for layer in range(self.layers)
            for name, dims in of_layer.items()
        ]
        embedding = TensorSpec("model.embed_tokens.weight", (self.vocab, self.hidden))
        return (embedding, *layers, TensorSpec("model.norm.weight", (self.hidden,)))

    @property
    def num_bytes(self) -> int:
        return 4 * sum(spec.numel for spec in self.table)

    def write(self, folder: Path) -> str:
        """The folder of an ordinary Hugging Face model, without its weights."""
        config = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "initializer_range": self.init,
            "max_position_embeddings": POSITIONS,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
        }
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)


TINY = Shape(
    layers=MODEL["num_hidden_layers"],
    hidden=MODEL["hidden_size"],
    intermediate=MODEL["intermediate_size"],
    heads=MODEL["num_attention_heads"],
    kv_heads=MODEL["num_key_value_heads"],
    head_dim=MODEL["head_dim"],
    vocab=432,  # about what the tokenizer of the warmed-up one has
    init=MODEL["initializer_range"],
)
M135 = Shape(
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab=49152,
    init=0.02,
)
SHAPES = {"tiny": TINY, "135m": M135}


class Publisher:
    """Has two sets of weights and publishes them in turn: each update changes every tensor."""

    def __init__(self, pipe: Connection, folder: str, store: WeightStore):
        devices.hide_broken_torchvision()
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        self.store = store
        model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(folder)).eval()
        self.sets, vocab_size = [], model.config.vocab_size
        for _ in range(2):
            weights = {name: w.detach().clone() for name, w in model.state_dict().items()}
            in_order = [weights[spec.name] for spec in store.table]
            canary = np.zeros(CANARY_TOKENS, CANARY)
            canary["tokens"] = canary_tokens(vocab_size)
            canary["logprobs"] = _canary(model, vocab_size)
            self.sets.append((in_order, canary))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
        self.publish()

    def publish(self) -> None:
        version = self.store.latest + 1
        weights, canary = self.sets[version % 2]
        with self.store.publishing(version) as slot:
            slot.fill(weights)
            slot.canary[:] = canary


def publish(publisher: Publisher) -> None:
    publisher.publish()


def publish_every(publisher: Publisher, seconds: float, count: int) -> None:
    """The first one half a period from now."""
    start = time.monotonic() - seconds / 2
    for i in range(1, count + 1):
        time.sleep(max(0.0, start + i * seconds - time.monotonic()))
        publisher.publish()


@torch.no_grad()
def _canary(model: torch.nn.Module, vocab_size: int) -> np.ndarray:
    """As a trainer computes it: of each token its logprob after those before it, 0 for the first.

    Axes: T tokens, V vocabulary.
    """
    tokens_T = torch.tensor(canary_tokens(vocab_size))
    logprobs_TV = model(tokens_T[None]).logits[0].float().log_softmax(-1)
    logprobs_T = torch.zeros(len(tokens_T))
    logprobs_T[1:] = logprobs_TV[:-1].gather(1, tokens_T[1:, None])[:, 0]
    return logprobs_T.numpy()
