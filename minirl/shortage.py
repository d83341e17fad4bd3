"""Memory ran out: which number of the recipe to change, and to what.

Takes a dead worker's role, its log tail and how it ended, gives one sentence, or "" where memory
was not the reason. A pure function of text, so that what a GPU would say can be tested anywhere.
Leaves out the memory bill before the start, which is `minirl plan`'s.
"""

import re
from pathlib import Path

from minirl.config import Config, get

DEVICE = ("out of memory", "outofmemoryerror", "cublas_status_alloc_failed")
HOST = ("cannot allocate memory", "can't allocate memory", "memoryerror", "std::bad_alloc")
NO_CACHE = ("no available memory for the cache blocks", "gib kv cache is needed")
NO_ROOM = re.compile(r"\(([\d.]+)/([\d.]+) gib\).*?less than (?:desired|requested)", re.DOTALL)
WARMING_UP = "warming up sampler"
RESERVE = 0.03  # of a GPU, that stays free below what was found free


def remedy(role: str, words: str, config: Config, kind: str, was_killed_for_memory: bool) -> str:
    """`role` is "train", "rollout" or another; `words` is all that the worker said at its end."""
    said = words.lower()
    is_full = any(sign in said for sign in DEVICE)
    if role == "rollout" and (found := _engine(said, config, kind, is_full)):
        return found
    is_host = was_killed_for_memory or any(sign in said for sign in HOST)
    if role == "train" and (is_full or (is_host and kind == "cpu")):
        return _trainer(config)
    if not is_host:
        return ""
    why = "this machine is out of memory"
    if role == "rollout" and kind == "cpu":
        return _change(config, "rollout.kv_cache_gib", config.rollout.kv_cache_gib / 2, why)
    return _change(config, "train.batch_size", max(1, config.train.batch_size // 2), why)


def _change(config: Config, key: str, after: float, why: str) -> str:
    before, new = (str(value).lower() for value in (get(config, key), after))
    return f"{why}: change {key} from {before} to {new}"


def _trainer(config: Config) -> str:
    """The cheapest change first: what costs no time, then what costs some, then what costs much."""
    train, why = config.train, "the training device is out of memory"
    least = config.max_tokens_per_trajectory
    if train.max_tokens > least:
        return _change(config, "train.max_tokens", max(least, train.max_tokens // 2), why)
    if not train.gradient_checkpointing:
        return _change(config, "train.gradient_checkpointing", True, why)
    if not train.shard_optimizer and config.devices.train > 1:
        return _change(config, "train.shard_optimizer", True, why)
    half = max(1, config.rollout.max_new_tokens // 2)
    return _change(config, "rollout.max_new_tokens", half, why)


def _engine(said: str, config: Config, kind: str, is_full: bool) -> str:
    """What vLLM says, in its own words."""
    rollout, fraction = config.rollout, config.rollout.memory_fraction
    if any(sign in said for sign in NO_CACHE):
        why = "the KV cache of an engine is too small"
        if kind == "cpu":
            return _change(config, "rollout.kv_cache_gib", rollout.kv_cache_gib * 2, why)
        if fraction < 0.95:
            more = min(0.95, round(fraction + 0.05, 2))
            return _change(config, "rollout.memory_fraction", more, why)
        wide = 2 * config.devices.tensor_parallel
        return _change(config, "devices.tensor_parallel", wide, why)
    why = "the rollout device is out of memory"
    if kind == "cuda" and (found := NO_ROOM.search(said)):
        share = max(0.05, int((float(found[1]) / float(found[2]) - RESERVE) * 100) / 100)
        return _change(config, "rollout.memory_fraction", share, why)
    if is_full and WARMING_UP in said and rollout.max_num_seqs > 1:
        return _change(config, "rollout.max_num_seqs", rollout.max_num_seqs // 2, why)
    if is_full and kind == "cuda":
        less = max(0.05, round(fraction - 0.1, 2))
        return _change(config, "rollout.memory_fraction", less, why)
    return ""


def num_killed_for_memory() -> int:
    """Processes that the kernel's OOM killer has ended since boot; -1 where it does not say. Two
    looks tell whether a SIGKILL was one of these."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return -1
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), -1)
