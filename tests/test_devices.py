"""Which process runs where: on CPU by cores, on CUDA by GPUs, or both pools on the same; GPUs are
found without torch."""

import json
import os
import subprocess
import sys
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil
import pynvml
import pytest
import torch
from cases import cases

from minirl import devices, recipe
from minirl.config import BufferConfig, Config, DevicesConfig, RolloutConfig
from minirl.devices import Gpu, place
from minirl.errors import RecipeError
from minirl.recipe import load
from minirl.tools import doctor, measure, plan


def test_on_cpu_every_process_has_cores_of_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_cores, (rollout, train) in product((1, 2, 3, 7, 64), ((1, 1), (2, 1), (1, 3), (8, 8))):
        cores = set(range(10, 10 + num_cores))
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: cores)
        config = Config(devices=DevicesConfig(kind="cpu", rollout=rollout, train=train))
        engines, trainers = place(config, "cpu", num_cores)
        assert (len(engines), len(trainers)) == (rollout, train)
        for placement in engines + trainers:
            assert placement.torch_device == "cpu" and placement.process_group_backend == "gloo"
            assert placement.cores and set(placement.cores) <= cores
            own = {"OMP_NUM_THREADS": str(len(placement.cores)), "CUDA_VISIBLE_DEVICES": ""}
            assert placement.env.items() >= own.items()
        pools = [[core for own in pool for core in own.cores] for pool in (engines, trainers)]
        assert num_cores == 1 or set(pools[0]).isdisjoint(pools[1])
        for taken, count in zip(pools, (rollout, train), strict=True):
            # Where there are enough for all no core is shared.
            assert len(set(taken)) < count or len(taken) == len(set(taken))
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
        assert engines[0].env.items() >= own.items()
        assert not [name for name in trainers[0].env if name.startswith(("VLLM", "TORCH"))]
    config = Config(devices=DevicesConfig(kind="cpu", rollout=2, tensor_parallel=2, train=3))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(10, 14)))
    (engine,), none = place(config, "cpu", 4, ranks=False)
    assert engine.cores == (10, 11, 12, 13) and none == []
    own = {"VLLM_CPU_OMP_THREADS_BIND": "10,11|12,13", "OMP_NUM_THREADS": "2"}
    assert engine.env.items() >= own.items()
    none, ranks = place(config, "cpu", 4, engines=False)
    assert [rank.cores for rank in ranks] == [(10,), (11,), (12,)] and none == []


