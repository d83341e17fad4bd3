"""One engine in simulated time: all its sequences get a token with every step.

So a sequence is done when the engine's token counter reaches the one at its start plus its length,
and between two events nothing has to be stepped: the counter is advanced in closed form.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass

from minirl.tools.simulate.costs import Costs


@dataclass(slots=True)
class Sequence:
    group_id: int
    prompt: int
    length: int
    started: float = 0.0  # the engine's counter
    started_versions: float = 0.0  # the engine's integral
    head_version: int = 0
    tail_version: int = 0
    mean_version: float = 0.0


class Engine:
    def __init__(self, costs: Costs, max_running: int, version: int = 0, recomputes: bool = True):
        self.costs, self.max_running, self.recomputes = costs, max_running, recomputes
        self.version = version
        self.now = 0.0
        self.idle_s = 0.0
        self.num_tokens = 0.0
        self.stamp = 0  # grows when what comes next has changed
        self._stands_until = 0.0  # prefilling or reloading
        self._counter = 0.0  # tokens that a sequence which ran from the beginning would have
        self._versions = 0.0  # integral of the version over the counter
        self._context = 0.0  # tokens in the KV cache
        self._running: list[tuple[float, int, Sequence]] = []  # by the counter at which it ends
        self._waiting: deque[Sequence] = deque()
        self._next_key = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    def advance(self, now: float) -> None:
        if not self._running:
            self.idle_s += now - self.now
        elif now > (since := max(self.now, self._stands_until)):
            num = len(self._running)
            steps = self.costs.steps_in(now - since, num, self._context)
            self._counter += steps
            self._versions += steps * self.version
            self._context += steps * num
            self.num_tokens += steps * num
        self.now = now

    def submit(self, sequences: list[Sequence], now: float) -> None:
        self.advance(now)
        self._waiting.extend(sequences)
        self._admit()

    def reload(self, version: int, now: float) -> None:
        """New weights between two steps; what runs has its KV computed again under them."""
        self.advance(now)
        self.version = version
        pause = self.costs.reload_s
        if self.recomputes:
            pause += self._context * self.costs.prefill_per_token_s
        self._stand(pause)

    def _stand(self, seconds: float) -> None:
        self._stands_until = max(self.now, self._stands_until) + seconds
        self.stamp += 1

    def _admit(self) -> None:
        prefill = 0
        last_group = -1
        while self._waiting and len(self._running) < self.max_running:
            sequence = self._waiting.popleft()
            sequence.started, sequence.started_versions = self._counter, self._versions
            sequence.head_version = self.version
            # From the next whole step on: then many end with the same step, as in an engine.
            entry = (math.ceil(self._counter) + sequence.length, self._next_key, sequence)
            heapq.heappush(self._running, entry)
            self._next_key += 1
            self._context += sequence.prompt
            if sequence.group_id != last_group:  # a group shares its prompt's KV
                prefill += sequence.prompt
                last_group = sequence.group_id
        self._stand(prefill * self.costs.prefill_per_token_s)

    @property
    def next_end_s(self) -> float | None:
        """When the next sequence is done, if nothing happens before."""
        if not self._running:
            return None
        steps = max(0.0, self._running[0][0] - self._counter)
        since = max(self.now, self._stands_until)
        return since + self.costs.steps_s(steps, len(self._running), self._context)

    def take_done(self, now: float) -> list[Sequence]:
        self.advance(now)
        done = []
        while self._running and self._running[0][0] <= self._counter + 1e-6:
            done.append(self._end(heapq.heappop(self._running)[2]))
        self._admit()
        return done

    def _end(self, sequence: Sequence) -> Sequence:
        self._context -= sequence.prompt + sequence.length
        sequence.tail_version = self.version
        grown = self._versions - sequence.started_versions
        sequence.mean_version = grown / max(1e-9, self._counter - sequence.started)
        return sequence

    def abort(self, group_id: int, now: float) -> None:
        self.advance(now)
        for _, _, sequence in self._running:
            if sequence.group_id == group_id:
                self._context -= sequence.prompt + self._counter - sequence.started
        self._running = [e for e in self._running if e[2].group_id != group_id]
        heapq.heapify(self._running)
        self._waiting = deque(s for s in self._waiting if s.group_id != group_id)
        self._admit()
