"""Which verifier grades what. Takes finished groups, gives each to a free verifier, one at a time.
A turn that waits for its reply goes first: there a sequence stands still.

A pure structure: the loop sends, hears and looks at the clock.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from minirl.tasks.verifier import Ask, Grade


class GradingQueue:
    def __init__(self) -> None:
        self._waiting: deque[Grade] = deque()
        self._asked: deque[Ask] = deque()
        self._busy: dict[str, Grade | Ask] = {}

    def add(self, request: Grade | Ask) -> None:
        if isinstance(request, Ask):
            self._asked.append(request)
        else:
            self._waiting.append(request)

    def assign(self, verifiers: Iterable[str]) -> Iterator[tuple[str, Grade | Ask]]:
        """Pairs of a free verifier and what it now is at."""
        for name in verifiers:
            if name not in self._busy and (self._asked or self._waiting):
                first = self._asked.popleft() if self._asked else self._waiting.popleft()
                self._busy[name] = first
                yield name, first

    def done(self, verifier: str) -> Grade | Ask | None:
        """What the verifier was at; it is free now."""
        return self._busy.pop(verifier, None)

    def is_busy(self, verifier: str) -> bool:
        return verifier in self._busy

    def __len__(self) -> int:
        return len(self._asked) + len(self._waiting) + len(self._busy)
