"""The weight store. Takes weights from one trainer rank, gives them to any number of readers.

Two slots and a version counter. The writer fills the slot that readers are not sent to and then
moves the counter; it never waits. Each slot has a sequence number that is odd while the slot is
being written (a seqlock): a reader that was lapped sees it changed and retries, so a torn copy is
never returned, and a reader that dies blocks no other. With each version travel the trainer's
logprobs of a fixed canary (rule 6). The controller reads the counter without loading torch.
Leaves out: barriers. The order of stores is x86's; an ARM port would need them here.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minirl.shm.segment import Segment, Shared, aligned

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
CANARY_TOKENS = 16
NUM_SLOTS = 2
CANARIES = ("canaries", np.float32, (NUM_SLOTS, CANARY_TOKENS))
HEADER = np.dtype([("latest", np.int64), ("sequence", np.int64, NUM_SLOTS), CANARIES])
HEADER_BYTES = aligned(HEADER.itemsize)


class TensorSpec(NamedTuple):
    name: str  # as in the Hugging Face checkpoint
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class Published(NamedTuple):
    """What a reader got: which version, what its `load` gave, and the trainer's canary under it."""

    version: int
    loaded: Any
    canary: NDArray[np.float32]


class OpenSlot(NamedTuple):
    """Where a writer writes: tensors in the order of the table, and the canary's logprobs."""

    tensors: "list[torch.Tensor]"
    canary: NDArray[np.float32]


def canary_tokens(vocab_size: int) -> list[int]:
    """The same few tokens for every version, spread over the vocabulary."""
    return [(7 + 7919 * i) % vocab_size for i in range(CANARY_TOKENS)]


class WeightStore(Shared):
    def __init__(self, table: tuple[TensorSpec, ...], dtype: str, path: str = ""):
        """With the `path` of another store: that one, in a process of vLLM's own."""
        self.table, self.dtype = table, dtype
        self._segment = Segment(HEADER_BYTES + NUM_SLOTS * self.slot_bytes, path)
        self._map()
        if not path:
            self._latest[0] = -1

    @property
    def path(self) -> str:
        return self._segment.path

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        return getattr(torch, self.dtype)

    @property
    def slot_bytes(self) -> int:
        size = ITEM_BYTES[self.dtype]
        return sum(aligned(spec.numel * size) for spec in self.table)

    def _map(self) -> None:
        header = self._segment.array(HEADER, (1,))
        self._latest = header["latest"]
        self._sequence, self._canaries = header["sequence"][0], header["canaries"][0]

    @cached_property
    def _slots(self) -> "list[list[tuple[str, torch.Tensor]]]":
        memory, dtype, offset = self.memory, self.torch_dtype, HEADER_BYTES
        slots: list[list[tuple[str, torch.Tensor]]] = [[] for _ in range(NUM_SLOTS)]
        for slot in slots:
            for spec in self.table:
                num_bytes = spec.numel * dtype.itemsize
                tensor = memory[offset : offset + num_bytes].view(dtype).view(spec.shape)
                slot.append((spec.name, tensor))
                offset += aligned(num_bytes)
        return slots

    @property
    def latest(self) -> int:
        """The newest whole version; -1 before the first."""
        return int(self._latest[0])

    @property
    def memory(self) -> "torch.Tensor":
        """All bytes of the store, also for pinning them."""
        import torch

        return torch.from_numpy(self._segment.array(np.uint8, (self._segment.num_bytes,)))

    @contextmanager
    def publishing(self, version: int) -> Iterator["OpenSlot"]:
        """The slot to write `version` into; whole, and the newest, when the block ends well."""
        slot = version % NUM_SLOTS
        # Odd: being written. It is odd already where an earlier writer died in this slot.
        self._sequence[slot] += 2 if self._sequence[slot] % 2 else 1
        yield OpenSlot([tensor for _, tensor in self._slots[slot]], self._canaries[slot])
        self._sequence[slot] += 1
        self._latest[0] = version

    def views(self, slot: int) -> "Iterator[tuple[str, torch.Tensor]]":
        """The named tensors of a slot, in place. Only `read` knows whether they are whole."""
        return iter(self._slots[slot])

    def read(self, load: Callable[[int], Any]) -> Published:
        """Calls `load` with the slot of the newest version until a whole one got through. The copy
        of an attempt that was lapped is torn; the next attempt overwrites it."""
        while (found := self._attempt(self.latest, load, is_newest=True)) is None:
            time.sleep(0.0005)
        return found

    def snapshot(self, version: int) -> "dict[str, torch.Tensor] | None":
        """A copy of a version, or None where it is no longer there, or torn."""
        found = self._attempt(version, lambda slot: {n: v.clone() for n, v in self.views(slot)})
        return found and found.loaded

    def _attempt(
        self, version: int, load: Callable[[int], Any], is_newest: bool = False
    ) -> Published | None:
        slot = version % NUM_SLOTS
        before = int(self._sequence[slot])
        oldest = self.latest if is_newest else self.latest - 1
        # Odd, or too old: the writer is or was in this slot, two versions ahead.
        if before % 2 or not max(0, oldest) <= version <= self.latest:
            return None
        found = Published(version, load(slot), self._canaries[slot].copy())
        return found if int(self._sequence[slot]) == before else None
