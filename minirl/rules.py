"""Which recipes make sense. Pure rules (`validate`), and rules that need the machine or the model.

Takes a Config, raises a RecipeError: one line with key, value, rule and remedy. What needs more
than the recipe is handed in (`check_devices`, `check_memory`, `check_model`): a dry run works
anywhere.

Leaves out: torch, the network, and running a task's code.
"""

import difflib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unicodedata import category

from minirl.algorithms import ALGORITHMS
from minirl.config import KEYS, TINY, Config, get
from minirl.errors import RecipeError, one_line

LOGGERS = ("tensorboard", "wandb", "trackio")
BUILTIN_TASKS = ("arithmetic", "calculator", "code", "countdown", "gsm8k", "math")
NEEDED = ("model.path", "tasks.kind", "tasks.train_split")
NAMES = (
    *NEEDED,
    "tasks.data",
    "tasks.test_split",
    "tasks.prompt_column",
    "tasks.reference_column",
)
"""Keys that are one line of text; those of NEEDED are not empty."""
FOREIGN_VALUES = {
    "gpu": "cuda",
    "bf16": "bfloat16",
    "fp32": "float32",
    "half": "bfloat16",
    "drgrpo": "dr_grpo",
    "reinforce_plus_plus": "reinforce++",
    "tb": "tensorboard",
    "weights_and_biases": "wandb",
}
"""The same for values, where the nearest spelling would mislead: "gpu" is nearest to "cpu"."""


@dataclass(frozen=True)
class Range:
    """What a number may be. An open end is not itself allowed."""

    low: float
    high: float
    remedy: str
    is_low_open: bool = False
    is_high_open: bool = False

    def broken(self, value: float) -> str:
        """The rule that the value breaks, or ""."""
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        if value < self.low or (self.is_low_open and value == self.low):
            return f"must be {'above' if self.is_low_open else 'at least'} {self.low:,}"
        if value > self.high or (self.is_high_open and value == self.high):
            return f"must be {'below' if self.is_high_open else 'at most'} {self.high:,}"
        return ""


CHOICES = {
    "model.dtype": ("float32", "bfloat16"),
    "devices.kind": ("auto", "cuda", "cpu"),
    "devices.split": ("manual", "auto"),
    "rollout.on_update": ("recompute", "keep"),
    "buffer.on_stale": ("mask", "drop", "wait"),
    "train.schedule": ("constant", "linear", "cosine"),
    "sft.schedule": ("constant", "linear", "cosine"),
    "train.algorithm": tuple(ALGORITHMS),
    "train.estimator": ("grpo", "dr_grpo", "rloo", "reinforce++", "batch", "gae"),
    "train.objective": ("decoupled", "naive", "gspo", "cispo"),
    "train.proximal": ("forward", "loglinear"),
    "train.behav_above": ("mask", "clamp"),
    "train.behav_level": ("token", "sequence"),
    "train.loss_norm": ("token", "sequence", "constant"),
    "train.kl_in": ("loss", "reward"),
    "train.kl_kind": ("k1", "k2", "k3"),
    "guard.on_logprob_gap": ("warn", "stop"),
    "guard.on_entropy": ("warn", "stop"),
}

