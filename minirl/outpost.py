"""Engines in further boxes, on Ray: the only file that imports it, and only where there are boxes.

    takes       devices.nodes, and a cluster that `ray start` made, with its head on this box
    gives       workers that look to loop, groups and supervisor like those of this box
    leaves out  trainers and verifiers, which stay on the head

    controller ──ToBox──► link, a process ──exchange(orders)──► Outpost, a Ray actor ──► engines
         ▲                  │  ▲                                    │
         └─────FromBox──────┘  └──────── messages, rows, ages ──────┘
    trainer's weight store ──put once a version──► Ray's object store ──► the box's weight store

An outpost holds the *unchanged* workers, ring, weight store and board of its box. The link is one
process, so that neither Ray nor a slow box makes the controller wait, and the end of Ray is not the
end of the run. At most one call to each box is under way; it carries everything, both ways.

    rows     of what is sealed (12 bytes a token; the mask follows) come with Finished and
             TurnEnded. The controller writes them into its ring before it hands the message on,
             unless the sender was replaced since: no cell of another group is ever written to.
    weights  are put after the trainer has published here, and filled in by a thread of each box
             while its engines sample. A box skips versions that it is too slow for. At most two
             are held: the newest, and one that a box still fetches.
    ages     instead of times: clocks of boxes differ.
    deaths   A lost box is the death of each of its engines. They restart on any node that the
             placement group finds, now or when one joins.
"""

import faulthandler
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as InGroup

from minirl import devices, model
from minirl.config import Config
from minirl.devices import Placement
from minirl.errors import MinirlError, RecipeError, one_line
from minirl.messages import Died, Finished, Role, Stop, TurnEnded
from minirl.rollout.worker import RolloutSetup
from minirl.shm.board import BoardWriter, State
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import TensorSpec, WeightStore
from minirl.workers import SIGNALS, Worker, Workers

EXCHANGE_S = 0.05  # that an outpost collects what its workers say
SILENT_S = 60.0  # a box that does not answer for so long is given up when an engine must restart
LIMIT_S = 300.0  # of one turn of the link; then it ends itself and is restarted
MAX_DELAY_S = 60.0
LOG_BYTES, PROBE_BYTES = 2**16, 2**24  # of each log in one call; to measure bandwidth
HEAD = "node:__internal_head__"  # a resource that Ray gives to the node of `ray start --head`
FOLDER = "minirl-box-"
ENGINE = "minirl.rollout.worker:run"
GUIDE = "`ray start --head` here, `ray start --address` on the others (docs/several-boxes.md)"

Rows = tuple[NDArray[Any], ...]  # tokens, logprobs and versions, end to end


class Start(NamedTuple):
    """A worker is to start, instead of the one before."""

    delay_s: float


class ToBox(NamedTuple):
    name: str  # of a worker
    start: int  # which of its starts: none gets what was meant for the one before
    message: object  # SIGUSR1: show your stacks


class FromBox(NamedTuple):
    name: str
    start: int
    message: object
    rows: Rows = ()


class Weights(NamedTuple):
    version: int
    canary: NDArray[np.void]
    content: list[Any]  # one ObjectRef; in a list, so that no call waits for what is behind it


class Report(NamedTuple):
    messages: list[FromBox]
    ages: NDArray[np.float64]  # of its board, a row for each of its engines in order
    logs: dict[str, bytes]  # what was written since, by file name
    version: int  # in its store
    is_loading: bool


class BoxSetup(NamedTuple):
    """What an outpost makes its workers from."""

    engine: RolloutSetup  # of engine 0, without shared memory
    table: tuple[TensorSpec, ...]
    num_cells: int
    body: str
    has_trace: bool
    versions: dict[str, str]  # that the head runs


# In the controller --------------------------------------------------------------------------------


class BoxWorker(Worker):
    """A worker in another box."""

    def __init__(self, link: "Link", box: int, rank: int, row: int):
        super().__init__(Role.ROLLOUT, rank, row, "", None, link.setup.place)
        self.link, self.box = link, box

    @property
    def is_started(self) -> bool:
        return True

    def start_there(self, delay_s: float) -> None:
        self.send(Start(delay_s))

    def ask_stacks(self) -> None:
        self.send(signal.SIGUSR1)

    def send(self, message: object) -> None:
        self.link.send(ToBox(self.name, self.num_starts, message))


