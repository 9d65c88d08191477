"""The arithmetic of operations against counts by hand, published sizes and published MFU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from prl.flops import active_parameters, attention_flops, layer_parameters, peak, step_flops

QWEN3_06B: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN3_30B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
}
TINY: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
}


def test_every_term_by_hand() -> None:
    # A layer: q 8x8, k and v 8x4, o 8x8, three of 8x12. head_dim = 8 / 2.
    layer = 64 + 32 + 32 + 64 + 3 * 96
    assert layer_parameters(TINY) == 2 * layer
    assert active_parameters(TINY) == 2 * layer + 80
    attention = 2 * 2 * (5**2 + 3**2) * 2 * 4  # two layers, 2 n^2 h d
    assert attention_flops(TINY, [5, 3]) == attention
    found = step_flops(TINY, [[5, 3]])
    assert found.products == 6 * 8 * (2 * layer + 80)
    assert found.attention == 3.5 * attention
    assert found.published == found.products + 6 * 2 * 8 * 8 * 8  # 8 tokens, each 6 L S h d
    again = found.products + 2 * 8 * 2 * layer
    assert found.hardware("none") == (found.products, found.attention)
    assert found.hardware("selective") == (again, found.attention)
    assert found.hardware("full") == (again, found.attention + attention)


def test_adapters_need_no_gradient_of_the_frozen_weights() -> None:
    found = step_flops(TINY, [[8]], lora_rank=3, lora_targets=("q_proj", "down_proj"))
    adapters = 3 * 2 * ((8 + 8) + (12 + 8))
    assert found.products == 8 * (4 * active_parameters(TINY) + 6 * adapters)


def test_a_window_bounds_the_pairs() -> None:
    windowed = {**TINY, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
    pairs = 10 * 10 / 2 + (10 * 4 - 4 * 4 / 2)
    assert attention_flops(windowed, [10]) == 4 * 2 * 4 * pairs
    assert attention_flops({**windowed, "use_sliding_window": False}, [10]) == attention_flops(TINY, [10])


def test_published_sizes() -> None:
    """Qwen3-0.6B has 0.44 billion parameters beside its embedding; Qwen3-30B-A3B activates about 3 billion."""
    assert layer_parameters(QWEN3_06B) == 440_401_920
    assert active_parameters(QWEN3_30B) == pytest.approx(3.04e9, rel=0.005)


@pytest.mark.parametrize(("tokens", "rate", "mfu"), [(16384, 36766, 0.170), (65536, 24412, 0.292)])
def test_published_mfu_is_reproduced(tokens: int, rate: float, mfu: float) -> None:
    """prime-rl's figures for Qwen3-30B-A3B on eight H200s, counted as it counts them."""
    flops = step_flops(QWEN3_30B, [[tokens]]).published
    assert flops / tokens * rate / (8 * 989.5e12) == pytest.approx(mfu, rel=0.035)


def test_only_mixture_layers_have_experts() -> None:
    mixture = {
        **TINY,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 5,
        "n_shared_experts": 1,
    }
    routed = 64 + 32 + 32 + 64 + 8 * 6 + 3 * 8 * (2 * 5 + 5)
    assert layer_parameters(mixture) == 2 * routed
    dense = 64 + 32 + 32 + 64 + 3 * 96
    assert layer_parameters({**mixture, "first_k_dense_replace": 1}) == dense + routed


def test_peaks_are_found_by_name() -> None:
    assert peak("NVIDIA H200") == 989.5e12
    assert peak("NVIDIA H100 PCIe") == 756.5e12
    assert peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak("Intel(R) Xeon(R)") is None


def test_it_imports_no_torch() -> None:
    code = "import sys, prl.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
