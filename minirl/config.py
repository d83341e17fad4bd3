"""The recipe's fields: type, default, range or choices, and one line of help, all in one place.

Gives one frozen dataclass per section, which pydantic checks when it is made, also by `replace`.
docs/recipe.md is printed from the help under the fields. Leaves out TOML and rules between fields
(recipe.py). Loads no torch.
"""

from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, GetPydanticSchema
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

TINY, TINY_FOLDER = "tiny", Path(__file__).parent / "tiny"  # made by tests/warm_up.py
BYTES_PER_TOKEN = 13  # in the trajectory ring: token 4, mask 1, logprob 4, version 4
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

Line = Annotated[str, Field(pattern=r"^\P{Cc}*$")]  # no control character
Name = Annotated[str, Field(pattern=r"^\P{Cc}*[^\s\p{Cc}]\P{Cc}*$")]  # and not blank
OptionName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
StopToken = Annotated[int, Field(ge=0, lt=2**31)]
Plain = str | bool | int | float
Option = Annotated[Any, GetPydanticSchema(lambda _, schema_of: schema_of(Plain | list[Plain]))]
"""What TOML can write and a resumed run can compare; to a type checker, anything."""


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    path: Name = TINY
    """A Hugging Face folder or hub name; "tiny" (0.35 M parameters) comes with minirl."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of vLLM and of published weights."""


@dataclass(frozen=True, config=STRICT)
class TasksConfig:
    kind: Name = "arithmetic"
    """"arithmetic", "calculator", "code", "countdown", "gsm8k", "math", or your own class:
    "my_task.py:MyTask" or "package.module:MyTask"."""
    data: Line = ""
    """A folder, a .jsonl, .csv or .parquet file, or a hub name. Empty: the task's own."""
    prompt_column: Line = ""
    """Column of prompts, text or chat messages. Empty: the task's own."""
    reference_column: Line = ""
    """Column of references. Empty: the task's own."""
    train_split: Name = "train"
    """Split to train on, or a file's name in the folder."""
    test_split: Line = "test"
    """Split to evaluate on. Empty, or one file: a tenth of the training rows."""
    options: dict[OptionName, Option] = field(default_factory=dict)
    """The task's own settings (docs/tasks.md)."""
    template: dict[OptionName, Option] = field(default_factory=dict)
    """For the model's chat template, such as enable_thinking = false; prompts and turns."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=10**6)] = 256
    """Prompts longer than this are dropped, with a count."""
    verifiers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that compute rewards."""
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 10.0
    """A reward that takes longer fails; its verifier is replaced."""
    memory_gib: Annotated[float, Field(ge=0.25, le=4096)] = 4.0
    """Memory of a verifier; a reward that needs more fails."""


@dataclass(frozen=True, config=STRICT)
class DevicesConfig:
    kind: Literal["auto", "cuda", "cpu"] = "auto"
    """"auto" is cuda where there is one."""
    rollout: Annotated[int, Field(ge=1, le=1024)] = 1
    """Devices that run vLLM (on CPU: processes)."""
    train: Annotated[int, Field(ge=1, le=1024)] = 1
    """Devices that train, one DDP rank each (on CPU: processes)."""
    split: Literal["manual", "auto"] = "manual"
    """"auto" takes the split that `minirl plan` recommends."""
    share: bool = False
    """Both pools on one GPU (always where there is but one) or on all cores; at η = 0 in turns."""
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    """Rollout devices per vLLM engine, for a model too large for one GPU."""
    nodes: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = 1
    """Boxes of a Ray cluster, each with devices.rollout; "auto" is all (docs/several-boxes.md)."""


@dataclass(frozen=True, config=STRICT)
class RolloutConfig:
    group_size: Annotated[int, Field(ge=2, le=4096)] = 8
    """Trajectories per prompt."""
    max_new_tokens: Annotated[int, Field(ge=1, le=10**6)] = 128
    """An answer is truncated here, replies of the task included."""
    max_turns: Annotated[int, Field(ge=1, le=10_000)] = 8
    """The model's turns in a task that replies."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Of the sampling distribution; the trainer applies the same."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Sample among the k likeliest tokens; 0 is off."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    """Texts that end an answer; the answer keeps them."""
    stop_tokens: Annotated[tuple[StopToken, ...], Field(strict=False)] = ()
    """Token ids that end an answer, beside the model's own end."""
    on_update: Literal["recompute", "keep"] = "recompute"
    """What happens to the KV of running sequences at new weights."""
    max_num_seqs: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Sequences that one engine decodes at once."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Share of a GPU's memory that vLLM takes, where it is alone there."""
    kv_cache_gib: Annotated[float, Field(gt=0, le=4096)] = 0.5
    """KV cache of one engine on CPU, or on a GPU that it shares with the trainer."""