class Link(Worker):
    """What it says is said by workers of other boxes; when it ends, they are lost with it."""

    def __init__(self, workers: Workers, setup: "LinkSetup"):
        super().__init__(Role.LINK, 0, len(workers.all), "minirl.outpost:run", setup, _place())
        self.workers, self.far = workers, dict[str, BoxWorker]()
        self.num_ends = 0  # in a row

    def relayed(self, message: object) -> Iterator[tuple[Worker, object]]:
        if isinstance(message, Died):
            if not message.is_final:
                self.workers.replace(self, min(MAX_DELAY_S, 2.0**self.num_ends))
            self.num_ends += 1
            lost = message._replace(how=f"lost its box: the link {message.how}", is_box_lost=True)
            yield from ((worker, lost) for worker in self.far.values())
            return
        assert isinstance(message, list)
        self.num_ends = 0
        for one in message:
            worker = self.far[one.name]
            if one.start == worker.num_starts:
                self._write_rows(one)
                yield worker, one.message

    def _write_rows(self, one: FromBox) -> None:
        at = 0
        if isinstance(one.message, Finished | TurnEnded):
            for group_id, _, trajectory in one.message.trajectories:
                own = (column[at : at + trajectory.length] for column in one.rows)
                self.setup.ring.write(trajectory.cell, group_id, (), *own)
                at += trajectory.length


def spawn_boxes(
    workers: Workers, engine: RolloutSetup, place: Placement, body: str = ENGINE
) -> None:
    """Link and engines, as many in each further box as in this one. `engine` and `place` are those
    of engine 0."""
    ring, store, trace = engine.ring, engine.store, workers.board.trace
    assert store is not None
    bare: Any = replace(engine, ring=None, store=None)  # type: ignore[arg-type]
    box = BoxSetup(bare, store.table, ring.num_cells, body, trace is not None, devices.versions())
    link = Link(workers, LinkSetup(box, place, ring, store, workers.log_dir, trace))
    workers.add(link)
    for index in range(1, engine.config.num_nodes):
        for rank in engine.config.engines_of(index):
            worker = BoxWorker(link, index, rank, len(workers.all))
            link.far[worker.name] = worker
            workers.add(worker)


def with_boxes(config: Config) -> Config:
    """The recipe with a number for "auto"; an error in one line where the cluster lacks boxes."""
    nodes, found = config.devices.nodes, look()
    if isinstance(found, str):
        raise RecipeError("devices.nodes", nodes, found, GUIDE)
    if nodes != "auto" and nodes > len(found):
        raise RecipeError("devices.nodes", nodes, f"the Ray cluster has {len(found)}", GUIDE)
    number = len(found) if nodes == "auto" else nodes
    return replace(config, devices=replace(config.devices, nodes=number))


def look() -> "list[NodeFacts] | str":
    """The boxes of the Ray cluster, or why there is none. Asked by a process of its own."""
    with tempfile.TemporaryDirectory(prefix="minirl-look-") as logs:
        workers = Workers(Path(logs), 1)
        try:
            workers.spawn(Role.LINK, 0, "minirl.outpost:answer", None, _place())
            return workers.next_message(LIMIT_S)  # type: ignore[return-value]
        except MinirlError as error:
            return one_line(str(error))
        finally:
            workers.kill()


def _place() -> Placement:
    """Of a process that talks with Ray: it needs the cluster's token, which no other gets."""
    env = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    return Placement("cpu", env={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env})


# On the head, in a process of its own -------------------------------------------------------------


class NodeFacts(NamedTuple):
    name: str
    versions: dict[str, str]
    store_bytes: int  # of Ray's object store
    bytes_per_s: float  # from the head


def answer(setup: None, board: BoardWriter, pipe: Connection) -> None:
    """The body of the process that `look` starts."""
    connect()
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if not any(HEAD in node["Resources"] for node in nodes if node["NodeID"] == here):
        raise MinirlError("this box is not the head of its Ray cluster")
    pipe.send([_ask(node) for node in nodes])