def test_on_cuda_every_process_sees_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,GPU-a1,7,0,2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    config = Config(devices=DevicesConfig(rollout=4, train=2, tensor_parallel=2))
    engines, trainers = place(config, "cuda", 6)
    gpus = [placement.env["CUDA_VISIBLE_DEVICES"] for placement in engines + trainers]
    assert gpus == ["3,5", "GPU-a1,7", "0", "2"]
    for placement in engines + trainers:
        assert placement.torch_device == "cuda:0"  # the first of those it sees
        assert placement.process_group_backend == "nccl"
        assert "TORCH_COMPILE_DISABLE" not in placement.env
        assert placement.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"  # as NVML counts
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TRITON_F32_DEFAULT": "ieee"}
    assert engines[0].env.items() >= own.items()
    roots = [Path(engine.env["VLLM_CACHE_ROOT"]).name for engine in engines]
    assert roots == ["engine-0", "engine-1"]
    assert {own.env["OMP_NUM_THREADS"] for own in engines + trainers} == {"5"}  # 32 cores, 6 GPUs
    assert trainers[0].env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in engines[0].env
    arguments = devices.engine_arguments(config, "cuda")
    assert arguments["max_cudagraph_capture_size"] > config.rollout.max_num_seqs
    assert arguments["async_scheduling"] and arguments["max_num_batched_tokens"] == 8192
    assert arguments["moe_backend"] == "triton", "others lay experts out anew"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")  # the user's own
    own = {"VLLM_LOGGING_LEVEL": "DEBUG", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # measure's, too
    assert devices.vllm_environment("cuda").items() >= own.items()
    _, ranks = place(config, "cuda", 6, engines=False)
    assert [rank.env["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["0", "1"]


# Engine and trainer on the same GPU or cores -----------------------------------------------------

SHARED = DevicesConfig(share=True)
IN_TURNS = Config(devices=SHARED, buffer=BufferConfig(max_staleness=0))
AT_ONCE = Config(devices=SHARED, rollout=RolloutConfig(kv_cache_gib=3.0))


def test_both_have_all_cores_or_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6})
    for own in chain(*place(AT_ONCE, "cpu", 3)):
        assert own.cores == (4, 5, 6) and own.env["OMP_NUM_THREADS"] == "3"
        assert own.env["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,2")
    both = chain(*place(AT_ONCE, "cuda", 2))
    assert [own.env["CUDA_VISIBLE_DEVICES"] for own in both] == ["7", "7"]
    # By itself only the only GPU is shared.
    for kind, available, is_shared in (("cuda", 1, True), ("cuda", 2, False), ("cpu", 1, False)):
        assert recipe.check_devices(Config(), kind, available).devices.share == is_shared


def test_each_stays_within_its_bill(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = devices.engine_arguments(AT_ONCE, "cuda")
    assert arguments["kv_cache_memory_bytes"] == 3 * 2**30
    assert arguments["gpu_memory_utilization"] == 0.01 and not arguments["enable_sleep_mode"]
    assert devices.engine_arguments(IN_TURNS, "cuda")["enable_sleep_mode"]
    assert devices.engine_arguments(Config(), "cuda")["kv_cache_memory_bytes"] is None
    gpu, limits = SimpleNamespace(total_memory=24 * 2**30), list[float]()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    for config in (AT_ONCE, IN_TURNS):
        devices.leave_room_for_engine(config, weights_bytes=6 * 2**30)
    assert limits == [12 / 24, 21 / 24]


# What there is, and its limits --------------------------------------------------------------------


def fake_nvml(num_gpus: int) -> SimpleNamespace:
    """A driver with some GPUs; without one where there are none."""

    def handle(gpu: int | str) -> str:
        if not 0 <= int(str(gpu).removeprefix("GPU-")) < num_gpus:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return str(gpu)

    return SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        NVMLError_NotSupported=pynvml.NVMLError_NotSupported,
        nvmlInit=lambda: handle(0),
        nvmlDeviceGetCount=lambda: num_gpus,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetCudaComputeCapability=lambda gpu: (9, 0),
        nvmlDeviceGetName=lambda gpu: f"NVIDIA {gpu}",
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=24 * 2**30),
    )


def refuse(gpu: str) -> NoReturn:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_gpus_are_found_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.torch_cuda() == torch.version.cuda
    monkeypatch.setattr(devices, "pynvml", fake_nvml(2))
    monkeypatch.setattr(devices, "torch_cuda", lambda: "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.find_devices("auto") == ("cuda", 2)
    assert devices.find_devices("cpu") == ("cpu", devices.num_cores())
    assert devices.describe("cuda")["gpus"] == ["NVIDIA 0, 24 GiB", "NVIDIA 1, 24 GiB"]
    nvml = fake_nvml(1)
    nvml.nvmlDeviceGetMemoryInfo = refuse  # a GB10, whose memory is the machine's
    with monkeypatch.context() as patch:
        patch.setattr(devices, "pynvml", nvml)
        assert [gpu.memory_bytes for gpu in devices.gpus()] == [psutil.virtual_memory().total]
    cases = {"GPU-1": ["GPU-1"], " 1, 0": ["1", "0"], "1,9": ["1"], "1,-1,0": ["1"], "": []}
    for visible, names in cases.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu.name for gpu in devices.gpus()] == [f"NVIDIA {name}" for name in names]
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
    assert devices.pin(memory) == (code == 0)
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