@dataclass(frozen=True, config=STRICT)
class BufferConfig:
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 2
    """η: no token older than this many versions is trained. 0 is exactly synchronous."""
    on_stale: Literal["mask", "drop", "wait"] = "mask"
    """Tokens too old when their group is done: mask them, drop the group, or wait."""
    target_staleness: Annotated[float, Field(ge=-1, le=1000)] = -1.0
    """Batches that generation may be ahead; -1: as few as keep the trainer fed."""
    drop_equal_rewards: bool = False
    """Drop groups whose rewards are all equal (DAPO)."""
    mask_truncated: bool = False
    """Keep truncated answers out of the loss, but in the baseline."""
    max_faults: Annotated[float, Field(gt=0, le=10**6)] = 3.0
    """Batches of groups in a row (24 groups at least) that get no reward: then the run stops."""


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    steps: Annotated[int, Field(ge=1, le=10**7)] = 40
    """Training steps; each publishes one version."""
    batch_size: Annotated[int, Field(ge=1, le=10**6)] = 32
    """Groups (prompts) per step."""
    num_minibatches: Annotated[int, Field(ge=1, le=10**6)] = 1
    """Optimizer steps per batch."""
    lr: Annotated[float, Field(gt=0, le=1)] = 1e-6
    """Learning rate of AdamW; 1e-6 to 2e-5 are usual."""
    warmup_steps: Annotated[int, Field(ge=0, le=10**7)] = 0
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate after that; all but "constant" fall to 0."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of AdamW; norms and biases are left out."""
    grad_clip: Annotated[float, Field(gt=0, le=10**6)] = 1.0
    """Largest gradient norm."""
    max_tokens: Annotated[int, Field(ge=1, le=10**8)] = 16384
    """Tokens per micro-batch on one device (shared prompts once): lower it when memory runs out."""
    algorithm: Literal[
        "grpo", "dapo", "dr_grpo", "rloo", "reinforce++", "gspo", "cispo", "a3po", "areal", "ppo"
    ] = "grpo"
    """Sets the keys below that a recipe leaves out, as docs/algorithms.md says."""
    estimator: Name = "grpo"
    """Of the advantage: "grpo", "dr_grpo", "rloo", "reinforce++", "batch", "gae" (a critic), or
    your own function: "my_adv.py:my_advantage"."""
    objective: Name = "decoupled"
    """"decoupled" PPO (the paper's eq. 5), "naive" PPO, "gspo", "cispo", or your own function:
    "my_loss.py:my_loss"."""
    proximal: Literal["forward", "loglinear"] = "forward"
    """π_prox by a "forward" before the first minibatch, or "loglinear" interpolation (A-3PO)."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0, le=100)] = 0.2
    """The ratio is clipped above 1 + clip_high."""
    behav_cap: Annotated[float, Field(gt=1, le=10**6)] = 5.0
    """Tokens whose weight w = prox / behaviour is above this are left out of the loss."""
    loss_norm: Literal["token", "sequence", "constant"] = "token"
    """Mean over "token"s, over "sequence"s of their means, or sum by a "constant" (Dr. GRPO)."""
    kl_coef: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight in the loss of the KL to the first model; 0 is off and loads no reference."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """λ of the estimator "gae"; 0 trusts the critic."""
    critic_lr: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """Learning rate of the critic ("gae")."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more time."""
    compile: bool = False
    """torch.compile: slow first steps, then faster ones."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """"adamw8bit" keeps AdamW's state in a quarter of the memory. Needs extra `adamw8bit`."""
    shard: Literal["none", "optimizer", "full"] = "none"
    """"optimizer" splits AdamW's state over the ranks, "full" weights and gradients too (FSDP2)."""
    lora_rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rank of LoRA adapters on all linear layers; the model itself is then kept in model.dtype.
    0 is off. Needs extra `lora`."""


@dataclass(frozen=True, config=STRICT)
class SftConfig:
    steps: Annotated[int, Field(ge=1, le=10**7)] = 200
    """Steps of `minirl sft`; other keys are those of [train]."""
    batch_size: Annotated[int, Field(ge=1, le=10**6)] = 64
    """Examples per step."""
    lr: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """Rises over ten steps, then falls to 0."""


@dataclass(frozen=True, config=STRICT)
class EvalConfig:
    every: Annotated[int, Field(ge=0, le=10**7)] = 10
    """Steps between evaluations on held-out prompts; 0: only before and after."""
    num_prompts: Annotated[int, Field(ge=1, le=10**6)] = 256
    """Held-out prompts per evaluation; 256 give a standard error of 3 points."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """0 is greedy."""


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    every: Annotated[int, Field(ge=0, le=10**7)] = 0
    """Steps between checkpoints; 0: only by time and at the end."""
    every_s: Annotated[float, Field(ge=0, le=604_800)] = 600.0
    """Seconds between checkpoints at most; 0 is off."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Last checkpoints that stay, beside the best by held-out accuracy."""