def _ask(node: dict[str, Any]) -> NodeFacts:
    there = OnNode(node["NodeID"], soft=False)
    content = ray.put(np.zeros(PROBE_BYTES, np.uint8))
    probe = ray.remote(_probe).options(num_cpus=0, scheduling_strategy=there)
    versions, seconds = ray.get(probe.remote([content]))
    store_bytes = int(node["Resources"].get("object_store_memory", 0))
    return NodeFacts(node["NodeManagerHostname"], versions, store_bytes, PROBE_BYTES / seconds)


def _probe(content: list[Any]) -> tuple[dict[str, str], float]:
    began = time.perf_counter()
    ray.get(content[0])
    return devices.versions(), time.perf_counter() - began


def connect() -> None:
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        ray.init(address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, RayError) as error:
        raise MinirlError(f"no Ray cluster answers here ({one_line(str(error))})") from None
    for number in SIGNALS:  # Ray took over SIGTERM; they are the controller's
        signal.signal(number, signal.SIG_IGN)


class LinkSetup(NamedTuple):
    box: BoxSetup
    place: Placement  # of the head's first engine
    ring: TrajectoryRing
    store: WeightStore
    log_dir: Path
    trace: Path | None


@dataclass
class Box:
    """What the link knows of one further box."""

    index: int  # also of its bundle in the placement group
    ranks: range
    writers: list[BoardWriter]  # its engines' rows on the head's board
    actor: Any = None
    call: Any = None  # under way
    called_s: float = 0.0
    orders: list[ToBox] = field(default_factory=list)
    starts: dict[str, int] = field(default_factory=dict)  # by worker
    ages: NDArray[np.float64] | None = None  # None: it has not answered yet
    version: int = -1
    loading: Weights | None = None


