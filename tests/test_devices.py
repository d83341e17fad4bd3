"""Which process runs where: on CPU by cores, on CUDA by GPUs; GPUs are found without torch."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from minirl import devices
from minirl.config import Config, DevicesConfig
from minirl.devices import Placement, place


def placed(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, rollout: int, train: int
) -> tuple[list[Placement], list[Placement]]:
    cores = set(range(10, 10 + num_cores))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    config = Config(devices=DevicesConfig(kind="cpu", rollout=rollout, train=train))
    return place(config, "cpu", num_cores)


@pytest.mark.parametrize("num_cores", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(("rollout", "train"), [(1, 1), (2, 1), (1, 3), (8, 8)])
def test_every_process_has_cores_of_its_pool_and_as_many_threads(
    num_cores: int, rollout: int, train: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, trainers = placed(monkeypatch, num_cores, rollout, train)
    assert (len(engines), len(trainers)) == (rollout, train)
    for placement in engines + trainers:
        assert placement.torch_device == "cpu" and placement.process_group_backend == "gloo"
        assert placement.cores and set(placement.cores) <= set(range(10, 10 + num_cores))
        assert placement.env["OMP_NUM_THREADS"] == str(len(placement.cores))
        assert placement.env["CUDA_VISIBLE_DEVICES"] == ""
    pools = [[core for place in pool for core in place.cores] for pool in (engines, trainers)]
    assert num_cores == 1 or set(pools[0]).isdisjoint(pools[1])
    for taken, count in zip(pools, (rollout, train), strict=True):
        if len(set(taken)) >= count:  # enough for all: no core is shared
            assert len(taken) == len(set(taken))


def test_only_engines_get_what_vllm_needs_and_shares_for_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines, trainers = placed(monkeypatch, 4, 2, 2)
    for placement in engines:
        assert placement.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert placement.env["TORCH_COMPILE_DISABLE"] == "1"
    for placement in trainers:
        assert not [name for name in placement.env if name.startswith(("VLLM", "TORCH"))]
    config = Config(devices=DevicesConfig(kind="cpu", rollout=2, tensor_parallel=2, train=3))
    (engine,), none = place(config, "cpu", 4, ranks=False)
    assert engine.cores == (10, 11, 12, 13) and none == []
    assert engine.env["VLLM_CPU_OMP_THREADS_BIND"] == "10,11|12,13"
    assert engine.env["OMP_NUM_THREADS"] == "2"
    none, ranks = place(config, "cpu", 4, engines=False)
    assert [rank.cores for rank in ranks] == [(10,), (11,), (12,)] and none == []


def test_on_cuda_each_engine_sees_its_own_gpus_and_each_rank_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,GPU-a1,7,0,2")
    config = Config(devices=DevicesConfig(rollout=4, train=2, tensor_parallel=2))
    engines, trainers = place(config, "cuda", 6)
    gpus = [placement.env["CUDA_VISIBLE_DEVICES"] for placement in engines + trainers]
    assert gpus == ["3,5", "GPU-a1,7", "0", "2"]
    for placement in engines + trainers:
        assert placement.torch_device == "cuda:0"  # the first of those it sees
        assert placement.process_group_backend == "nccl"
        assert "TORCH_COMPILE_DISABLE" not in placement.env
        assert placement.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"  # as NVML counts
    assert engines[0].env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert engines[0].env["TRITON_F32_DEFAULT"] == "ieee"
    roots = [engine.env["VLLM_CACHE_ROOT"] for engine in engines]
    assert [Path(root).name for root in roots] == ["engine-0", "engine-1"]
    assert trainers[0].env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in engines[0].env
    arguments = devices.engine_arguments(config, "cuda")
    assert arguments["async_scheduling"] and arguments["max_num_batched_tokens"] == 8192
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    _, ranks = place(config, "cuda", 6, engines=False)
    assert [rank.env["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["0", "1"]


def fake_nvml(num_gpus: int) -> SimpleNamespace:
    """A driver with some GPUs; without one where there are none."""

    def handle(gpu: int | str) -> str:
        if not 0 <= int(str(gpu).removeprefix("GPU-")) < num_gpus:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return str(gpu)

    return SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        nvmlInit=lambda: handle(0),
        nvmlDeviceGetCount=lambda: num_gpus,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetUUID=lambda gpu: f"GPU-{gpu}",
        nvmlDeviceGetName=lambda gpu: f"NVIDIA {gpu}",
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=24 * 2**30),
    )


def test_gpus_are_found_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.torch_cuda() == torch.version.cuda
    monkeypatch.setattr(devices, "pynvml", fake_nvml(2))
    monkeypatch.setattr(devices, "torch_cuda", lambda: "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.find_devices("auto") == ("cuda", 2)
    assert devices.find_devices("cpu") == ("cpu", devices.num_cores())
    assert devices.describe("cuda")["gpus"] == ["NVIDIA 0, 24 GiB", "NVIDIA 1, 24 GiB"]
    cases = {
        "GPU-1": ["NVIDIA GPU-1"],
        "GPU": ["NVIDIA GPU-0"],  # CUDA takes as much of a UUID as it needs
        " 1, 0": ["NVIDIA 1", "NVIDIA 0"],
        "1,9": ["NVIDIA 1"],
        "1,-1,0": ["NVIDIA 1"],
        "": [],
    }
    for visible, names in cases.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu.name for gpu in devices.gpus()] == names
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(devices, "pynvml", fake_nvml(0))
    assert devices.find_devices("auto")[0] == "cpu" and devices.gpus() == []
    monkeypatch.setattr(devices, "pynvml", fake_nvml(2))
    monkeypatch.setattr(devices, "torch_cuda", lambda: None)  # a CPU build
    assert devices.find_devices("auto")[0] == "cpu"


@pytest.mark.parametrize(("code", "said"), [(0, ""), (712, "not page-locked (CUDA error 712)")])
def test_a_refusal_to_pin_is_said_and_leaves_no_error_behind(
    code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the driver alone: the runtime, which keeps an error for the next launch, is not there."""
    memory, asked = torch.zeros(100, dtype=torch.uint8), []

    def register(address: Any, size: Any, flags: int) -> int:
        asked.append((address.value, size.value))
        return code

    driver = SimpleNamespace(cuMemHostRegister_v2=register)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(devices.ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    devices.pin(memory)
    printed = capsys.readouterr().out
    assert asked == [(memory.data_ptr(), 100)] and said in printed and bool(said) == bool(printed)


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA torch has one that works")
def test_a_broken_torchvision_does_not_stop_us(tmp_path: Path) -> None:
    """As pip leaves it beside a CPU torch: it is there, and importing it raises."""
    for name in ("torchvision", "torchaudio"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('no operator nms')\n")
        metadata = tmp_path / f"{name}-0.28.0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.28.0\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    code = "import minirl.train.policy; from transformers import Qwen3ForCausalLM"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
