"""Memory ran out: which number of the recipe to change, and to what.

Takes a dead worker's role, its last words and how it ended, gives one sentence, or "" where memory
was not the reason. A pure function of text, so that what a GPU would say can be tested anywhere.

Leaves out: a bill before the start, which is `minirl plan`'s.
"""

import re
from pathlib import Path

from minirl.config import Config

DEVICE = ("out of memory", "outofmemoryerror", "cublas_status_alloc_failed")
HOST = ("cannot allocate memory", "can't allocate memory", "memoryerror", "std::bad_alloc")
NO_CACHE = "no available memory for the cache blocks"
CACHE_TOO_SMALL = re.compile(r"([\d.]+) GiB KV cache is needed", re.IGNORECASE)
NO_ROOM = re.compile(
    r"(?:Free|Available) memory on .*?\(([\d.]+)/([\d.]+) GiB\).*?less than (?:desired|requested)",
    re.IGNORECASE | re.DOTALL,
)
WARMING_UP = "warming up sampler"
RESERVE = 0.03  # of a GPU, that stays free below what was found free


def remedy(role: str, words: str, config: Config, kind: str, was_killed_for_memory: bool) -> str:
    """`role` is "train", "rollout" or another; `words` is all that the worker said at its end."""
    said = words.lower()
    if role == "rollout" and (found := _engine(words, config, kind)):
        return found
    if any(sign in said for sign in DEVICE) and role in ("train", "rollout"):
        return _trainer(config) if role == "train" else _engine_ran_out(said, config, kind)
    if was_killed_for_memory or any(sign in said for sign in HOST):
        return _host(role, config, kind)
    return ""


def _change(key: str, before: object, after: object, why: str) -> str:
    return f"{why}: change {key} from {_toml(before)} to {_toml(after)}"


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def _trainer(config: Config) -> str:
    """The cheapest change first: what costs no time, then what costs some, then what costs much."""
    train, why = config.train, "the training device is out of memory"
    least = config.max_tokens_per_trajectory
    if train.max_tokens > least:
        return _change("train.max_tokens", train.max_tokens, max(least, train.max_tokens // 2), why)
    if not train.gradient_checkpointing:
        return _change("train.gradient_checkpointing", False, True, why)
    if not train.shard_optimizer and config.devices.train > 1:
        return _change("train.shard_optimizer", False, True, why)
    longest = config.rollout.max_new_tokens
    return _change("rollout.max_new_tokens", longest, max(1, longest // 2), why)


def _engine(words: str, config: Config, kind: str) -> str:
    """What vLLM says at its start, in its own words."""
    rollout = config.rollout
    if found := CACHE_TOO_SMALL.search(words):
        why = "one sequence's KV does not fit an engine's cache"
        needed = float(found[1])
        if kind == "cpu":
            after = max(rollout.kv_cache_gib, needed) * 2
            return _change("rollout.kv_cache_gib", rollout.kv_cache_gib, round(after, 3), why)
        return _more_of_the_device(config, why)
    if NO_CACHE in words.lower():
        why = "the model leaves no memory for an engine's KV cache"
        if kind == "cpu":
            after = rollout.kv_cache_gib * 2
            return _change("rollout.kv_cache_gib", rollout.kv_cache_gib, round(after, 3), why)
        return _more_of_the_device(config, why)
    if found := NO_ROOM.search(words):
        free, total = float(found[1]), max(float(found[2]), 1e-9)
        why = f"only {free:g} of {total:g} GiB are free for an engine"
        if kind == "cpu":
            after = round(min(rollout.kv_cache_gib, free) / 2, 3)
            return _change("rollout.kv_cache_gib", rollout.kv_cache_gib, after, why)
        share = max(0.05, int((free / total - RESERVE) * 100) / 100)
        return _change("rollout.memory_fraction", rollout.memory_fraction, share, why)
    return ""


def _more_of_the_device(config: Config, why: str) -> str:
    fraction = config.rollout.memory_fraction
    if fraction < 0.95:
        more = min(0.95, round(fraction + 0.05, 2))
        return _change("rollout.memory_fraction", fraction, more, why)
    wide = config.devices.tensor_parallel
    return _change("devices.tensor_parallel", wide, 2 * wide, why)


def _engine_ran_out(said: str, config: Config, kind: str) -> str:
    rollout, why = config.rollout, "the rollout device is out of memory"
    if WARMING_UP in said and rollout.max_num_seqs > 1:
        after = max(1, rollout.max_num_seqs // 2)
        return _change("rollout.max_num_seqs", rollout.max_num_seqs, after, why)
    if kind == "cpu":
        return _host("rollout", config, kind)
    less = max(0.05, round(rollout.memory_fraction - 0.1, 2))
    return _change("rollout.memory_fraction", rollout.memory_fraction, less, why)


def _host(role: str, config: Config, kind: str) -> str:
    """This machine's own memory."""
    why = "this machine is out of memory"
    if role == "rollout" and kind == "cpu":
        before = config.rollout.kv_cache_gib
        return _change("rollout.kv_cache_gib", before, round(before / 2, 3), why)
    if role == "train" and kind == "cpu":
        return _trainer(config).replace("the training device is out of memory", why)
    before = config.train.batch_size
    return _change("train.batch_size", before, max(1, before // 2), why)


def num_killed_for_memory() -> int:
    """Processes that the kernel has ended for want of memory since the machine came up; -1 where
    it does not say. Two looks tell whether a SIGKILL was one of these."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return -1
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), -1)