def run(setup: LinkSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of the link process."""
    connect()
    loop = LinkLoop(setup, board, pipe)
    threading.Thread(target=loop.put_weights, daemon=True).start()
    while not loop.is_stopped:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=2)
        loop.turn()
    ending = [box.actor.close.remote() for box in loop.boxes if box.ages is not None]
    ray.wait(ending, num_returns=len(ending), timeout=5.0) if ending else None
    ray.shutdown()  # ends the actors


class LinkLoop:
    def __init__(self, setup: LinkSetup, board: BoardWriter, pipe: Connection):
        self.setup, self.board, self.pipe = setup, board, pipe
        self.config = setup.box.engine.config
        self.is_stopped = False
        self.newest: Weights | None = None
        self.boxes, row = list[Box](), board.index
        for index in range(1, self.config.num_nodes):
            ranks = self.config.engines_of(index)
            rows = range(row + 1, row + 1 + len(ranks))
            self.boxes.append(Box(index, ranks, [BoardWriter(board.board, r, "") for r in rows]))
            row += len(ranks)
        self.box_of = {f"{Role.ROLLOUT}-{rank}": box for box in self.boxes for rank in box.ranks}
        # One bundle a node, the first on this one.
        here = {**self.resources(self.config.num_devices), HEAD: 0.001}
        further = [self.resources(self.config.devices.rollout) for _ in self.boxes]
        self.group = placement_group([here, *further], strategy="STRICT_SPREAD")

    def resources(self, num_gpus: int) -> dict[str, float]:
        return {"CPU": 1, "GPU": num_gpus} if self.setup.place.kind == "cuda" else {"CPU": 1}

    def turn(self) -> None:
        self.board.enter(State.WAITING_FOR_ANSWERS)
        calls = {box.call: box for box in self.boxes if box.call is not None}
        if calls:
            done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=EXCHANGE_S / 2)
            for call in done:
                self.finish(calls[call])
        self.read_orders(0.0 if calls else EXCHANGE_S)
        for box in self.boxes:
            if box.actor is not None and box.call is None:
                self.call(box)
            if box.ages is None:
                for writer in box.writers:
                    writer.enter(State.WAITING_FOR_BOX)

    def read_orders(self, timeout_s: float) -> None:
        while self.pipe.poll(timeout_s):
            order, timeout_s = self.pipe.recv(), 0.0
            if isinstance(order, Stop):
                self.is_stopped = True
                return
            box = self.box_of[order.name]
            if isinstance(order.message, Start):
                self.prepare(box)
                box.starts[order.name] = order.start
            if box.actor is not None:
                box.orders.append(order)

    def prepare(self, box: Box) -> None:
        """An engine is to start: there must be an outpost, and one that answers."""
        if box.ages is not None and time.monotonic() - box.called_s > SILENT_S:
            self.lose(box, f"no answer for {SILENT_S:.0f} s")
        if box.actor is None:
            where = InGroup(self.group, placement_group_bundle_index=box.index)
            num_gpus = self.resources(self.config.devices.rollout).get("GPU", 0)
            actor = ray.remote(Outpost).options(
                num_cpus=1, num_gpus=num_gpus, scheduling_strategy=where
            )
            box.actor = actor.remote(self.setup.box, box.ranks.start)

    def call(self, box: Box) -> None:
        """Everything that waits for the box goes with it."""
        new = None
        if box.loading is None and self.newest and self.newest.version > box.version:
            new = box.loading = self.newest
        orders, box.orders = box.orders, []
        box.call, box.called_s = box.actor.exchange.remote(orders, new), time.monotonic()

    def finish(self, box: Box) -> None:
        """A call has come back."""
        try:
            report: Report = ray.get(box.call)
        except RayTaskError as error:
            self.lose(box, str(error.cause), isinstance(error.cause, MinirlError))
            return
        except RayError as error:
            self.lose(box, str(error).partition("\n")[0][:100])
            return
        box.call, box.version = None, report.version
        box.loading = box.loading if report.is_loading else None
        before = np.zeros_like(report.ages) if box.ages is None else box.ages
        for place, writer in enumerate(box.writers):
            self.board.board.take(writer.index, report.ages[place], before[place])
        box.ages = report.ages
        for name, text in report.logs.items():
            trace = self.setup.trace if name == "trace.json" else None
            with suppress(OSError), (trace or self.setup.log_dir / name).open("ab") as file:
                file.write(text.removeprefix(b"[\n"))
        if report.messages:
            self.pipe.send(report.messages)

    def lose(self, box: Box, why: str, is_final: bool = False) -> None:
        """Its engines are reported as dead; the controller asks for new ones."""
        ray.kill(box.actor)
        died = Died(f"lost its box: {why}", is_final, is_box_lost=True)
        self.pipe.send([FromBox(name, start, died) for name, start in box.starts.items()])
        box.actor = box.call = box.ages = box.loading = None
        box.orders, box.starts, box.version = [], {}, -1

    def put_weights(self) -> None:
        """A thread: each new version into the object store, straight from the trainer's."""
        store = self.setup.store
        while not self.is_stopped:
            had = self.newest.version if self.newest else -1
            fetched = {box.loading.version for box in self.boxes if box.loading}
            if store.latest > had and len(fetched) < 2:
                put = store.attempt(store.latest, lambda slot: ray.put(store.content(slot)))
                if put is not None:
                    self.newest = Weights(put.version, put.canary, [put.loaded])
            time.sleep(EXCHANGE_S / 5)


# In another box -----------------------------------------------------------------------------------


class Outpost:
    """A Ray actor, never a threaded one: workers die with the thread that started them."""

    def __init__(self, setup: BoxSetup, first_rank: int):
        self.setup, self.first_rank = setup, first_rank
        self.workers: Workers | None = None
        self.starts: dict[str, int] = {}
        self.sent: dict[str, int] = {}  # bytes of each log
        self.is_loading = False

    def open(self) -> Workers:
        """At the first call, whose errors the link hears."""
        setup, own, config = self.setup, devices.versions(), self.setup.engine.config
        if own != setup.versions:
            other = [f"{n} {own[n]} (head: {v})" for n, v in setup.versions.items() if own[n] != v]
            raise MinirlError(f"box {os.uname().nodename} has {', '.join(other)}: install the same")
        sys.modules["__main__"].__file__ = None  # else each worker would import Ray's
        os.environ.pop("OMP_NUM_THREADS", None)  # 1, by Ray
        temp = Path(tempfile.gettempdir())
        for old in temp.glob(f"{FOLDER}*"):  # of outposts that were killed
            if not Path("/proc", old.name.removeprefix(FOLDER)).exists():
                shutil.rmtree(old, ignore_errors=True)
        self.folder = temp / f"{FOLDER}{os.getpid()}"
        self.log_dir = self.folder / "logs"
        self.log_dir.mkdir(parents=True)
        (self.folder / "tmp").mkdir()
        kind, available = devices.find_devices(config.devices.kind)
        self.places, _ = devices.place(config, kind, available, ranks=False)
        self.ring = TrajectoryRing(setup.num_cells, config.max_tokens_per_trajectory)
        self.store = WeightStore(setup.table, config.model.dtype)
        shared = {"folder": str(model.local_folder(config)), "ring": self.ring, "store": self.store}
        self.engine = replace(setup.engine, kind=kind, **shared)  # type: ignore[arg-type]
        trace = self.log_dir / "trace.json" if setup.has_trace else None
        return Workers(self.log_dir, len(self.places), trace)

    def exchange(self, orders: list[ToBox], weights: Weights | None) -> Report:
        """One call, both ways."""
        self.workers = workers = self.workers or self.open()
        for order in orders:
            self.obey(order, workers)
        if weights is not None:
            self.is_loading = True
            threading.Thread(target=self.load, args=(weights,), daemon=True).start()
        said, deadline = [], time.monotonic() + EXCHANGE_S
        while (left_s := deadline - time.monotonic()) > 0:
            for worker, message in workers.receive(left_s):
                start = self.starts[worker.name]
                said.append(FromBox(worker.name, start, message, self.rows(message)))
                if isinstance(message, Died):
                    workers.retire(worker)
        is_loading = self.is_loading  # asked first: the version is there when it has ended
        return Report(said, workers.board.ages(), self.logs(), self.store.latest, is_loading)

    def obey(self, order: ToBox, workers: Workers) -> None:
        worker = next((worker for worker in workers.all if worker.name == order.name), None)
        if isinstance(order.message, Start):
            self.starts[order.name] = order.start
            if worker is not None:
                workers.replace(worker, order.message.delay_s)
            else:
                self.spawn(int(order.name.rpartition("-")[2]), workers)
        elif worker is not None and worker.is_started and order.start == self.starts[order.name]:
            if order.message is signal.SIGUSR1:
                worker.ask_stacks()
            else:
                worker.send(order.message)

    def spawn(self, rank: int, workers: Workers) -> None:
        place = devices.with_own_temp(self.places[rank - self.first_rank], self.folder / "tmp")
        engine = replace(self.engine, seed=(self.engine.seed + rank) % 2**31)
        workers.spawn(Role.ROLLOUT, rank, self.setup.body, engine, place)

    def rows(self, message: object) -> Rows:
        if not isinstance(message, Finished | TurnEnded):
            return ()
        views = [self.ring.read(t.cell, group_id) for group_id, _, t in message.trajectories]
        names = ("tokens", "logprobs", "versions")
        return tuple(np.concatenate([getattr(view, name) for view in views]) for name in names)

    def load(self, weights: Weights) -> None:
        """In a thread of its own: neither engines nor messages wait for it."""
        try:
            content = ray.get(weights.content[0])
            self.store.publish_content(weights.version, content, weights.canary)
        finally:
            self.is_loading = False  # the link sends the newest again where this failed

    def logs(self) -> dict[str, bytes]:
        """What workers have written since, in whole lines."""
        found = {}
        for path in self.log_dir.iterdir():
            with path.open("rb") as file:
                file.seek(self.sent.setdefault(path.name, 0))
                text = file.read(LOG_BYTES)
            if text := text[: text.rfind(b"\n") + 1]:
                found[path.name] = text
                self.sent[path.name] += len(text)
        return found

    def close(self) -> None:
        if self.workers is not None:
            self.workers.kill()
            devices.sweep_temp(self.folder / "tmp")
            shutil.rmtree(self.folder, ignore_errors=True)