RANGES = {
    "seed": Range(0, 2**32 - 1, "0 is as good as any"),
    "tasks.max_prompt_tokens": Range(1, 10**6, "256 suits short questions"),
    "tasks.verifiers": Range(1, 1024, "one for every few cores is enough"),
    "tasks.timeout_s": Range(0, 86_400, "10 seconds suit most rewards", is_low_open=True),
    "tasks.memory_gib": Range(0.25, 4096, "4 suits most rewards"),
    "tasks.max_failures": Range(0, 4094, "0 drops a group with its first failed reward"),
    "tasks.overlong_tokens": Range(0, 10**6, "0 is off; DAPO takes a fifth of the limit"),
    "devices.rollout": Range(1, 1024, "one box has 1 to 16 devices"),
    "devices.train": Range(1, 1024, "one box has 1 to 16 devices"),
    "devices.tensor_parallel": Range(1, 1024, "1 unless the model is too large for one GPU"),
    "rollout.group_size": Range(2, 4096, "an advantage compares answers to one prompt; 8 is usual"),
    "rollout.max_new_tokens": Range(1, 10**6, "128 to 8192 are usual"),
    "rollout.max_turns": Range(1, 10_000, "2 to 16 are usual; one-turn tasks pay nothing"),
    "rollout.temperature": Range(
        0, 10, "1 is usual, and all answers are alike at 0", is_low_open=True
    ),
    "rollout.top_p": Range(0, 1, "1 is off", is_low_open=True),
    "rollout.top_k": Range(0, 10**6, "0 is off"),
    "rollout.min_p": Range(0, 1, "0 is off", is_high_open=True),
    "rollout.max_num_seqs": Range(1, 65_536, "256 is usual"),
    "rollout.memory_fraction": Range(
        0, 1, "0.85 is usual; less if memory runs out", is_low_open=True, is_high_open=True
    ),
    "rollout.kv_cache_gib": Range(0, 4096, "0.5 serves a tiny model", is_low_open=True),
    "buffer.max_staleness": Range(0, 1000, "0 is synchronous, 2 to 8 are usual"),
    "buffer.target_staleness": Range(-1, 1000, "-1 is as few as keep the trainer fed"),
    "train.steps": Range(1, 10**7, "a run has 20 to 10,000"),
    "train.batch_size": Range(1, 10**6, "32 to 512 are usual"),
    "train.num_minibatches": Range(1, 10**6, "1 to 4 are usual"),
    "train.lr": Range(0, 1, "1e-6 to 2e-5 are usual", is_low_open=True),
    "train.warmup_steps": Range(0, 10**7, "0 is off"),
    "train.weight_decay": Range(0, 1, "0 is off"),
    "train.grad_clip": Range(0, 10**6, "1 is usual", is_low_open=True),
    "train.max_tokens": Range(1, 10**8, "16384 is usual; less if memory runs out"),
    "train.clip_low": Range(0, 1, "0.2 is usual", is_low_open=True),
    "train.clip_high": Range(0, 100, "0.2 is usual", is_low_open=True),
    "train.dual_clip": Range(0, 1000, "0 is off, 3 is usual"),
    "train.kl_coef": Range(0, 100, "0 is off, 0.001 to 0.05 are usual"),
    "train.gamma": Range(0, 1, "1 is usual", is_low_open=True),
    "train.gae_lambda": Range(0, 1, "1 is usual for one reward at the end"),
    "train.critic_lr": Range(0, 1, "1e-5 is usual", is_low_open=True),
    "train.lora_rank": Range(0, 1024, "0 is off, 16 to 64 are usual"),
    "train.behav_cap": Range(
        1, 10**6, "5 is usual; at 1 fresh tokens are masked too", is_low_open=True
    ),
    "sft.steps": Range(1, 10**7, "100 to 2,000 are usual"),
    "sft.batch_size": Range(1, 10**6, "16 to 256 are usual"),
    "sft.lr": Range(0, 1, "1e-5 is usual", is_low_open=True),
    "sft.warmup_steps": Range(0, 10**7, "0 is off"),
    "eval.every": Range(0, 10**7, "0 is only before and after"),
    "eval.num_prompts": Range(1, 10**6, "256 gives an accuracy to about 3 points"),
    "eval.temperature": Range(0, 10, "0 is greedy"),
    "checkpoint.every": Range(0, 10**7, "0 is only by time and at the end"),
    "checkpoint.every_s": Range(0, 604_800, "600 is usual, 0 is off"),
    "checkpoint.keep": Range(1, 1000, "the last good one always stays; 2 is usual"),
    "log.samples": Range(0, 1000, "2 is usual, 0 is none"),
    "log.stall_s": Range(1, 604_800, "300 is usual"),
    "guard.max_logprob_gap": Range(0, 1000, "0 is off; 0.1 is far above what bfloat16 rounds"),
    "guard.min_entropy": Range(0, 100, "0 is off, 0.001 is nearly one answer to every prompt"),
    "guard.max_skipped": Range(1, 10**6, "3 is usual"),
}


