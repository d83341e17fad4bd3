"""The weight store. Takes weights from one trainer rank, gives them to any number of readers.

Two slots and a version counter. The writer fills the slot that readers are not sent to and then
moves the counter; it never waits. Each slot has a sequence number that is odd while the slot is
being written (a seqlock): a reader that was lapped sees it changed and retries, so a torn copy is
never returned, and a reader that dies blocks no other. With each version travels the canary: a few
tokens and the trainer's logprobs of them (rule 6). The controller reads the counter without torch.
Leaves out: barriers. The order of stores is x86's; an ARM port would need them here.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import cycle, islice
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minirl.shm.segment import Segment, aligned

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
CANARY_TOKENS = 64
NUM_SLOTS = 2
TENSORS_AT_ONCE = 32
CANARY_TEXT = """Tom has 3 boxes with 12 pens in each. He gives 5 pens to Anna, 7 to Ben. How many
pens are left? At first there are 3 * 12 = 36 pens. He gives away 5 + 7 = 12, so 36 - 12 = 24."""
CANARY = np.dtype([("tokens", np.int32), ("logprobs", np.float32)])
CANARIES = ("canaries", CANARY, (NUM_SLOTS, CANARY_TOKENS))
NUMBERS = [(name, np.int64, NUM_SLOTS) for name in ("versions", "sequence")]
HEADER = np.dtype([*NUMBERS, CANARIES])
HEADER_BYTES = aligned(HEADER.itemsize)


class TensorSpec(NamedTuple):
    name: str  # as in the Hugging Face checkpoint
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Published(NamedTuple):
    """What a reader got: which version, what its `load` gave, and the trainer's canary under it."""

    version: int
    loaded: Any
    canary: NDArray[np.void]  # of CANARY


class OpenSlot(NamedTuple):
    """Where a writer writes: a slot, its canary, and its tensors in the order of the table."""

    store: "WeightStore"
    slot: int
    canary: NDArray[np.void]  # of CANARY

    def fill(self, weights: "Iterable[torch.Tensor]", at_once: int = TENSORS_AT_ONCE) -> None:
        """In the order of the table. A few at once: they may be made as they are asked for. On
        CUDA they are converted there, and the copies may still be under way when this returns."""
        import torch

        tensors, in_order = [tensor for _, tensor in self.store.views(self.slot)], iter(weights)
        for start in range(0, len(tensors), at_once):
            shared = tensors[start : start + at_once]
            ready = [w.to(shared[0].dtype) if w.is_cuda else w for w in islice(in_order, at_once)]
            torch._foreach_copy_(shared, ready, non_blocking=True)  # raises where one is missing


def canary_tokens(vocab_size: int, text: Sequence[int] = ()) -> list[int]:
    """The same for every version: those of a text, or spread over the vocabulary. A model is sure
    of a text, and where it is sure bfloat16 is less than half as noisy."""
    if not text:
        return [(7 + 7919 * i) % vocab_size for i in range(CANARY_TOKENS)]
    return list(islice(cycle(text), CANARY_TOKENS))


class WeightStore:
    def __init__(self, table: tuple[TensorSpec, ...], dtype: str, segment: Segment | None = None):
        """A new store without a version, or the one in `segment`."""
        self.table, self.dtype = table, dtype
        self._segment = segment or Segment(HEADER_BYTES + NUM_SLOTS * self.slot_bytes)
        header = self._segment.array(HEADER, (1,))
        self._versions, self._sequence, self._canaries = (header[n][0] for n in HEADER.names or ())
        self.views = cache(lambda slot: [*self._views(slot)])  # building them takes a while
        if segment is None:
            self._versions[:] = -1

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightStore, (self.table, self.dtype, self._segment)

    @property
    def path(self) -> str:
        return self._segment.path

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        return getattr(torch, self.dtype)

    @property
    def slot_bytes(self) -> int:
        return sum(aligned(spec.numel * ITEM_BYTES[self.dtype]) for spec in self.table)

    @property
    def latest(self) -> int:
        """The newest whole version; -1 before the first."""
        return int(self._versions.max())

    @property
    def memory(self) -> "torch.Tensor":
        """All bytes of the store, also for pinning them."""
        import torch

        return torch.from_numpy(self._segment.array(np.uint8, (self._segment.num_bytes,)))

    @contextmanager
    def publishing(self, version: int) -> Iterator["OpenSlot"]:
        """The slot to write `version` into; whole, and the newest, when the block ends well. It is
        the one without the newest: a box may skip versions."""
        slot = int(self._versions.argmin())
        self._versions[slot] = -1  # first: its new content must never pass for the old version
        # Odd: being written. It is odd already where an earlier writer died in this slot.
        self._sequence[slot] += 2 if self._sequence[slot] % 2 else 1
        yield OpenSlot(self, slot, self._canaries[slot])
        self._sequence[slot] += 1
        self._versions[slot] = version  # last: from here on readers are sent to it

    def content(self, slot: int) -> NDArray[np.uint8]:
        """The bytes of a slot, in place, without torch."""
        start = HEADER_BYTES + slot * self.slot_bytes
        return self._segment.array(np.uint8, (self.slot_bytes,), start)

    def _views(self, slot: int) -> "Iterator[tuple[str, torch.Tensor]]":
        """The named tensors of a slot, in place. Only `read` knows whether they are whole."""
        memory, dtype, offset = self.memory, self.torch_dtype, HEADER_BYTES + slot * self.slot_bytes
        for spec in self.table:
            num_bytes = spec.numel * dtype.itemsize
            yield spec.name, memory[offset : offset + num_bytes].view(dtype).view(spec.shape)
            offset += aligned(num_bytes)

    def stamp(self, slot: int) -> int:
        """Another number as soon as a writer has been in the slot."""
        return int(self._sequence[slot])

    def read(self, load: Callable[[int], Any]) -> Published:
        """Calls `load` with the slot of the newest version until a whole one got through. The copy
        of an attempt that was lapped is torn; the next attempt overwrites it."""
        while (found := self.attempt(self.latest, load, is_newest=True)) is None:
            time.sleep(0.0005)
        return found

    def attempt(
        self, version: int, load: Callable[[int], Any], is_newest: bool = False
    ) -> Published | None:
        """That version, or None where it is no longer there, or torn."""
        slot = int(self._versions[1] == version)
        before = self.stamp(slot)
        is_there = version >= 0 and self._versions[slot] == version
        # Odd, or another version: the writer is or was in this slot.
        if before % 2 or not is_there or (is_newest and version != self.latest):
            return None
        found = Published(version, load(slot), self._canaries[slot].copy())
        return found if self.stamp(slot) == before else None
