"""Sharing prompts in a model of 135 M parameters: as exact as packing, in float32 and float64. The
same of tiny models, in all splits, is in tests/test_policy.py."""

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from test_policy import backbone_of, gap, gradients

from minirl.train.attention import boundaries
from minirl.train.packing import Unit
from minirl.train.policy import hidden_states
from minirl.train.sharing import share

SMOLLM2: dict[str, Any] = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536)
SMOLLM2 |= dict(num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64)


@pytest.mark.slow
def test_with_135m_weights_sharing_is_as_exact_as_packing(tmp_path: Path) -> None:
    """Gradients in float32 are 2.2e-6 off those in float64, both ways. They are 1.7e-6 apart, where
    packed and one sequence at a time are 2.3e-7 apart, which is the same order of sums."""
    folder = tiny_models.write(tmp_path, kind="LlamaConfig", **SMOLLM2, initializer_range=0.02)
    backbone, once = backbone_of(folder), share([Unit([0, 1, 2, 3], 40, [12] * 4)], "cpu")
    tokens_T, found = torch.randint(2, 49152, (4, 52)), []
    tokens_T[:, :40] = tokens_T[0, :40]
    for dtype in (torch.float32, torch.float64):
        given = (backbone.to(dtype), dtype, tokens_T.flatten(), boundaries([52] * 4))
        found.append(gradients(backbone, hidden_states(*given, once)[0][once.unique_T]))
        found.append(gradients(backbone, hidden_states(*given, None)[0]))
    shared, packed, exactly_shared, exact = found
    assert gap(exactly_shared, exact) < 1e-10
    assert gap(shared, exact) < 1.2 * gap(packed, exact) < 1e-5
