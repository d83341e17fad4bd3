"""Engines in further boxes, on Ray. The only file that imports it, and only where there are boxes.

    takes       devices.nodes, and a cluster that `ray start` made, with the head on this box
    gives       workers that look to loop, groups and supervisor like those of this box
    leaves out  trainers and verifiers, which stay on the head; a restart of the head (resume.py)

      head                                                           box 1, 2, …
    controller ──ToBox──► link (a process) ──exchange(orders)──► Outpost (a Ray actor) ──► engines
         ▲                  │  ▲                                      │
         └─────FromBox──────┘  └───────messages, rows, ages───────────┘
    ring, board ◄───────────┘
    weight store ──put once a version──► Ray's object store ──────► the box's own weight store

An outpost holds the *unchanged* workers, ring, weight store and board of its box: seals, seqlock,
canary and kill -9 stay local to a box. The link is one process, so neither Ray nor a slow box can
make the controller wait, and the end of Ray is not the end of the run. It has at most one call to
each box under way, which carries everything in both directions.

    rows      tokens, logprobs and versions of what is sealed (12 bytes a token; the mask follows)
              come with Finished and TurnEnded. The controller writes them into its ring before it
              hands the message on, unless the sender was replaced since: no cell that belongs to
              another group by now is ever written to.
    weights   are put after the trainer has published here, and are fetched and filled in by a
              thread of each box while its engines sample. A box skips what it is too slow for.
              At most two versions are held: the newest, and one that a box still fetches.
    ages      instead of times: clocks of boxes differ.
    deaths    of a worker are its own. A lost box is the death of each of its engines; they are
              restarted on any node that the placement group finds, now or when one joins.
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
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minirl import devices, model
from minirl.config import Config
from minirl.devices import Placement
from minirl.errors import MinirlError, RecipeError, one_line
from minirl.messages import Died, Finished, Role, Stop, TurnEnded
from minirl.rollout.worker import RolloutSetup
from minirl.shm.board import BoardWriter, State
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import TensorSpec, WeightStore
from minirl.tasks.turns import Dialogue
from minirl.workers import SIGNALS, Worker, Workers

EXCHANGE_S = 0.05  # that an outpost collects what its workers say
SILENT_S = 60.0  # a box that does not answer for so long is given up when an engine must restart
LOOK_LIMIT_S = 120.0
LINK_LIMIT_S = 300.0  # of one turn of the link; then it ends itself, and is restarted
LOG_BYTES = 2**16  # of each log, in one call
PROBE_BYTES = 2**25
MAX_DELAY_S = 60.0
HEAD = "node:__internal_head__"  # a resource that Ray gives to the node of `ray start --head`
FOLDER = "minirl-box-"
ENGINE = "minirl.rollout.worker:run"
GUIDE = "see docs/several-boxes.md"

Rows = tuple[NDArray[Any], ...]  # tokens, logprobs and versions, end to end


@dataclass(frozen=True)
class Start:
    """A worker is to start, instead of the one before."""

    delay_s: float


@dataclass(frozen=True)
class ShowStacks: ...


@dataclass(frozen=True)
class ToBox:
    name: str  # of a worker
    start: int  # the how-manieth, so that none gets what was meant for the one before
    message: object


@dataclass(frozen=True)
class FromBox:
    name: str
    start: int
    message: object
    rows: Rows = ()


@dataclass(frozen=True)
class BoxSetup:
    """What an outpost makes its workers from."""

    config: Config
    table: tuple[TensorSpec, ...]
    num_cells: int
    seed: int
    dialogue: Dialogue | None
    body: str
    has_trace: bool


@dataclass(frozen=True)
class Weights:
    version: int
    canary: NDArray[np.void]
    content: list[Any]  # one ObjectRef; in a list, so that no call waits for what is behind it


@dataclass(frozen=True)
class Report:
    messages: list[FromBox]
    ages: NDArray[np.float64]  # of its board, a row for each of its engines in order
    logs: dict[str, bytes]  # what was written since, by file name
    version: int  # in its store
    is_loading: bool


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
        self.send(ShowStacks())

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
            delay_s = min(MAX_DELAY_S, 2.0**self.num_ends)
            self.num_ends += 1
            if not message.is_final:
                self.workers.replace(self, delay_s)
            lost = replace(message, how=f"lost its box: the link {message.how}", is_box_lost=True)
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


def spawn_boxes(workers: Workers, engine: RolloutSetup, place: Placement, body: str = "") -> None:
    """Link and engines, as many in each further box as in this one. `engine` and `place` are those
    of engine 0; `body` is another than theirs in tests."""
    ring, store, trace = engine.ring, engine.store, workers.board.trace
    assert store is not None
    own = BoxSetup(
        engine.config,
        store.table,
        ring.num_cells,
        engine.seed,
        engine.dialogue,
        body or ENGINE,
        trace is not None,
    )
    setup = LinkSetup(own, place, ring, store, workers.log_dir, trace)
    link = Link(workers, setup)
    workers.add(link)
    per_box = len(setup.ranks(1))
    for box in range(1, setup.box.config.num_nodes):
        for rank in setup.ranks(box):
            worker = BoxWorker(link, box, rank, link.row + 1 + rank - per_box)
            link.far[worker.name] = worker
            workers.add(worker)


def with_boxes(config: Config) -> Config:
    """The recipe with a number for "auto"; an error in one line where the cluster lacks boxes."""
    nodes = config.devices.nodes

    def wrong(rule: str, remedy: str) -> RecipeError:
        return RecipeError("devices.nodes", nodes, rule, remedy)

    if find_spec("ray") is None:
        raise wrong("Ray is not installed", 'pip install "minirl[ray]", or 1')
    if config.takes_turns:
        raise wrong("devices.share at η = 0 is for one box", "raise buffer.max_staleness, or 1")
    found = look()
    if isinstance(found, str):
        raise wrong(found, f"`ray start --head` here, `ray start --address` on the others; {GUIDE}")
    if not found.is_head:
        raise wrong("this box is not the head of the Ray cluster", "start minirl on the head")
    if nodes != "auto" and nodes > found.num_boxes:
        rule = f"the Ray cluster has {found.num_boxes}"
        raise wrong(rule, f"`ray start --address` on more boxes, or lower it; {GUIDE}")
    number = found.num_boxes if nodes == "auto" else nodes
    return replace(config, devices=replace(config.devices, nodes=number))


@dataclass(frozen=True)
class NodeFacts:
    name: str
    versions: dict[str, str]
    store_bytes: int  # of Ray's object store
    bytes_per_s: float | None  # from the head; None: this is the head


@dataclass(frozen=True)
class Cluster:
    num_boxes: int
    is_head: bool  # this box is
    nodes: tuple[NodeFacts, ...] = ()  # where they were asked, the head first


def look(is_thorough: bool = False) -> Cluster | str:
    """The Ray cluster of this box, or why there is none. In a process of its own."""
    with tempfile.TemporaryDirectory(prefix="minirl-look-") as logs:
        workers = Workers(Path(logs), 1)
        try:
            workers.spawn(Role.LINK, 0, "minirl.outpost:answer", is_thorough, _place())
            found = workers.next_message(LOOK_LIMIT_S)
        except MinirlError as error:
            return one_line(str(error))
        finally:
            workers.kill()
    assert isinstance(found, Cluster | str)
    return found


def _place() -> Placement:
    """Of a process that talks with Ray: it needs the cluster's token, which no worker gets."""
    env = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    return Placement("cpu", env={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env})


