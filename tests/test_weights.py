"""A reader gets one whole version, whoever laps it, is killed, or starts again."""

import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from weight_workers import (
    TABLE,
    canary,
    filled,
    publish_forever,
    publish_half,
    publish_once,
    read_half,
)

from minirl.shm.weights import CANARY_TOKENS, Published, TensorSpec, WeightStore, canary_tokens

SPAWN = get_context("spawn")
READ_S = 1.5
LONG_S = 20.0  # far more than a read takes: only a hang comes to it


def started(body: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=body, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def read(store: WeightStore) -> tuple[Published, dict[str, torch.Tensor]]:
    copies: dict[str, torch.Tensor] = {}

    def load(slot: int) -> None:
        copies.update((name, tensor.clone()) for name, tensor in store.views(slot))

    got: list[Published] = []
    reader = threading.Thread(target=lambda: got.append(store.read(load)), daemon=True)
    reader.start()
    reader.join(LONG_S)
    assert got, "the reader waits for a whole version, and none comes"
    return got[0], copies


def check_version(store: WeightStore, version: int) -> None:
    got, copies = read(store)
    assert got.version == version
    assert got.canary.tolist() == canary(version).tolist()
    for spec, tensor in zip(TABLE, filled(version), strict=True):
        assert torch.equal(copies[spec.name].float(), tensor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16])
def test_round_trip_of_odd_shapes(dtype: str, source_dtype: torch.dtype) -> None:
    shapes = [(), (1,), (3,), (5, 7), (2, 3, 1, 11), (0, 4), (129,)]
    table = tuple(TensorSpec(f"t{i}", shape) for i, shape in enumerate(shapes))
    store = WeightStore(table, dtype)
    generator = torch.Generator().manual_seed(0)
    for version in range(3):
        weights = [torch.randn(s, generator=generator).to(source_dtype) for s in shapes]
        store.publish(version, weights, np.zeros(CANARY_TOKENS, np.float32))
        got, copies = read(store)
        assert got.version == store.latest == version
        assert list(copies) == [spec.name for spec in table]
        for spec, weight in zip(table, weights, strict=True):
            assert copies[spec.name].dtype == store.torch_dtype
            assert torch.equal(copies[spec.name], weight.to(store.torch_dtype))


def test_before_the_first_publication_there_is_no_version() -> None:
    assert WeightStore(TABLE, "float32").latest == -1


def test_a_resumed_run_begins_at_its_own_version() -> None:
    store = WeightStore(TABLE, "float32")
    for version in (41, 42):
        store.publish(version, filled(version), canary(version))
        check_version(store, version)


def test_the_weights_must_match_the_table() -> None:
    store = WeightStore(TABLE, "float32")
    store.publish(0, filled(0), canary(0))
    with pytest.raises(ValueError, match="tensors for a table"):
        store.publish(1, filled(1)[:-1], canary(1))
    check_version(store, 0)


def test_publishing_leaves_the_version_before_in_place() -> None:
    store = WeightStore(TABLE, "float32")
    store.publish(4, filled(4), canary(4))
    during: list[float] = []

    def load(slot: int) -> None:
        if not during:
            store.publish(5, filled(5), canary(5))  # the other slot: nothing to retry
        during.append(float(next(store.views(slot))[1].max()))

    assert store.read(load).version == 4
    assert during == [4.0]
    check_version(store, 5)


def test_a_reader_lapped_in_the_middle_reads_again() -> None:
    store = WeightStore(TABLE, "float32")
    store.publish(0, filled(0), canary(0))
    seen: list[tuple[float, float]] = []

    def load(slot: int) -> None:
        tensors = [tensor for _, tensor in store.views(slot)]
        first = float(tensors[0].max())
        if not seen:
            for version in (1, 2):
                store.publish(version, filled(version), canary(version))
        seen.append((first, float(tensors[-1].max())))

    assert store.read(load).version == 2
    assert seen == [(0.0, 2.0), (2.0, 2.0)]  # the first was torn, and was not the last


class Preempted(WeightStore):
    """A reader that loses the processor right after it looked at the version."""

    is_armed = False

    @property
    def latest(self) -> int:
        version = super().latest
        if self.is_armed:
            self.is_armed = False
            for later in (version + 1, version + 2):
                self.publish(later, filled(later), canary(later))
        return version


def test_a_reader_lapped_before_it_begins_reports_the_version_it_copied() -> None:
    store = Preempted(TABLE, "float32")
    store.publish(0, filled(0), canary(0))
    store.is_armed = True
    check_version(store, 2)


def test_a_fast_writer_in_another_process_never_gives_a_torn_copy() -> None:
    store = WeightStore(TABLE, "float32")
    writer, pipe = started(publish_forever, store)
    assert pipe.recv() == "publishing"
    versions: list[int] = []
    num_attempts = 0

    def load(slot: int) -> None:
        nonlocal num_attempts
        num_attempts += 1
        for (_, copy), (_, shared) in zip(copies, store.views(slot), strict=True):
            copy.copy_(shared)

    copies = [(spec.name, torch.empty(spec.shape)) for spec in TABLE]
    deadline = time.monotonic() + READ_S
    while time.monotonic() < deadline or len(versions) < 20:
        got = store.read(load)
        versions.append(got.version)
        assert got.canary.tolist() == canary(got.version).tolist()
        for name, copy in copies:
            assert (copy == got.version).all(), (name, got.version, copy.unique())
    writer.kill()
    writer.join()
    assert versions == sorted(versions)
    assert len(set(versions)) > 10
    assert num_attempts > len(versions)  # it was lapped, and did retry


def test_a_reader_killed_while_reading_blocks_nobody() -> None:
    store = WeightStore(TABLE, "float32")
    store.publish(0, filled(0), canary(0))
    reader, pipe = started(read_half, store)
    assert pipe.recv() == "half"
    reader.kill()
    reader.join()
    for version in (1, 2, 3):
        store.publish(version, filled(version), canary(version))
        check_version(store, version)


def test_a_writer_killed_while_publishing_leaves_the_last_version_and_a_usable_slot() -> None:
    store = WeightStore(TABLE, "bfloat16")
    for version in (6, 7):
        store.publish(version, filled(version), canary(version))
    writer, pipe = started(publish_half, store, 8)
    assert pipe.recv() == "half"
    check_version(store, 7)  # while it writes
    writer.kill()
    writer.join()
    check_version(store, 7)
    successor, pipe = started(publish_once, store, 8)
    assert pipe.recv() == "published"
    successor.join()
    check_version(store, 8)
    for version in (9, 10):
        store.publish(version, filled(version), canary(version))
        check_version(store, version)


def test_another_process_opens_the_store_by_path() -> None:
    store = WeightStore(TABLE, "float32")
    store.publish(3, filled(3), canary(3))
    check_version(WeightStore.open(TABLE, "float32", store.path), 3)


@pytest.mark.parametrize("vocab_size", [2, 99, 151_936])
def test_canary_tokens_are_in_the_vocabulary_and_always_the_same(vocab_size: int) -> None:
    tokens = canary_tokens(vocab_size)
    assert len(tokens) == CANARY_TOKENS
    assert all(0 <= token < vocab_size for token in tokens)
    assert tokens == canary_tokens(vocab_size)
    assert len(set(tokens)) == min(vocab_size, CANARY_TOKENS)
