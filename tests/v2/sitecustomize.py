"""Python runs this at the start of every process of `make v2`: Triton interprets its kernels, and
has a driver, so that vLLM takes the model runner that it takes on CUDA."""

import os
import sys
from types import SimpleNamespace

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
sys.path.append(os.environ["TRITON_DIR"])

import triton.backends

driver = SimpleNamespace(is_active=lambda: True)
triton.backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)
