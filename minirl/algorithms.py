"""What `train.algorithm` stands for: a name for several keys of [train]. No torch.

A key that a recipe writes itself wins over its algorithm; `minirl config` says which did. Nothing
else reads the name: the trainer knows only the parts. docs/algorithms.md has every formula.

Leaves out the KL term: a reference model costs memory, so `train.kl_coef` is always one's own.
"""

from typing import Any

COMMON: dict[str, Any] = {
    "train.estimator": "grpo",
    "train.objective": "decoupled",
    "train.proximal": "forward",
    "train.clip_low": 0.2,
    "train.clip_high": 0.2,
    "train.dual_clip": 0.0,
    "train.behav_level": "token",
    "train.loss_norm": "token",
}

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": COMMON,
    "dapo": COMMON | {"train.clip_high": 0.28},
    "dr_grpo": COMMON | {"train.estimator": "dr_grpo", "train.loss_norm": "constant"},
    "rloo": COMMON | {"train.estimator": "rloo"},
    "reinforce++": COMMON | {"train.estimator": "reinforce++"},
    "gspo": COMMON
    | {
        "train.objective": "gspo",
        "train.clip_low": 3e-4,
        "train.clip_high": 4e-4,
        "train.behav_level": "sequence",
        "train.loss_norm": "sequence",
    },
    "cispo": COMMON | {"train.objective": "cispo", "train.clip_low": 1.0, "train.clip_high": 4.0},
    "a3po": COMMON | {"train.proximal": "loglinear"},
    "areal": COMMON | {"train.estimator": "batch"},
    "ppo": COMMON | {"train.estimator": "gae"},
}