# `minirl doctor --gpu`: what is measured, and what the plan makes of it ---------------------------

H100 = Gpu("NVIDIA H100 80GB HBM3", int(79.6 * 2**30), (9, 0))
RECIPE = Path(__file__).parents[1] / "recipes/gsm8k.toml"
GOOD = {case["name"]: case["good"] for case in cases("figures")}


@pytest.mark.slow
def test_measured_figures_are_the_plans(here: Path) -> None:
    findings = measure.examine("cpu", None, ["train.max_tokens=512", "devices.train=2"])
    found = {found.name: found for found in findings}
    assert [*found] == [*GOOD][:-1], "memory is CUDA's"
    exact = ("attention error", "reload error", "canary gap", "logprob gap")
    assert all(found[name].ok for name in exact) and "expected 0 to 0.03" in findings[0].detail
    written, own = json.loads((here / "gpu.json").read_text()), plan.gpu_for("")
    assert written["measured"].keys() == found.keys() and written["gpu"].startswith("CPU")
    assert own.memory_gib == written["measured"]["memory"]
    config = load(None, ["train.max_tokens=512", "devices.train=2"]).config
    costs = plan.Plan(config, own, plan.usual_lengths(config)).costs  # of both ranks
    assert 1 / costs.train_per_token == pytest.approx(2 * written["measured"]["training"])


def test_a_measurement_may_fail_or_hang(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "DEADLINE_S", 0.01)
    findings = measure.examine("cpu", None, [])
    assert [found.name for found in findings] == [each.__name__ for each in measure.MEASURES]
    assert all(found.detail.endswith("no answer in 0.01 s") for found in findings)
    assert plan.gpu_for("").train_speed == 1.0
    monkeypatch.setattr(devices, "gpus", lambda: [])
    assert [found.detail for found in measure.examine("cuda", None, [])] == ["there is none here"]


def test_each_figure_is_held_to_the_plan() -> None:
    config = load(RECIPE).config
    findings, own = measure.judge(config, H100, GOOD)
    assert all(found.ok for found in findings) and len(findings) == len(GOOD)
    assert (own.host_gb_s, own.bf16_tflops) == (50.0, plan.GPUS["H100"].bf16_tflops)
    for name, _, bad in (case.values() for case in cases("figures")):
        findings, _ = measure.judge(config, H100, {**GOOD, name: bad})
        assert [found.name for found in findings if not found.ok] == [name]
    # Not in the table: its link, too, is as it was measured.
    findings, own = measure.judge(Config(), H100._replace(name="NVIDIA X1"), GOOD)
    assert own.bf16_tflops == 650.0 / plan.MATMUL and own.bandwidth_gb_s == 2900.0
    assert own.link_gb_s == 300.0 and next(f for f in findings if f.name == "all-reduce").ok


def test_drivers_and_compute_capabilities_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = fake_nvml(2)
    monkeypatch.setattr(devices, "pynvml", nvml)
    for case in cases("drivers"):
        version, capability, cuda, remedy = case.values()
        nvml.nvmlDeviceGetCudaComputeCapability = {"0": (9, 0), "1": tuple(capability)}.get
        nvml.nvmlSystemGetDriverVersion = lambda version=version: version
        for module in (devices, doctor):
            monkeypatch.setattr(module, "torch_cuda", lambda cuda=cuda: cuda)
        found = doctor._devices(num_seen=2)
        assert found.ok == (not remedy) and f"driver {version}" in found.detail
        if remedy:  # of `minirl train` too
            assert found.remedy == remedy
            with pytest.raises(RecipeError, match=rf"devices.kind = .*; {remedy}$"):
                recipe.check_devices(Config(), "cuda", 2)
    assert not doctor._devices(num_seen=1).ok
    assert "no peer access" in doctor._devices(2, are_near=False).detail
    monkeypatch.setattr(doctor, "torch_cuda", lambda: None)
    assert doctor._devices(num_seen=0).detail.endswith("no CUDA device")
