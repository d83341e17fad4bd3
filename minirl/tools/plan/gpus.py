"""The table of GPUs: what their makers' data sheets say. Dense rates, no sparsity."""

import difflib
from dataclasses import dataclass

from minirl.errors import RecipeError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float  # as the driver reports it
    bf16_tflops: float
    fp32_tflops: float
    bandwidth_gb_s: float
    link_gb_s: float  # to the other GPUs of the box, one way

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB

    def flops(self, dtype: str) -> float:
        return 1e12 * (self.bf16_tflops if dtype == "bfloat16" else self.fp32_tflops)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 79.6, 989, 67, 3350, 450),
        Gpu("H800", 79.6, 989, 67, 3350, 200),
        Gpu("A100-80", 79.3, 312, 19.5, 2039, 300),
        Gpu("A100-40", 39.4, 312, 19.5, 1555, 300),
        Gpu("L40S", 44.9, 362, 91.6, 864, 25),
        Gpu("4090", 24.0, 165, 82.6, 1008, 25),
        Gpu("3090", 24.0, 71, 35.6, 936, 25),
    )
}


def gpu_named(name: str) -> Gpu:
    """By its name in the table, in any case."""
    for key, gpu in GPUS.items():
        if key.lower() == name.lower():
            return gpu
    near = difflib.get_close_matches(name.upper(), GPUS, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"one of {', '.join(GPUS)}"
    raise RecipeError("--gpu", name, "is not in the table", remedy)


def recognise(device_name: str, memory_bytes: float) -> Gpu | None:
    """From what a driver calls it, such as "NVIDIA A100-SXM4-40GB"."""
    for gpu in GPUS.values():
        family = gpu.name.partition("-")[0]
        is_near = abs(gpu.memory_bytes - memory_bytes) < 0.15 * gpu.memory_bytes
        if family in device_name.replace("RTX ", "") and is_near:
            return gpu
    return None