def answer(is_thorough: bool, board: BoardWriter, pipe: Connection) -> None:
    """The body of that process."""
    connect()
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    nodes.sort(key=lambda node: HEAD not in node["Resources"])
    here = ray.get_runtime_context().get_node_id()
    is_head = nodes[0]["NodeID"] == here and HEAD in nodes[0]["Resources"]
    facts = tuple(_ask(node, here) for node in nodes) if is_thorough else ()
    pipe.send(Cluster(len(nodes), is_head, facts))


def _ask(node: dict[str, Any], here: str) -> NodeFacts:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    probe = ray.remote(_probe).options(num_cpus=0, scheduling_strategy=there)
    content = ray.put(np.zeros(PROBE_BYTES, np.uint8))
    versions, seconds = ray.get(probe.remote([content]))
    speed = None if node["NodeID"] == here else PROBE_BYTES / seconds
    store_bytes = int(node["Resources"].get("object_store_memory", 0))
    return NodeFacts(node["NodeManagerHostname"], versions, store_bytes, speed)


def _probe(content: list[Any]) -> tuple[dict[str, str], float]:
    import ray

    began = time.perf_counter()
    ray.get(content[0])
    return devices.versions(), time.perf_counter() - began


# On the head, in the process of the link ----------------------------------------------------------


