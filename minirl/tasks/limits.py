"""What a reward may take of its verifier: memory and room in the log; and what it need not compute
twice. Time is the controller's business: it replaces a verifier that is late.
"""

import contextlib
import hashlib
import io
import resource
import sys
from collections import OrderedDict
from collections.abc import Iterator

from minirl.records import Answer, Example

GIB = 2**30
PRINTED_PER_REWARD = 2_000  # characters
CACHED_REWARDS = 16_384


def limit_memory(gib: float) -> None:
    """Of this process: private memory only, since the ring's shared memory is nobody's own. What
    goes beyond is a MemoryError in the code that asks for it."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = int(gib * GIB)
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class Bounded(io.TextIOBase):
    """Passes the first characters on, counts the rest."""

    def __init__(self, room: int):
        self._room, self._num_lost = room, 0

    def write(self, text: str) -> int:
        kept = text[: self._room]
        self._room -= len(kept)
        self._num_lost += len(text) - len(kept)
        if kept:
            assert sys.__stdout__ is not None
            sys.__stdout__.write(kept)
        return len(text)

    def end(self) -> None:
        assert sys.__stdout__ is not None
        if self._num_lost:
            sys.__stdout__.write(f"\n(a reward printed {self._num_lost:,} characters more)\n")
        sys.__stdout__.flush()


@contextlib.contextmanager
def bounded_output(room: int = PRINTED_PER_REWARD) -> Iterator[None]:
    """What Python code prints goes to the log up to `room` characters. Not for what a C library or
    a child process writes past Python."""
    bounded = Bounded(room)
    with contextlib.redirect_stdout(bounded), contextlib.redirect_stderr(bounded):
        try:
            yield
        finally:
            bounded.end()


class RewardCache:
    """Rewards by content: the same answer to the same example has the same reward. The oldest used
    go first. A task whose rewards are drawn says `is_random = True`, and has none."""

    def __init__(self, size: int = CACHED_REWARDS):
        self._size = size
        self._rewards: OrderedDict[bytes, float] = OrderedDict()

    def get(self, example: Example, answer: Answer) -> float | None:
        key = _digest(example, answer)
        if key in self._rewards:
            self._rewards.move_to_end(key)
        return self._rewards.get(key)

    def put(self, example: Example, answer: Answer, reward: float) -> None:
        self._rewards[_digest(example, answer)] = reward
        if len(self._rewards) > self._size:
            self._rewards.popitem(last=False)

    def __len__(self) -> int:
        return len(self._rewards)


def _digest(example: Example, answer: Answer) -> bytes:
    """All that a reward sees."""
    return hashlib.sha256(repr((example, answer)).encode(errors="surrogatepass")).digest()