def validate(config: Config) -> None:
    """The rules that need neither the model nor the machine."""
    for key, choices in CHOICES.items():
        if (value := get(config, key)) not in choices:
            foreign = FOREIGN_VALUES.get(value)
            near = [foreign] if foreign else difflib.get_close_matches(value, choices, n=1)
            remedy = f'did you mean "{near[0]}"?' if near else f'"{KEYS[key].default}" is usual'
            raise RecipeError(key, value, f"must be one of {', '.join(choices)}", remedy)
    for key, limits in RANGES.items():
        if rule := limits.broken(get(config, key)):
            raise RecipeError(key, get(config, key), rule, limits.remedy)
    for text in config.rollout.stop:
        if not text or any(category(c) == "Cs" for c in text):
            stop = config.rollout.stop
            raise RecipeError("rollout.stop", stop, "has a text that cannot occur", "take it out")
    _validate_names(config)
    for name in config.log.to:
        if name not in LOGGERS:
            near = difflib.get_close_matches(FOREIGN_VALUES.get(name, name), LOGGERS, n=1)
            remedy = f'did you mean "{near[0]}"?' if near else "[] is metrics.jsonl alone"
            rule = f"has {one_line(repr(name))}, which is none of {', '.join(LOGGERS)}"
            raise RecipeError("log.to", config.log.to, rule, remedy)
    if len(set(config.log.to)) < len(config.log.to):
        raise RecipeError("log.to", config.log.to, "names one twice", "take it out")
    _validate_guard(config)
    _validate_batch(config)
    _validate_algorithm(config)
    _validate_rest(config)


def _validate_names(config: Config) -> None:
    for key in NAMES:
        value = get(config, key)
        if not value.strip() and key in NEEDED:
            word = "usual" if key == "tasks.train_split" else "built in"
            remedy = f'"{KEYS[key].default}" is {word}'
            raise RecipeError(key, value, "must not be empty", remedy)
        if any(category(c) in ("Cc", "Cs") for c in value):
            raise RecipeError(key, value, "has a control character", "take it out")


def _validate_guard(config: Config) -> None:
    limits = config.guard.reward_range
    if not all(math.isfinite(limit) for limit in limits):
        rule = "must be finite numbers"
    elif limits and (len(limits) != 2 or limits[0] >= limits[1]):
        rule = "must be the smallest and the largest reward"
    else:
        return
    raise RecipeError("guard.reward_range", limits, rule, "write it like [0, 1], or [] for any")


def _validate_batch(config: Config) -> None:
    train, devices = config.train, config.devices
    if train.batch_size % train.num_minibatches:
        rule = f"must be a multiple of train.num_minibatches = {train.num_minibatches}"
        remedy = _multiples(train.batch_size, train.num_minibatches)
        raise RecipeError("train.batch_size", train.batch_size, rule, remedy)
    share = train.batch_size // train.num_minibatches * config.rollout.group_size
    if share < devices.train:
        rule = f"a minibatch has only {share} trajectories, and each device needs one"
        remedy = f"raise train.batch_size, or lower devices.train to {share}"
        raise RecipeError("devices.train", devices.train, rule, remedy)
    if config.max_tokens_per_trajectory > train.max_tokens:
        longest = config.max_tokens_per_trajectory
        rule = (
            f"must hold one trajectory of {longest} tokens "
            "(tasks.max_prompt_tokens + rollout.max_new_tokens)"
        )
        remedy = f"raise it to {longest} or more, or shorten prompt or answer"
        raise RecipeError("train.max_tokens", train.max_tokens, rule, remedy)


def _validate_algorithm(config: Config) -> None:
    """Parts that contradict each other, or of which one would have no effect."""
    train = config.train
    if 0 < train.dual_clip <= 1:
        rule = "must be 0 or above 1, since a ratio of 1 must stay as it is"
        raise RecipeError("train.dual_clip", train.dual_clip, rule, "3 is usual, 0 is off")
    if train.dual_clip and train.objective == "cispo":
        rule = 'has no effect with train.objective = "cispo"'
        raise RecipeError("train.dual_clip", train.dual_clip, rule, "set it to 0")
    if train.proximal == "loglinear" and train.objective == "naive":
        rule = 'has no effect with train.objective = "naive", which knows no π_prox'
        remedy = 'set train.objective = "decoupled", or leave it out'
        raise RecipeError("train.proximal", train.proximal, rule, remedy)
    if train.kl_coef and train.kl_in == "loss" and train.kl_kind == "k1":
        rule = 'its gradient is 0 on average where train.kl_in = "loss"'
        remedy = 'set it to "k2" or "k3", or set train.kl_in = "reward"'
        raise RecipeError("train.kl_kind", "k1", rule, remedy)
    if train.shard_optimizer and config.devices.train == 1:
        rule = "there is one training device, and nothing to share"
        raise RecipeError("train.shard_optimizer", True, rule, "set it to false")


