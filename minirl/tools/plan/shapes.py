"""The sizes of a model. Takes its config.json, or its name in a small table; loads nothing."""

from dataclasses import dataclass
from typing import Any

from minirl.config import TINY, Config
from minirl.errors import RecipeError
from minirl.recipe import find_model, read_model_config


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama and Qwen kind: gated MLP, grouped-query attention."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    is_tied: bool

    @property
    def num_parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.is_tied else 2)
        return self.layers * layer + embeddings + self.hidden

    def num_adapted(self, rank: int) -> int:
        """Parameters of low-rank adapters on all linear layers."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + queries) + 2 * (self.hidden + keys)
        return self.layers * rank * (attention + 3 * (self.hidden + self.intermediate))

    @property
    def kv_values_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


TABLE = {
    "tiny": Shape(2, 128, 4, 2, 32, 256, 384, True),
    "Qwen2.5-0.5B": Shape(24, 896, 14, 2, 64, 4864, 151936, True),
    "Qwen2.5-1.5B": Shape(28, 1536, 12, 2, 128, 8960, 151936, True),
    "Qwen2.5-3B": Shape(36, 2048, 16, 2, 128, 11008, 151936, True),
    "Qwen2.5-7B": Shape(28, 3584, 28, 4, 128, 18944, 152064, False),
    "Qwen2.5-14B": Shape(48, 5120, 40, 8, 128, 13824, 152064, False),
    "Qwen2.5-32B": Shape(64, 5120, 40, 8, 128, 27648, 152064, False),
    "Qwen3-0.6B": Shape(28, 1024, 16, 8, 128, 3072, 151936, True),
    "Qwen3-1.7B": Shape(28, 2048, 16, 8, 128, 6144, 151936, True),
    "Qwen3-4B": Shape(36, 2560, 32, 8, 128, 9728, 151936, True),
    "Qwen3-8B": Shape(36, 4096, 32, 8, 128, 12288, 151936, False),
    "DeepSeek-R1-Distill-Qwen-1.5B": Shape(28, 1536, 12, 2, 128, 8960, 151936, False),
    "DeepSeek-R1-Distill-Qwen-7B": Shape(28, 3584, 28, 4, 128, 18944, 152064, False),
    "Llama-3.2-1B": Shape(16, 2048, 32, 8, 64, 8192, 128256, True),
    "Llama-3.1-8B": Shape(32, 4096, 32, 8, 128, 14336, 128256, False),
    "SmolLM2-135M": Shape(30, 576, 9, 3, 64, 1536, 49152, True),
}


def shape_of(config: Config) -> Shape:
    """Of the recipe's model: from its folder or the local cache if it is there."""
    folder = find_model(config) if config.model.path != TINY else None
    if folder is not None:
        return from_config_json(config, read_model_config(config, folder))
    name = config.model.path.rpartition("/")[2]
    # Qwen2.5-1.5B-Instruct and Qwen2.5-Math-1.5B have the shape of Qwen2.5-1.5B.
    plain = name.replace("-Math", "").replace("-Coder", "")
    for known in sorted(TABLE, key=len, reverse=True):
        if plain == known or plain.startswith(f"{known}-"):
            return TABLE[known]
    rule = "is neither on this machine nor in the table of shapes"
    remedy = "give a folder with its config.json, or one of " + ", ".join(list(TABLE)[1:])
    raise RecipeError("model.path", config.model.path, rule, remedy)


def from_config_json(config: Config, values: dict[str, Any]) -> Shape:
    text = values.get("text_config", values)
    try:
        heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
        return Shape(
            layers=int(text["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            intermediate=int(text["intermediate_size"]),
            vocab=int(text["vocab_size"]),
            is_tied=bool(text.get("tie_word_embeddings", values.get("tie_word_embeddings", False))),
        )
    except (KeyError, TypeError, ValueError) as missing:
        rule = f"its config.json has no usable sizes ({missing})"
        remedy = "plan knows dense decoders of the Llama and Qwen kind"
        raise RecipeError("model.path", config.model.path, rule, remedy) from None
