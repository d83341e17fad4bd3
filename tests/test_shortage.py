"""When memory runs out a person is told which number of the recipe to change, and to what."""

from dataclasses import replace
from pathlib import Path

import pytest

from minirl.config import Config, DevicesConfig, RolloutConfig, TrainConfig
from minirl.recipe import load
from minirl.shortage import num_killed_for_memory, remedy

SMOKE = Path(__file__).parent.parent / "recipes" / "smoke.toml"
CUDA_OOM = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …"
CPU_OOM = "RuntimeError: DefaultCPUAllocator: can't allocate memory"
NO_BLOCKS = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_…"
TOO_SMALL = "ValueError: To serve at least one request (1.75 GiB KV cache is needed, which …"
NO_ROOM = (
    "ValueError: Free memory on device cuda:0 (31.02/79.10 GiB) on startup is less than desired "
    "GPU memory utilization (0.85, 67.24 GiB). Decrease GPU memory utilization or reduce …"
)
SAMPLER = "RuntimeError: CUDA out of memory occurred when warming up sampler with 512 dummy …"


@pytest.mark.parametrize(
    ("role", "words", "kind", "change"),
    [
        ("train", CUDA_OOM, "cuda", "train.max_tokens from 16384 to 8192"),
        ("train", "RuntimeError: CUBLAS_STATUS_ALLOC_FAILED", "cuda", "train.max_tokens from"),
        ("train", CPU_OOM, "cpu", "train.max_tokens from 16384 to 8192"),
        ("train", CPU_OOM, "cuda", "train.batch_size from 32 to 16"),
        ("rollout", NO_BLOCKS, "cuda", "rollout.memory_fraction from 0.85 to 0.9"),
        ("rollout", TOO_SMALL, "cpu", "rollout.kv_cache_gib from 0.5 to 1.0"),
        ("rollout", NO_ROOM, "cuda", "rollout.memory_fraction from 0.85 to 0.36"),
        ("rollout", SAMPLER, "cuda", "rollout.max_num_seqs from 256 to 128"),
        ("rollout", CUDA_OOM, "cuda", "rollout.memory_fraction from 0.85 to 0.75"),
        ("rollout", CPU_OOM, "cpu", "rollout.kv_cache_gib from 0.5 to 0.25"),
        ("verify", CPU_OOM, "cpu", "train.batch_size from 32 to 16"),
    ],
)
def test_each_shortage_names_a_key_and_its_value(
    role: str, words: str, kind: str, change: str
) -> None:
    said = remedy(role, words, Config(), kind, was_killed_for_memory=False)
    assert f"change {change}" in said
    key, after = said.partition("change ")[2].split(" from ")[0], said.rpartition(" to ")[2]
    load(SMOKE, [f"{key}={after}"])  # what it says can be said: a recipe takes it


def test_the_next_change_is_named_when_the_first_is_used_up() -> None:
    train = TrainConfig(max_tokens=600)
    rollout = RolloutConfig(max_new_tokens=256, memory_fraction=0.95)
    config = Config(rollout=rollout, train=train, devices=DevicesConfig(train=2))
    for change, after in (
        ({"max_tokens": 600}, "train.max_tokens from 600 to 512"),  # one trajectory must fit
        ({"max_tokens": 512}, "train.gradient_checkpointing from false to true"),
        ({"gradient_checkpointing": True}, "train.shard_optimizer from false to true"),
        ({"shard_optimizer": True}, "rollout.max_new_tokens from 256 to 128"),
    ):
        config = replace(config, train=replace(config.train, **change))  # type: ignore[arg-type]
        assert remedy("train", CUDA_OOM, config, "cuda", False).endswith(after)
    said = remedy("rollout", NO_BLOCKS, config, "cuda", False)
    assert said.endswith("devices.tensor_parallel from 1 to 2")


def test_a_kill_is_put_down_to_memory_only_where_the_kernel_says_so() -> None:
    assert "train.batch_size" in remedy("verify", "SIGKILL", Config(), "cpu", True)
    assert num_killed_for_memory() >= -1
    for words in ("ZeroDivisionError: division by zero", "was killed by SIGKILL", ""):
        for role in ("train", "rollout", "verify"):
            assert remedy(role, words, Config(), "cuda", False) == ""