@dataclass(frozen=True)
class LinkSetup:
    box: BoxSetup
    place: Placement  # kind of the engines' devices
    ring: TrajectoryRing
    store: WeightStore
    log_dir: Path
    trace: Path | None

    def ranks(self, box: int) -> range:
        devices = self.box.config.devices
        number = devices.rollout // devices.tensor_parallel
        return range(box * number, (box + 1) * number)


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
        faulthandler.dump_traceback_later(LINK_LIMIT_S, exit=True)
        loop.turn()
    loop.close()


def connect() -> None:
    """To the cluster of this box. Ray takes over SIGTERM, which is the controller's."""
    import ray

    try:
        ray.init(
            os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False, configure_logging=False
        )
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise MinirlError(f"no Ray cluster answers here ({one_line(str(error))})") from None
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class LinkLoop:
    def __init__(self, setup: LinkSetup, board: BoardWriter, pipe: Connection):
        self.setup, self.board, self.pipe = setup, board, pipe
        self.is_stopped = False
        self.newest: Weights | None = None
        config, first_row = setup.box.config, board.index + 1
        self.boxes = []
        for index in range(1, config.num_nodes):
            ranks, skip = setup.ranks(index), len(setup.ranks(0))
            rows = [BoardWriter(board.board, first_row + rank - skip, "") for rank in ranks]
            self.boxes.append(Box(index, ranks, rows))
        self.box_of = {f"{Role.ROLLOUT}-{rank}": box for box in self.boxes for rank in box.ranks}
        self.group = self._reserve()

    def _reserve(self) -> Any:
        """One bundle a node, the first on this one."""
        from ray.util.placement_group import placement_group

        bundle = self._resources(self.setup.box.config.devices.rollout)
        here = {**self._resources(self.setup.box.config.num_devices), HEAD: 0.001}
        return placement_group([here, *(bundle for _ in self.boxes)], strategy="STRICT_SPREAD")

    def _resources(self, num_gpus: int) -> dict[str, float]:
        return {"CPU": 1, "GPU": num_gpus} if self.setup.place.kind == "cuda" else {"CPU": 1}

    def turn(self) -> None:
        import ray

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
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if box.ages is not None and time.monotonic() - box.called_s > SILENT_S:
            self.lose(box, f"lost its box: no answer for {SILENT_S:.0f} s")
        if box.actor is None:
            num_gpus = self._resources(self.setup.box.config.devices.rollout).get("GPU", 0)
            where = PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=box.index
            )
            options = {"num_cpus": 1, "num_gpus": num_gpus, "scheduling_strategy": where}
            actor = ray.remote(Outpost).options(**options)
            box.actor = actor.remote(self.setup.box, box.ranks, devices.versions())

    def call(self, box: Box) -> None:
        if box.loading is None and self.newest and self.newest.version > box.version:
            box.loading, new = self.newest, self.newest
        else:
            new = None
        orders, box.orders = box.orders, []
        box.call, box.called_s = box.actor.exchange.remote(orders, new), time.monotonic()

    def finish(self, box: Box) -> None:
        """A call has come back."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            report: Report = ray.get(box.call)
        except RayTaskError as error:
            self.lose(box, f"lost its box: {error.cause}", isinstance(error.cause, MinirlError))
            return
        except RayError as error:
            self.lose(box, f"lost its box: {one_line(str(error)[:200])}")
            return
        box.call, box.version = None, report.version
        box.loading = box.loading if report.is_loading else None
        before = np.zeros_like(report.ages) if box.ages is None else box.ages
        for place, writer in enumerate(box.writers):
            self.board.board.take(writer.index, report.ages[place], before[place])
        box.ages = report.ages
        for name, text in report.logs.items():
            path = self.setup.log_dir / name
            if self.setup.trace is not None and name == self.setup.trace.name:
                path, text = self.setup.trace, text.removeprefix(b"[\n")
            with suppress(OSError), path.open("ab") as file:
                file.write(text)
        if report.messages:
            self.pipe.send(report.messages)

    def lose(self, box: Box, why: str, is_final: bool = False) -> None:
        """Its engines are reported as dead; the controller asks for new ones."""
        import ray

        ray.kill(box.actor)
        died = Died(why, is_final, is_box_lost=True)
        self.pipe.send([FromBox(name, start, died) for name, start in box.starts.items()])
        box.actor = box.call = box.ages = box.loading = None
        box.orders, box.starts, box.version = [], {}, -1

    def put_weights(self) -> None:
        """A thread: each new version into the object store, straight from the trainer's."""
        import ray

        store = self.setup.store
        while not self.is_stopped:
            had = self.newest.version if self.newest else -1
            fetched = {box.loading.version for box in self.boxes if box.loading}
            if store.latest > had and len(fetched) < 2:
                put = store.attempt(store.latest, lambda slot: ray.put(store.content(slot)))
                if put is not None:
                    self.newest = Weights(put.version, put.canary, [put.loaded])
            time.sleep(EXCHANGE_S / 5)

    def close(self) -> None:
        import ray

        ending = [box.actor.close.remote() for box in self.boxes if box.ages is not None]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=EXCHANGE_S * 100)
        ray.shutdown()  # ends the actors


