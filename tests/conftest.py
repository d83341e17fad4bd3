"""What several test files share: the tiny random models, made once a session."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no fault: no property has a deadline.
allowed = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("minirl", deadline=None, suppress_health_check=allowed)
settings.load_profile("minirl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the long tests first, so that two workers end at about the same time."""
    items.sort(key=lambda item: 0 if item.get_closest_marker("vllm") else 1)


def pytest_collection_finish() -> None:
    """One thread for torch: the models are tiny, and more threads only wait for each other."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)


def model_fixture(name: str, **options: Any) -> Any:
    @pytest.fixture(scope="session")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        import tiny_models  # not at the top: tests that need no model load no torch

        return tiny_models.write(tmp_path_factory.mktemp(name), **options)

    return folder


tied_folder = model_fixture("qwen3-tied", tied=True)
untied_folder = model_fixture("qwen3-untied", tied=False)
llama_folder = model_fixture("llama", tied=False, kind="LlamaConfig")
# One key-value head for two ranks, a padded vocabulary, biases.
BIASED = {"attention_bias": True, "num_key_value_heads": 1, "vocab_size": 390}
biased_folder = model_fixture("biased", tied=False, kind="LlamaConfig", **BIASED)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def one_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rank whose slices are whole, in this process: all of FSDP2 but the others."""
    import torch.distributed as dist

    from minirl.train import optimizer

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(optimizer, "is_fully_sharded", lambda s: s.config.train.shard == "full")
    join = f"file://{tmp_path / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=join, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def data(tied_folder: Path) -> Any:  # ranks.Data
    from ranks import make_data

    return make_data(tied_folder)
