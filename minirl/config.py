"""The recipe as a frozen dataclass tree. Section names are stage names.

Each field's explanation is the string under it: `--help`, `minirl config` and the docs read it from
here. recipe.py reads and writes it as TOML, rules.py says which values make sense.

Leaves out: torch. Importing this costs nothing.
"""

import ast
from dataclasses import Field, dataclass, field, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

TINY = "tiny"
BYTES_PER_TOKEN = 13
"""In the trajectory ring: token 4, mask 1, logprob 4, version 4."""


@dataclass(frozen=True)
class ModelConfig:
    path: str = "tiny"
    """A Hugging Face folder or hub name; "tiny" is the model minirl builds and warms up itself."""
    dtype: str = "float32"
    """What vLLM computes in and what is published: "float32" or "bfloat16"."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you have read that code."""


@dataclass(frozen=True)
class TasksConfig:
    kind: str = "arithmetic"
    """Which task: "arithmetic", "calculator", "code", "countdown", "gsm8k", "math", or one's own:
    "my_task.py:MyTask" (beside the recipe, or in the working folder) or "package.module:MyTask"."""
    data: str = ""
    """A folder, a .jsonl, .csv or .parquet file (beside the recipe, or in the working folder), or
    a hub name. Empty: the task's own."""
    prompt_column: str = ""
    """Column of the data that holds prompts, text or chat messages. Empty: the task's own."""
    reference_column: str = ""
    """Column of the data that holds references. Empty: the task's own."""
    train_split: str = "train"
    """Split of the data to train on: of the hub, or a file's name in the folder."""
    test_split: str = "test"
    """Split to evaluate on. Empty, or where the data is one file: a tenth of the training rows."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the task itself can be told, as the table [tasks.options]; docs/tasks.md lists it."""
    max_prompt_tokens: int = 256
    """Prompts longer than this are dropped, with a count."""
    verifiers: int = 1
    """Processes that compute rewards."""
    timeout_s: float = 10.0
    """A reward that takes longer is a failure, and its verifier is replaced."""
    memory_gib: float = 4.0
    """What a verifier may allocate; a reward that wants more fails."""
    max_failures: int = 0
    """Rewards of a group that may fail, and are left out; with more the group is dropped."""
    overlong_tokens: int = 0
    """Answers within this many tokens of the limit lose reward, up to 1 at it (DAPO); 0 is off."""
    format: str = ""
    """What a well-formed answer looks like: "boxed", "hashes", "think", "think_answer" or a regular
    expression for the whole answer; empty is off. Evaluations never count it."""
    format_weight: float = 0.1
    """Reward that a well-formed answer gets on top, where tasks.format is set."""
    length_weight: float = 0.0
    """Reward that an answer of rollout.max_new_tokens loses, a shorter one its share; 0 is off."""
    reward_weight: float = 1.0
    """What the task's own reward is multiplied with before the parts above are added."""
    reward_clip: tuple[float, ...] = ()
    """[low, high]: the sum of all parts is kept within these; empty is off."""


@dataclass(frozen=True)
class DevicesConfig:
    kind: str = "auto"
    """"cuda", "cpu", or "auto": cuda where there is one."""
    rollout: int = 1
    """Devices that run vLLM (on CPU: processes)."""
    train: int = 1
    """Devices that train, one DDP rank each (on CPU: processes)."""
    split: str = "manual"
    """"auto" shares rollout + train devices out as planned for the GPU (`minirl plan`)."""
    tensor_parallel: int = 1
    """Rollout devices to one vLLM engine."""


@dataclass(frozen=True)
class RolloutConfig:
    group_size: int = 8
    """Trajectories to a prompt."""
    max_new_tokens: int = 128
    """An answer is cut here. In a task of several turns: all turns, the replies too."""
    max_turns: int = 8
    """Turns of the model to one answer at most, in a task that replies (docs/tasks.md)."""
    temperature: float = 1.0
    """Of the sampling distribution; the trainer applies the same."""
    top_p: float = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 is off."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest; 0 is off."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer; the answer keeps them."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end an answer, beside the model's own end."""
    on_update: str = "recompute"
    """At new weights, the KV of running sequences is rebuilt ("recompute") or kept ("keep")."""
    max_num_seqs: int = 256
    """Sequences that one engine decodes at once."""
    memory_fraction: float = 0.85
    """Share of a GPU's memory that vLLM takes. On CPU see kv_cache_gib."""
    kv_cache_gib: float = 0.5
    """KV cache of one engine on CPU."""


