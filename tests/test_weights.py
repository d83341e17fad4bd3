"""A reader gets one whole version, also when a writer laps it, is killed, or starts again."""

import threading
import time

import pytest
import shm_workers
import torch
from shm_workers import TABLE, canary, filled, kill, publish, started

from minirl.shm.weights import CANARY_TOKENS, Published, WeightStore, canary_tokens

LONG_S = 120.0  # only a hang takes this long


def store_with(*versions: int, dtype: str = "float32") -> WeightStore:
    store = WeightStore(TABLE, dtype)
    assert store.latest == -1
    publish(store, *versions)
    return store


def check_version(store: WeightStore, version: int) -> None:
    """What a reader gets, in time."""
    copies: dict[str, torch.Tensor] = {}

    def load(slot: int) -> None:
        copies.update((name, tensor.clone()) for name, tensor in store.views(slot))

    got: list[Published] = []
    reader = threading.Thread(target=lambda: got.append(store.read(load)), daemon=True)
    reader.start()
    reader.join(LONG_S)
    assert got, "the reader waits for a whole version, and none comes"
    assert (
        got[0].version == version and got[0].canary["logprobs"].tolist() == canary(version).tolist()
    )
    assert list(copies) == [spec.name for spec in TABLE]
    for copy, tensor in zip(copies.values(), filled(version), strict=True):
        assert copy.dtype == store.torch_dtype and torch.equal(copy.float(), tensor)


def check_next(store: WeightStore, *versions: int) -> None:
    for version in versions:
        publish(store, version)
        check_version(store, version)


def test_versions_come_back_whole_also_by_path_and_from_a_resumed_runs_version() -> None:
    store = store_with(41, dtype="bfloat16")
    check_next(store, 42, 43)
    check_version(WeightStore(TABLE, "bfloat16", store.path), 43)  # as another process does


@pytest.mark.parametrize(
    ("published", "attempts"),
    [
        ((1,), [(0.0, 0.0)]),  # into the other slot: there is nothing to retry
        ((1, 2), [(0.0, 2.0), (2.0, 2.0)]),  # the first attempt was torn, and is not returned
    ],
)
def test_a_reader_retries_when_its_slot_is_overwritten(
    published: tuple[int, ...], attempts: list[tuple[float, float]]
) -> None:
    store = store_with(0)
    seen: list[tuple[float, float]] = []

    def load(slot: int) -> None:
        tensors = [tensor for _, tensor in store.views(slot)]
        first = float(tensors[0].max())
        if not seen:
            publish(store, *published)
        seen.append((first, float(tensors[-1].max())))

    assert store.read(load).version == attempts[-1][0]
    assert seen == attempts
    check_version(store, published[-1])


def test_a_version_that_is_gone_is_not_taken_for_the_newest() -> None:
    """As by a reader that loses the processor right after it looked at the version."""
    store = store_with(0, 1, 2)
    assert store.attempt(0, store.views, is_newest=True) is None


def test_a_fast_writer_in_another_process_never_gives_a_torn_copy() -> None:
    store = WeightStore(TABLE, "float32")
    writer = started(shm_workers.publish_forever, store)
    copies = [(spec.name, torch.empty(spec.shape)) for spec in TABLE]
    versions: list[int] = []
    num_attempts = 0

    def load(slot: int) -> None:
        nonlocal num_attempts
        num_attempts += 1
        for (_, copy), (_, shared) in zip(copies, store.views(slot), strict=True):
            copy.copy_(shared)

    deadline = time.monotonic() + LONG_S
    while len(set(versions)) < 50 or num_attempts == len(versions):  # until it was lapped, too
        assert time.monotonic() < deadline
        got = store.read(load)
        versions.append(got.version)
        assert got.canary["logprobs"].tolist() == canary(got.version).tolist()
        for name, copy in copies:
            assert (copy == got.version).all(), (name, got.version, copy.unique())
    kill(writer)
    assert versions == sorted(versions)


def test_a_reader_killed_blocks_no_writer_and_a_killed_writer_leaves_a_usable_slot() -> None:
    store = store_with(5)
    kill(started(shm_workers.read_half, store))
    check_next(store, 6, 7)
    writer = started(shm_workers.publish_half, store, 8)
    check_version(store, 7)  # while it writes
    kill(writer)
    check_version(store, 7)
    check_next(store, 8, 9, 10)


def test_canary_tokens_are_in_the_vocabulary() -> None:
    for vocab_size in (2, 151_936):
        tokens = canary_tokens(vocab_size)
        assert len(tokens) == CANARY_TOKENS and all(0 <= t < vocab_size for t in tokens)
        assert canary_tokens(vocab_size, [1, 0, 1])[:6] == [1, 0, 1, 1, 0, 1]