def _validate_rest(config: Config) -> None:
    devices, rollout = config.devices, config.rollout
    if devices.rollout % devices.tensor_parallel:
        rule = f"must be a multiple of devices.tensor_parallel = {devices.tensor_parallel}"
        remedy = _multiples(devices.rollout, devices.tensor_parallel)
        raise RecipeError("devices.rollout", devices.rollout, rule, remedy)
    if rollout.top_k == 1:
        remedy = "0 is off; otherwise 2 or more"
        raise RecipeError("rollout.top_k", 1, "all answers are alike at 1", remedy)
    _validate_filters(config)
    if config.log.stall_s <= config.tasks.timeout_s:
        rule = f"must be above tasks.timeout_s = {config.tasks.timeout_s}"
        remedy = "raise it, or a slow reward looks like a stall"
        raise RecipeError("log.stall_s", config.log.stall_s, rule, remedy)


def _validate_filters(config: Config) -> None:
    tasks, rollout, target = config.tasks, config.rollout, config.buffer.target_staleness
    if tasks.max_failures > rollout.group_size - 2:
        rule = f"must leave two of rollout.group_size = {rollout.group_size} to compare"
        remedy = f"at most {rollout.group_size - 2}"
        raise RecipeError("tasks.max_failures", tasks.max_failures, rule, remedy)
    if tasks.overlong_tokens > rollout.max_new_tokens:
        rule = f"must be at most rollout.max_new_tokens = {rollout.max_new_tokens}"
        remedy = f"a fifth of it is usual: {max(1, rollout.max_new_tokens // 5)}"
        raise RecipeError("tasks.overlong_tokens", tasks.overlong_tokens, rule, remedy)
    if -1 < target < 0:
        remedy = "-1 is as few as keep the trainer fed; 0 waits for every batch"
        raise RecipeError("buffer.target_staleness", target, "must be -1, or 0 or more", remedy)


def _multiples(value: int, of: int) -> str:
    below, above = value // of * of, (value // of + 1) * of
    return f"make it {below} or {above}" if below else f"make it {above}"


# Rules that need the machine, the model or the task --------------------------------------------


def check_devices(config: Config, kind: str, available: int) -> None:
    """`kind` is what the run would use, "cuda" or "cpu"; `available` counts GPUs or CPU cores."""
    devices = config.devices
    if devices.kind == "cuda" and kind != "cuda":
        remedy = "run it where there is one, or --set devices.kind=cpu"
        raise RecipeError("devices.kind", "cuda", "there is no CUDA device here", remedy)
    wanted = devices.rollout + devices.train
    limit = available if kind == "cuda" else max(4, 2 * available)
    if wanted > limit:
        there = "CUDA device" if kind == "cuda" else "core"
        there = f"1 {there} allows" if available == 1 else f"{available} {there}s allow"
        rule = f"with devices.train = {devices.train} that is {wanted}, more than {there}"
        remedy = f"the two together may be at most {limit}"
        if kind == "cuda" and available == 1:
            remedy = "one GPU is not enough for both pools; two are"
        raise RecipeError("devices.rollout", devices.rollout, rule, remedy)


def check_memory(config: Config, available_bytes: int) -> None:
    """The trajectory ring is allocated at start, whole."""
    if config.ring_bytes > available_bytes:
        gib = [f"{n / 2**30:.1f} GiB" for n in (config.ring_bytes, available_bytes)]
        rule = f"the trajectory ring would take {gib[0]} of the {gib[1]} that are free"
        remedy = "lower it, rollout.group_size, buffer.max_staleness or rollout.max_new_tokens"
        raise RecipeError("train.batch_size", config.train.batch_size, rule, remedy)


