"""Boxes on one machine: each a `ray start` in its own network namespace, joined by veths and a
bridge. Where namespaces cannot be made, Ray nodes on loopback. Takes how many, gives commands that
run on the head; nothing of it is left afterwards.
"""

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

STORE_BYTES = 120_000_000
PORT = 6379
LIMIT_S = 120.0
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def can_make_namespaces() -> bool:
    name = f"mr{os.getpid()}try"
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        return False
    with suppress(subprocess.CalledProcessError):
        run("ip", "netns", "add", name)
        run("ip", "netns", "del", name)
        return True
    return False


class Boxes:
    """Box 0 is the head, whose namespace holds the bridge."""

    def __init__(self, folder: Path, has_namespaces: bool):
        self.folder, self.has_namespaces = folder, has_namespaces
        self.subnet = f"10.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}"
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.num_made = 0
        self.port = PORT if has_namespaces else 20_000 + os.getpid() % 10_000
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # A lost box is noticed in seconds, not in half a minute.
        own |= {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
        own |= {"RAY_ADDRESS": f"{self.ip(0)}:{self.port}", "RAY_USAGE_STATS_ENABLED": "0"}
        own["TMPDIR"] = str(folder)
        here, before = Path(__file__).parent, os.environ.get("PYTHONPATH", "")
        self.env = {**os.environ, **own, "PYTHONPATH": f"{here.parent}:{here}:{before}"}

    def ip(self, box: int) -> str:
        return f"{self.subnet}.{box + 1}" if self.has_namespaces else "127.0.0.1"

    def name(self, box: int) -> str:
        return f"mr{os.getpid()}b{box}"

    def inside(self, box: int, command: list[str]) -> list[str]:
        """The command that runs `command` in a box."""
        return ["ip", "netns", "exec", self.name(box), *command] if self.has_namespaces else command

    def start(self, **env: str) -> int:
        """A further box (the first is the head), with more in its environment; gives its number."""
        box, self.num_made = self.num_made, self.num_made + 1
        if self.has_namespaces:
            self._make_namespace(box)
        where = ["--head", f"--port={self.port}", "--include-dashboard=false"]
        if box:
            where = [f"--address={self.env['RAY_ADDRESS']}"]
        command = [*RAY, "start", *where, "--block", "--num-cpus=2", "--disable-usage-stats"]
        command += [f"--node-ip-address={self.ip(box)}", f"--object-store-memory={STORE_BYTES}"]
        command += [f"--temp-dir={self.folder}/{box}"] if self.has_namespaces or not box else []
        # On a busy machine Ray's agents may start too slowly for its raylet, which then ends.
        command = ["bash", "-c", f"until {shlex.join(command)}; do sleep 1; done"]
        with (self.folder / f"box-{box}.log").open("wb") as log:
            given = {"stdout": log, "stderr": log, "start_new_session": True}
            own = {**self.env, **env}
            self.nodes[box] = subprocess.Popen(self.inside(box, command), env=own, **given)
        return box

    def _make_namespace(self, box: int) -> None:
        name, end = self.name(box), f"v{os.getpid()}x{box}"
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        if not box:
            run("ip", "-n", name, "link", "add", "br0", "type", "bridge")
            run("ip", "-n", name, "addr", "add", f"{self.ip(0)}/24", "dev", "br0")
            run("ip", "-n", name, "link", "set", "br0", "up")
            return
        run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", end)
        run("ip", "-n", name, "link", "set", end, "netns", self.name(0))
        run("ip", "-n", self.name(0), "link", "set", end, "master", "br0", "up")
        run("ip", "-n", name, "addr", "add", f"{self.ip(box)}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")

    def wait(self, count: int) -> None:
        """Until the cluster has so many living nodes."""
        code = "import ray, os; ray.init(os.environ['RAY_ADDRESS'], log_to_driver=False); "
        code += "print(sum(node['Alive'] for node in ray.nodes()))"
        deadline = time.monotonic() + LIMIT_S
        while True:
            asked = self.inside(0, [sys.executable, "-c", code])
            found = subprocess.run(asked, env=self.env, capture_output=True, text=True)
            if found.stdout.split()[-1:] == [str(count)]:
                return
            logs = [log.read_text()[-2000:] for log in self.folder.glob("box-*.log")]
            assert time.monotonic() < deadline, (found.stdout, found.stderr, logs)
            time.sleep(0.5)

    def slow(self, box: int, rate: str) -> None:
        """The link from and to a box, such as to "100mbit"."""
        shape = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
        ends = {self.name(box): "eth0", self.name(0): f"v{os.getpid()}x{box}"}
        for name, device in ends.items():
            run("tc", "-n", name, "qdisc", "add", "dev", device, *shape)

    def pids(self, box: int) -> list[psutil.Process]:
        """All processes of a box; the namespace knows those that have left their parents."""
        node = psutil.Process(self.nodes[box].pid)
        found = {node, *node.children(recursive=True)}
        if self.has_namespaces:
            command = ["ip", "netns", "pids", self.name(box)]
            shown = subprocess.run(command, capture_output=True, text=True)
            for pid in map(int, shown.stdout.split()):
                with suppress(psutil.NoSuchProcess):
                    found.add(psutil.Process(pid))
        return list(found)

    def kill(self, box: int) -> None:
        """As a box that loses its power."""
        with suppress(psutil.NoSuchProcess):
            for process in self.pids(box):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        self.nodes.pop(box).wait()
        if self.has_namespaces:
            run("ip", "netns", "del", self.name(box))


@contextmanager
def boxes(count: int) -> Iterator[Boxes]:
    """A cluster of so many boxes, ready."""
    folder = Path(tempfile.mkdtemp(prefix="mr-"))  # short: Ray's sockets are in it
    made = Boxes(folder, can_make_namespaces())
    try:
        made.start()
        made.wait(1)
        for _ in range(count - 1):
            made.start()
        made.wait(count)
        yield made
    finally:
        for box in sorted(made.nodes, reverse=True):
            made.kill(box)
        shutil.rmtree(folder, ignore_errors=True)
