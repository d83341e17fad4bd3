"""The queue bench: finished trajectories from one process to another.

    ring_over_mp_queue   trajectories/s through the ring / through torch.multiprocessing.Queue
    ring_over_memcpy     bytes/s through the ring / of a plain memcpy into shared memory

The writer copies arrays into a cell and sends the descriptor that a rollout worker sends; the
reader reads in place and adds every column up, which both sides compare. The queue carries the same
arrays as torch tensors, which it moves through shared memory too. Both may be as many trajectories
ahead. The model plays no part.
"""

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from numpy.typing import NDArray

from minirl.config import BYTES_PER_TOKEN
from minirl.errors import MinirlError
from minirl.messages import Finished
from minirl.records import StopReason, Trajectory
from minirl.shm.ring import TrajectoryRing
from minirl.shm.segment import Segment
from tests.bench import Figure, Options, at_least, median
from tests.bench.processes import processes

DEPTH = 32  # trajectories on the way at once
PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Size:
    num_tokens: int
    through_ring: int
    through_queue: int
    repeats: int


FULL = (Size(4096, 4096, 192, 5), Size(512, 4096, 192, 3))
QUICK = (Size(512, 64, 64, 1),)


@dataclass(frozen=True)
class Written:
    """The arrays of one trajectory, as both ways carry them."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]

    @classmethod
    def make(cls, num_tokens: int) -> "Written":
        rng = np.random.default_rng(num_tokens)
        mask = np.ones(num_tokens, np.uint8)
        logprobs = -rng.random(num_tokens, np.float32)
        versions = rng.integers(0, 9, num_tokens, np.int32)
        mask[:PROMPT_TOKENS], logprobs[:PROMPT_TOKENS], versions[:PROMPT_TOKENS] = 0, 0, -1
        return cls(rng.integers(0, 50000, num_tokens, np.int32), mask, logprobs, versions)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """New ones, as a rollout makes them: the queue moves a tensor's memory only once."""
        columns = (self.tokens, self.mask, self.logprobs, self.versions)
        return tuple(torch.from_numpy(column.copy()) for column in columns)

    @property
    def total(self) -> float:
        columns = (self.tokens, self.mask, self.logprobs, self.versions)
        return sum(float(column.sum(dtype=np.float64)) for column in columns)


def measure(options: Options) -> list[Figure]:
    figures = []
    for i, size in enumerate(QUICK if options.is_quick else FULL):
        figures += _at_length(size, is_goal=i == 0)
    return figures


def _at_length(size: Size, is_goal: bool) -> list[Figure]:
    context = torch.multiprocessing.get_context("spawn")
    ring = TrajectoryRing(DEPTH, size.num_tokens)
    queue = context.Queue(DEPTH)
    reading, writing = context.Pipe()
    rates: dict[str, list[float]] = {"ring": [], "queue": [], "memcpy": []}
    with processes(2) as here:
        reader = here.part(here.train_place, Reader, ring, queue, reading)
        writer = here.part(here.rollout_place, Writer, ring, queue, writing, size.num_tokens)
        expected = [here.result(part) for part in (writer, reader)] and here.ask(writer, total_of)
        for _ in range(size.repeats + 1):
            for way, write, read, number in (
                ("ring", write_ring, read_ring, size.through_ring),
                ("queue", write_queue, read_queue, size.through_queue),
            ):
                here.begin(writer, write, number)
                seconds, total = here.ask(reader, read, number)
                here.result(writer)
                if not np.isclose(total, expected * number, rtol=1e-4):
                    raise MinirlError(f"{way}: other sums were read than were written")
                rates[way].append(number / seconds)
            rates["memcpy"].append(here.ask(writer, time_memcpy, size.through_ring))
    through = {way: median(values[1:]) for way, values in rates.items()}  # the first warms up
    ratio = median([a / b for a, b in zip(rates["ring"][1:], rates["queue"][1:], strict=True)])
    num_bytes = BYTES_PER_TOKEN * size.num_tokens
    suffix = "" if is_goal else f"_{size.num_tokens}"
    note = f"{size.num_tokens} tokens, {num_bytes / 1024:.0f} KiB"
    name = f"ring_over_mp_queue{suffix}"
    return [
        at_least(name, ratio, 10.0, note) if is_goal else Figure(name, ratio, note=note),
        Figure(f"ring_trajectories_per_s{suffix}", through["ring"]),
        Figure(f"mp_queue_trajectories_per_s{suffix}", through["queue"]),
        Figure(f"ring_mb_per_s{suffix}", through["ring"] * num_bytes / 1e6),
        Figure(f"mp_queue_mb_per_s{suffix}", through["queue"] * num_bytes / 1e6),
        Figure(f"ring_over_memcpy{suffix}", through["ring"] / through["memcpy"]),
    ]


class Writer:
    def __init__(
        self, pipe: Connection, ring: TrajectoryRing, queue: Any, reader: Connection, length: int
    ):
        self.ring, self.queue, self.reader = ring, queue, reader
        self.written = Written.make(length)


class Reader:
    def __init__(self, pipe: Connection, ring: TrajectoryRing, queue: Any, writer: Connection):
        self.ring, self.queue, self.writer = ring, queue, writer


def total_of(writer: Writer) -> float:
    return writer.written.total


def write_ring(writer: Writer, number: int) -> None:
    ring, w, start = writer.ring, writer.written, PROMPT_TOKENS
    free = DEPTH
    for ticket in range(number):
        while not free or writer.reader.poll():
            free += writer.reader.recv()
        free -= 1
        cell = ticket % DEPTH
        prompt, tokens = w.tokens[:start], w.tokens[start:]
        ring.write(cell, ticket, prompt, tokens, w.logprobs[start:], w.versions[start:])
        descriptor = Trajectory(cell, len(w.tokens), len(tokens), StopReason.STOP, 0, 0)
        writer.reader.send(Finished(((ticket, 0, descriptor),)))
    while free < DEPTH:
        free += writer.reader.recv()


def read_ring(reader: Reader, number: int) -> tuple[float, float]:
    total, start, freed = 0.0, time.perf_counter(), 0
    for _ in range(number):
        message: Finished = reader.writer.recv()
        ticket, _, descriptor = message.trajectories[0]
        view = reader.ring.read(descriptor.cell, ticket)
        total += float(view.tokens.sum()) + float(view.mask.sum())
        total += float(view.logprobs.sum()) + float(view.versions.sum())
        freed += 1
        if freed == DEPTH // 4:  # as slots come back: many at once
            reader.writer.send(freed)
            freed = 0
    if freed:
        reader.writer.send(freed)
    return time.perf_counter() - start, total


def write_queue(writer: Writer, number: int) -> None:
    for _ in range(number):
        writer.queue.put(writer.written.tensors())
    writer.reader.recv()  # a tensor's memory goes with its process: it must have been read


def read_queue(reader: Reader, number: int) -> tuple[float, float]:
    total, start = 0.0, time.perf_counter()
    for _ in range(number):
        total += sum(float(column.sum()) for column in reader.queue.get())
    reader.writer.send(0)
    return time.perf_counter() - start, total


def time_memcpy(writer: Writer, number: int) -> float:
    """Trajectories per second of a copy alone, into as much shared memory as the ring has."""
    num_bytes = BYTES_PER_TOKEN * len(writer.written.tokens)
    cells = Segment(DEPTH * num_bytes).array(np.uint8, (DEPTH, num_bytes))
    source = np.ones(num_bytes, np.uint8)
    cells[:] = source
    start = time.perf_counter()
    for i in range(number):
        np.copyto(cells[i % DEPTH], source)
    return number / (time.perf_counter() - start)