# In another box -----------------------------------------------------------------------------------


class Outpost:
    """A Ray actor, never a threaded one: workers die with the thread that started them."""

    def __init__(self, setup: BoxSetup, ranks: range, versions: dict[str, str]):
        self.setup, self.ranks, self.versions = setup, ranks, versions
        self.workers: Workers | None = None
        self.starts: dict[str, int] = {}
        self.sent: dict[str, int] = {}  # bytes of each log
        self.is_loading = False

    def open(self) -> Workers:
        """At the first call, whose errors the link hears."""
        if (own := devices.versions()) != self.versions:
            names = [f"{n} {own[n]} (head: {v})" for n, v in self.versions.items() if own[n] != v]
            raise MinirlError(f"box {os.uname().nodename} has {', '.join(names)}: install the same")
        sys.modules["__main__"].__file__ = None  # else each worker would import Ray's
        os.environ.pop("OMP_NUM_THREADS", None)  # 1, by Ray
        setup, config = self.setup, self.setup.config
        for old in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):  # of boxes that were killed
            if not Path(f"/proc/{old.name.removeprefix(FOLDER)}").exists():
                shutil.rmtree(old, ignore_errors=True)
        self.folder = Path(tempfile.gettempdir()) / f"{FOLDER}{os.getpid()}"
        for name in ("logs", "tmp"):
            (self.folder / name).mkdir(parents=True)
        kind, available = devices.find_devices(config.devices.kind)
        self.places = devices.place(config, kind, available, ranks=False)[0]
        self.ring = TrajectoryRing(setup.num_cells, config.max_tokens_per_trajectory)
        self.store = WeightStore(setup.table, config.model.dtype)
        source = str(model.local_folder(config))
        self.engine = RolloutSetup(
            config, source, kind, setup.seed, self.ring, self.store, setup.dialogue
        )
        trace = self.folder / "logs" / "trace.json" if setup.has_trace else None
        return Workers(self.folder / "logs", len(self.places), trace)

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
            if not any(worker.is_started for worker in workers.all):
                time.sleep(max(0.0, deadline - time.monotonic()))
        is_loading = self.is_loading  # asked first: the version is there when it has ended
        return Report(said, workers.board.ages(), self.logs(), self.store.latest, is_loading)

    def obey(self, order: ToBox, workers: Workers) -> None:
        found = [worker for worker in workers.all if worker.name == order.name]
        if isinstance(order.message, Start):
            self.starts[order.name] = order.start
            if found:
                workers.replace(found[0], order.message.delay_s)
            else:
                self.spawn(int(order.name.rpartition("-")[2]), workers)
        elif found and order.start == self.starts[order.name]:
            if isinstance(order.message, ShowStacks):
                found[0].ask_stacks()
            elif found[0].is_started:
                found[0].send(order.message)

    def spawn(self, rank: int, workers: Workers) -> None:
        place = devices.with_own_temp(self.places[rank - self.ranks.start], self.folder / "tmp")
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
        import ray

        try:
            content = ray.get(weights.content[0])
            self.store.publish_content(weights.version, content, weights.canary)
        finally:
            self.is_loading = False  # the link sends the newest again where this failed

    def logs(self) -> dict[str, bytes]:
        found = {}
        for path in (self.folder / "logs").iterdir():
            with path.open("rb") as file:
                file.seek(self.sent.get(path.name, 0))
                text = file.read(LOG_BYTES)
                if text := text[: text.rfind(b"\n") + 1]:  # whole lines
                    found[path.name] = text
                    self.sent[path.name] = self.sent.get(path.name, 0) + len(text)
        return found

    def close(self) -> None:
        if self.workers is not None:
            self.workers.kill()
            devices.sweep_temp(self.folder / "tmp")
            shutil.rmtree(self.folder, ignore_errors=True)
