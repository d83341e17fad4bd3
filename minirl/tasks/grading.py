"""Which verifier grades what: each finished group goes to a free verifier, one at a time. A turn
that waits for its reply goes first, since a sequence waits for it.

A pure structure: the loop sends, receives and looks at the clock.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from minirl.tasks.verifier import Ask, Grade


class GradingQueue:
    def __init__(self) -> None:
        self._groups: deque[Grade | Ask] = deque()
        self._turns: deque[Grade | Ask] = deque()
        self._busy: dict[str, Grade | Ask] = {}

    def add(self, request: Grade | Ask) -> None:
        (self._turns if isinstance(request, Ask) else self._groups).append(request)

    def assign(self, verifiers: Iterable[str]) -> Iterator[tuple[str, Grade | Ask]]:
        """Pairs of a free verifier and the request that it now gets."""
        for name in verifiers:
            if name not in self._busy and (waiting := self._turns or self._groups):
                self._busy[name] = waiting.popleft()
                yield name, self._busy[name]

    def done(self, verifier: str) -> Grade | Ask | None:
        """Frees the verifier and gives the request it had."""
        return self._busy.pop(verifier, None)

    def is_busy(self, verifier: str) -> bool:
        return verifier in self._busy

    def __len__(self) -> int:
        return len(self._turns) + len(self._groups) + len(self._busy)