@dataclass(frozen=True)
class BufferConfig:
    max_staleness: int = 2
    """η: no token older than this many versions is trained. 0 is exactly synchronous."""
    on_stale: str = "mask"
    """Tokens too old when their group is done: "mask" them out, "drop" the group, or "wait"."""
    target_staleness: float = -1.0
    """Batches that generation may be ahead of training; -1: as few as keep the trainer fed."""
    drop_equal_rewards: bool = False
    """Drop groups whose rewards are all equal and fill the batch with others (DAPO)."""
    mask_truncated: bool = False
    """Keep answers that were cut at the limit out of the loss; their rewards still count."""


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 40
    """Training steps; each publishes one version."""
    batch_size: int = 32
    """Groups (prompts) to a step."""
    num_minibatches: int = 1
    """Optimizer steps to a batch."""
    lr: float = 1e-6
    """Learning rate of AdamW."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    schedule: str = "constant"
    """Of the learning rate after that: "constant", or "linear" or "cosine" down to 0 at the end."""
    weight_decay: float = 0.0
    """Of AdamW; norms and biases are left out."""
    grad_clip: float = 1.0
    """Largest gradient norm."""
    max_tokens: int = 16384
    """Tokens to a micro-batch on one device: lower it when memory runs out."""
    algorithm: str = "grpo"
    """Sets the keys below that a recipe leaves out, as docs/algorithms.md says: "grpo", "dapo",
    "dr_grpo", "rloo", "reinforce++", "gspo", "cispo", "a3po", "areal" or "ppo"."""
    estimator: str = "grpo"
    """Of the advantage: "grpo", "dr_grpo", "rloo", "reinforce++", "batch" (plain reward, normalised
    over the batch), or "gae", which trains a critic: a second model of the same size."""
    objective: str = "decoupled"
    """"decoupled" PPO (the paper's eq. 5), "naive" PPO (ratio to the sampling policy), "gspo"
    (ratio of whole sequences) or "cispo" (clipped weights, every token keeps its gradient)."""
    proximal: str = "forward"
    """Where prox, the policy at the start of the step, comes from: a "forward" before the first
    minibatch, or "loglinear", between behaviour and current policy, without that forward."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: float = 0.0
    """Where the advantage is negative, the objective is not below dual_clip times it; 0 is off."""
    behav_cap: float = 5.0
    """Tokens whose weight w = prox / behaviour is above this are treated as behav_above says."""
    behav_above: str = "mask"
    """"mask" them out of the loss, or "clamp" their w at behav_cap."""
    behav_level: str = "token"
    """w of each "token", or of each "sequence": the geometric mean over its trained tokens."""
    loss_norm: str = "token"
    """The loss is a mean over "token"s, a mean over each "sequence" and then over sequences, or a
    sum over tokens by a "constant": trajectories times rollout.max_new_tokens."""
    kl_coef: float = 0.0
    """Weight of the KL to the model that the run began with; 0 is off and loads no reference."""
    kl_in: str = "loss"
    """The KL is a term of the "loss", or of the "reward" of each token."""
    kl_kind: str = "k3"
    """Its estimate with d = log ref - log policy: "k1" -d, "k2" d²/2, "k3" exp(d) - d - 1."""
    gamma: float = 1.0
    """Discount of the estimator "gae"."""
    gae_lambda: float = 1.0
    """λ of the estimator "gae": 1 is the return minus the value, 0 trusts the critic."""
    critic_lr: float = 1e-5
    """Learning rate of the critic of the estimator "gae"."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more time."""
    compile: bool = False
    """torch.compile the model: slow first steps, then faster ones; for long runs on CUDA."""
    shard_optimizer: bool = False
    """Each training device keeps a part of AdamW's state: less memory, a broadcast a step."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank on all linear layers instead of all weights; 0 is off.
    Merged weights are published and saved. Needs the extra `lora`."""


@dataclass(frozen=True)
class SftConfig:
    """Of `minirl sft`; what is not here (weight_decay, grad_clip, max_tokens, lora_rank, …) is as
    in [train]."""

    steps: int = 200
    """Training steps of `minirl sft`."""
    batch_size: int = 64
    """Examples to a step of `minirl sft`."""
    lr: float = 1e-5
    """Learning rate of `minirl sft`."""
    warmup_steps: int = 10
    """Steps of `minirl sft` over which the learning rate rises from 0."""
    schedule: str = "linear"
    """Of the learning rate after that: "constant", or "linear" or "cosine" down to 0 at the end."""


@dataclass(frozen=True)
class EvalConfig:
    every: int = 10
    """Steps between evaluations on held-out prompts; 0: only before and after."""
    num_prompts: int = 256
    """Held-out prompts to an evaluation."""
    temperature: float = 0.0
    """0 is greedy."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 0
    """Steps between checkpoints; 0: only by time and at the end."""
    every_s: float = 600.0
    """One is saved after so many seconds in any case, so that a fault costs no more; 0 is off."""
    keep: int = 2
    """How many of the last checkpoints stay; the best by held-out accuracy stays besides."""


@dataclass(frozen=True)
class LogConfig:
    samples: int = 2
    """Readable trajectories to a step, in samples.jsonl."""
    trace: bool = False
    """Write a timeline: trace.json.gz opens in ui.perfetto.dev, and `minirl report` draws it."""
    to: tuple[str, ...] = ()
    """Where metrics go beside metrics.jsonl: "tensorboard", "wandb", "trackio", each an extra."""
    stall_s: float = 300.0
    """When nothing moves for this long, stacks are written and the run ends with exit code 3."""
    record: bool = False
    """Keep every trained batch, for `minirl replay`: 13 bytes a token, prompts too."""


@dataclass(frozen=True)
class GuardConfig:
    max_logprob_gap: float = 0.1
    """Largest train/logprob_gap, vLLM's logprobs against the trainer's; 0 is off."""
    on_logprob_gap: str = "warn"
    """A step above that: "warn" or "stop"."""
    min_entropy: float = 0.001
    """Smallest train/entropy, in nats: below it the policy has collapsed; 0 is off."""
    on_entropy: str = "warn"
    """A step below that: "warn" or "stop"."""
    reward_range: tuple[float, ...] = ()
    """Smallest and largest reward, as [0, 1]: one outside has failed. Empty: any finite one."""
    max_skipped: int = 3
    """Steps in a row whose updates were all left out as not finite; then the run stops."""


@dataclass(frozen=True)
class Config:
    seed: int = 0
    """Of prompts, sampling and initialisation."""
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
    guard: GuardConfig = field(default_factory=GuardConfig)

    @property
    def num_slots(self) -> int:
        """Groups that may be running, ready or in training at once (DESIGN: slots)."""
        return (self.buffer.max_staleness + 1) * self.train.batch_size

    @property
    def max_tokens_per_trajectory(self) -> int:
        return self.tasks.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def is_synchronous(self) -> bool:
        return self.buffer.max_staleness == 0

    @property
    def ring_bytes(self) -> int:
        """Shared memory that the trajectory ring needs: a cell for every trajectory in a slot."""
        cells = self.num_slots * self.rollout.group_size
        return cells * self.max_tokens_per_trajectory * BYTES_PER_TOKEN


SECTIONS: dict[str, type] = {f.name: cast(type, f.type) for f in fields(Config) if f.name != "seed"}

KEYS: dict[str, Field[Any]] = {f.name: f for f in fields(Config) if f.name not in SECTIONS} | {
    f"{section}.{f.name}": f for section, cls in SECTIONS.items() for f in fields(cls)
}
"""Every key of a recipe, dotted: "seed", "train.lr"."""

TABLE = "tasks.options"
"""The one key that is a table of its own, whose names the task decides."""


def get(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


@cache
def _explanations() -> dict[tuple[str, str], str]:
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    found = {}
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for statement, below in pairwise(cls.body):
            match statement, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[cls.name, name] = " ".join(text.split())
    return found


def explain(section: str, name: str) -> str:
    """The explanation under a field; the section of `seed` is ""."""
    return _explanations()[SECTIONS[section].__name__ if section else "Config", name]