def check_task(config: Config) -> None:
    """tasks.kind names a builtin task, or a class in a file that exists. Runs none of its code."""
    kind = config.tasks.kind
    place, colon, name = kind.rpartition(":")
    if not colon:
        if kind not in BUILTIN_TASKS:
            near = difflib.get_close_matches(kind, BUILTIN_TASKS, n=1)
            remedy = f'did you mean "{near[0]}"?' if near else 'your own is "my_task.py:MyTask"'
            rule = f"is none of {', '.join(BUILTIN_TASKS)}"
            raise RecipeError("tasks.kind", kind, rule, remedy)
        return
    if not name.isidentifier():
        raise RecipeError("tasks.kind", kind, "has no class name", 'write "my_task.py:MyTask"')
    if place.endswith(".py"):
        if not _is(Path.is_file, place):
            remedy = "it is looked for beside the recipe, then in the working folder"
            raise RecipeError("tasks.kind", kind, f"there is no file {one_line(place)}", remedy)
    elif not all(part.isidentifier() for part in place.split(".")):
        remedy = 'write "my_task.py:MyTask" or "package.module:MyTask"'
        raise RecipeError("tasks.kind", kind, "names neither a .py file nor a module", remedy)


def check_loggers(config: Config) -> None:
    """The packages behind log.to are here. Imports none of them."""
    for name in config.log.to:
        if find_spec(name) is None:
            remedy = f'pip install "minirl[{name}]", or take it out'
            raise RecipeError("log.to", config.log.to, f"{name} is not installed", remedy)


def find_model(config: Config) -> Path | None:
    """The model's folder: a local one, or the hub's local cache. None: not on this machine (yet).

    Never goes to the network.
    """
    path = config.model.path
    if path == TINY:
        return None
    if _is(Path.is_dir, path):
        if not _is(Path.is_file, f"{path}/config.json"):
            remedy = "name a Hugging Face model folder"
            raise RecipeError("model.path", path, "the folder has no config.json", remedy)
        return Path(path)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", path, re.ASCII):
        remedy = f'name an existing folder, a hub name such as "Qwen/Qwen3-0.6B", or "{TINY}"'
        raise RecipeError("model.path", path, "no such folder, and not a hub name", remedy)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(path, "config.json")
    except ValueError:  # not a valid hub name after all
        found = None
    return Path(found).parent if isinstance(found, str) else None


def read_model_config(config: Config, folder: Path) -> dict[str, Any]:
    """What `check_model` wants: the folder's config.json."""
    try:
        model_config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        model_config = None
    if not isinstance(model_config, dict):
        rule = "its config.json cannot be read"
        raise RecipeError("model.path", config.model.path, rule, "fetch the model again")
    return model_config


def check_model(config: Config, model_config: dict[str, Any]) -> None:
    """What only the model's config.json can tell."""
    text_config = model_config.get("text_config", model_config)
    sizes = text_config if isinstance(text_config, dict) else {}
    limit = sizes.get("max_position_embeddings")
    longest = config.max_tokens_per_trajectory
    if isinstance(limit, int) and longest > limit:
        rule = f"with tasks.max_prompt_tokens that is {longest}, past the model's {limit} positions"
        remedy = f"shorten one: together at most {limit}"
        raise RecipeError("rollout.max_new_tokens", config.rollout.max_new_tokens, rule, remedy)
    parallel = config.devices.tensor_parallel
    heads = sizes.get("num_attention_heads")
    if isinstance(heads, int) and heads % parallel:
        divisors = ", ".join(str(n) for n in range(1, min(heads, 16) + 1) if heads % n == 0)
        rule = f"must divide the model's {heads} attention heads"
        raise RecipeError("devices.tensor_parallel", parallel, rule, f"one of {divisors}")


def _is(test: Callable[[Path], bool], path: str) -> bool:
    """A test of a path that someone typed: a name that no file system allows is just not there."""
    try:
        return test(Path(path))
    except (OSError, ValueError):
        return False
