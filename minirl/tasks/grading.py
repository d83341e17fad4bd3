"""Which verifier grades what. Takes finished groups, gives each to a free verifier, one at a time.

A pure structure: the loop sends, hears and looks at the clock.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from minirl.tasks.verifier import Grade


class GradingQueue:
    def __init__(self) -> None:
        self._waiting: deque[Grade] = deque()
        self._busy: dict[str, Grade] = {}

    def add(self, request: Grade) -> None:
        self._waiting.append(request)

    def assign(self, verifiers: Iterable[str]) -> Iterator[tuple[str, Grade]]:
        """Pairs of a free verifier and the group it now grades."""
        for name in verifiers:
            if self._waiting and name not in self._busy:
                self._busy[name] = self._waiting.popleft()
                yield name, self._busy[name]

    def done(self, verifier: str) -> Grade | None:
        """What the verifier was at; it is free now."""
        return self._busy.pop(verifier, None)

    def is_busy(self, verifier: str) -> bool:
        return verifier in self._busy

    def __len__(self) -> int:
        return len(self._waiting) + len(self._busy)
