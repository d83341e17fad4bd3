"""`minirl doctor --gpu`: what is measured, what is expected of it, and what the plan makes of it.
What measures runs here on the CPU."""

import json
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from minirl import devices
from minirl.config import Config
from minirl.devices import Gpu
from minirl.recipe import load
from minirl.tools import doctor, measure, plan

H100 = Gpu("NVIDIA H100 80GB HBM3", int(79.6 * 2**30))
RECIPE = Path(__file__).parents[1] / "recipes/gsm8k.toml"
GOOD = {
    **{"attention error": 0.006, "memory": 79.1, "matmul": 650.0, "device copy": 2900.0},
    **{"host copy": 50.0, "training": 20_000.0, "training memory": 66.5, "all-reduce": 300.0},
    **{"reload": 0.2, "reload error": 0.0, "canary gap": 0.04, "logprob gap": 0.03},
    "decoding": 30_000.0,
}


GOOD_ORDER = [
    *("attention error", "memory", "matmul", "device copy", "host copy", "all-reduce", "reload"),
    *("reload error", "canary gap", "logprob gap", "decoding", "training", "training memory"),
]


@pytest.mark.vllm
def test_every_measurement_runs_in_a_child_and_becomes_the_plans_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    findings = measure.examine("cpu", None, ["train.max_tokens=512", "devices.train=2"])
    found = {found.name: found for found in findings}
    assert [*found] == [name for name in GOOD_ORDER if name != "training memory"]
    exact = ("attention error", "reload error", "canary gap", "logprob gap")
    assert all(found[name].ok for name in exact) and "expected 0 to 0.03" in findings[0].detail
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["measured"].keys() == found.keys() and written["gpu"].startswith("CPU")
    own = plan.gpu_for("", None)
    assert own.memory_gib == written["measured"]["memory"]
    config = load(None, ["train.max_tokens=512", "devices.train=2"]).config
    planned = plan.Plan(config, own, plan.usual_lengths(config)).train_tokens_per_s
    assert planned == pytest.approx(written["measured"]["training"])


def test_a_measurement_that_fails_or_hangs_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "DEADLINE_S", 0.01)
    findings = measure.examine("cpu", None, [])
    assert [found.name for found in findings] == [*measure.MEASURES]
    assert all(found.detail.endswith("no answer in 0.01 s") for found in findings)
    assert plan.gpu_for("", None).train_speed == 1.0
    monkeypatch.setattr(devices, "gpus", lambda: [])
    assert [found.detail for found in measure.examine("cuda", None, [])] == ["there is none here"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("attention error", 0.05), ("memory", 39.0), ("matmul", 300.0), ("device copy", 900.0)),
        *(("host copy", 6.0), ("training", 3_000.0), ("training memory", 72.0)),
        *(("all-reduce", 20.0), ("reload", 9.0), ("reload error", 1e-7), ("canary gap", 0.3)),
        *(("logprob gap", 0.2), ("decoding", 900.0)),
    ],
)
def test_each_figure_is_held_to_the_plan(name: str, value: float) -> None:
    config = load(RECIPE).config
    findings, own = measure.judge(config, H100, GOOD)
    assert all(found.ok for found in findings) and len(findings) == len(GOOD)
    assert (own.host_gb_s, own.bf16_tflops) == (50.0, plan.GPUS["H100"].bf16_tflops)
    findings, _ = measure.judge(config, H100, {**GOOD, name: value})
    assert [found.name for found in findings if not found.ok] == [name]


def test_a_gpu_that_is_not_in_the_table_is_planned_with_what_it_reached() -> None:
    _, own = measure.judge(Config(), Gpu("NVIDIA X1", 2**30), GOOD)
    assert own.bf16_tflops == 650.0 / plan.MATMUL and own.bandwidth_gb_s == 2900.0


@pytest.mark.parametrize(
    ("version", "capability", "cuda", "is_ok", "remedy"),
    [
        ("580.65.06", (9, 0), "13.0", True, ""),
        ("570.86.15", (9, 0), "13.0", False, "update the NVIDIA driver"),
        ("570.86.15", (8, 0), "12.9", True, ""),
        ("580.65.06", (7, 5), "13.0", False, "a GPU of the kind of A100, 3090 or newer"),
    ],
)
def test_drivers_and_compute_capabilities_are_named(
    version: str,
    capability: tuple[int, int],
    cuda: str,
    is_ok: bool,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCudaComputeCapability=lambda gpu: ((9, 0), capability)[gpu],
        nvmlSystemGetDriverVersion=lambda: version,
    )
    monkeypatch.setattr(devices, "pynvml", nvml)
    monkeypatch.setattr(doctor, "torch_cuda", lambda: cuda)
    (found,) = doctor._driver()
    assert found.ok == is_ok and f"{version}, compute capability" in found.detail
    assert is_ok or found.remedy == remedy
    monkeypatch.setattr(doctor, "torch_cuda", lambda: None)
    assert doctor._driver() == []