@dataclass(frozen=True, config=STRICT)
class LogConfig:
    samples: Annotated[int, Field(ge=0, le=1000)] = 2
    """Readable trajectories per step, in samples.jsonl."""
    trace: bool = False
    """Write a timeline, trace.json (ui.perfetto.dev)."""
    to: Annotated[tuple[Literal["tensorboard", "wandb"], ...], Field(strict=False)] = ()
    """Also log to "tensorboard", "wandb", each an extra."""
    stall_s: Annotated[float, Field(ge=1, le=604_800)] = 300.0
    """Without progress for so long, stacks are written and the run exits with 3."""
    record: bool = False
    """Save every batch, with the weights that it started from, for `minirl replay`."""


@dataclass(frozen=True, config=STRICT)
class Config:
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Of prompts, sampling, initialisation."""
    model: ModelConfig = field(default_factory=ModelConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def num_devices(self) -> int:
        return self.devices.rollout + self.devices.train - self.devices.share

    @property
    def num_nodes(self) -> int:
        """Boxes, where "auto" has been resolved."""
        return 1 if self.devices.nodes == "auto" else self.devices.nodes

    @property
    def num_slots(self) -> int:
        """Groups that may be running, ready or in training at once."""
        return (self.buffer.max_staleness + 1) * self.train.batch_size

    @property
    def max_tokens_per_trajectory(self) -> int:
        return self.tasks.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def is_synchronous(self) -> bool:
        return self.buffer.max_staleness == 0

    @property
    def takes_turns(self) -> bool:
        """On a shared device: the engine sleeps while the trainer trains."""
        return self.devices.share and self.is_synchronous

    @property
    def ring_bytes(self) -> int:
        """Of the trajectory ring: a cell for every trajectory in a slot."""
        cells = self.num_slots * self.rollout.group_size
        return cells * self.max_tokens_per_trajectory * BYTES_PER_TOKEN


SECTIONS: dict[str, Any] = {f.name: f.type for f in fields(Config) if f.name != "seed"}

# Every key of a recipe, dotted: "seed", "train.lr".
KEYS: dict[str, FieldInfo] = {"seed": Config.__pydantic_fields__["seed"]} | {  # type: ignore[attr-defined]
    f"{section}.{name}": info
    for section, cls in SECTIONS.items()
    for name, info in cls.__pydantic_fields__.items()
}

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"train.clip_high": 0.28},
    "dr_grpo": {"train.estimator": "dr_grpo", "train.loss_norm": "constant"},
    "rloo": {"train.estimator": "rloo"},
    "reinforce++": {"train.estimator": "reinforce++"},
    "gspo": {"train.objective": "gspo", "train.loss_norm": "sequence"}
    | {"train.clip_low": 3e-4, "train.clip_high": 4e-4},
    "cispo": {"train.objective": "cispo", "train.clip_low": 1.0, "train.clip_high": 4.0},
    "a3po": {"train.proximal": "loglinear"},
    "areal": {"train.estimator": "batch"},
    "ppo": {"train.estimator": "gae"},
}
"""What `train.algorithm` sets where a recipe leaves the key out; the trainer knows only the parts.
None sets train.kl_coef: a reference model costs memory. docs/algorithms.md has every formula."""


def get(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)
