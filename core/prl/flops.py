"""Floating-point operations of a training step, by arithmetic on a Hugging Face configuration.

With P parameters in the matrix products that one token passes through (the head's too, tied or not; an embedding is
looked up, not multiplied; of a mixture's experts those that a token is sent to), T tokens, and for each of the layers h
heads of d dimensions:

    matrix products   2 P T forward, 4 P T backward: 6 P T
                      with LoRA 2 + 2 for the frozen weights, whose gradients nobody needs, and 6 for the adapters
    attention         q k^T and p v are 2 d operations each for every head and every pair (query, key it sees):
                      a document of n tokens has n^2 / 2 pairs, so 2 n^2 h d forward; 2.5 times that backward, where
                      five products replace two, because the scores are made again
    model FLOPs       their sum: what the step needs
    hardware FLOPs    and what recomputation adds: the layers' forward pass once more, "selective" without attention

MFU (Chowdhery et al. 2022, arXiv 2204.02311, appendix B) is model FLOPs / (seconds * peak of the devices): computing
again earns nothing, and neither does attention across documents. Published figures often count every row as one
document of its whole length S and no more than 6 layers S h d a token for attention (forward 2, backward 4):
`published` is that convention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Recompute = Literal["none", "selective", "full"]
Config = Mapping[str, Any]

PEAKS = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("GH200", 989.5e12),
    ("H200", 989.5e12),
    ("H100 PCIe", 756.5e12),
    ("H100", 989.5e12),
    ("H800", 989.5e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("MI300X", 1307.4e12),
)
"""Dense bfloat16 operations per second from the vendors' data sheets, by a part of the device's name; the first match
counts."""


def peak(device_name: str) -> float | None:
    """bfloat16 operations per second of a device; None for one that is not in the table, such as a CPU."""
    return next((value for name, value in PEAKS if name.lower() in device_name.lower()), None)


@dataclass(frozen=True)
class StepFlops:
    """Operations of one step over all its documents. `forward_*` of the repeated layers alone, for recomputation."""

    products: float
    attention: float
    published: float
    forward_products: float
    forward_attention: float

    @property
    def model(self) -> float:
        return self.products + self.attention

    def hardware(self, recompute: Recompute) -> tuple[float, float]:
        """Products and attention, with what is computed again in the backward pass."""
        products = self.products + (0.0 if recompute == "none" else self.forward_products)
        attention = self.attention + (self.forward_attention if recompute == "full" else 0.0)
        return products, attention


def step_flops(
    config: Config,
    rows: Sequence[Sequence[int]],
    *,
    lora_rank: int = 0,
    lora_targets: Sequence[str] = (),
) -> StepFlops:
    """Forward and backward of rows of documents.

    Args:
        config: a Hugging Face config.json, as a dictionary.
        rows: for every row the lengths of its documents.
        lora_rank: 0 trains every weight.
    """
    parameters = active_parameters(config)
    tokens = float(sum(sum(row) for row in rows))
    adapters = lora_rank * adapter_width(config, lora_targets) if lora_rank else 0
    backward = 2.0 if lora_rank else 4.0
    products = tokens * ((2.0 + backward) * parameters + 6.0 * adapters)
    forward_attention = sum(attention_flops(config, row) for row in rows)
    wide = int(config["num_hidden_layers"]) * attention_width(config)
    whole_rows = sum(6.0 * wide * float(sum(row)) ** 2 for row in rows)
    return StepFlops(
        products=products,
        attention=3.5 * forward_attention,
        published=products + whole_rows,
        forward_products=2.0 * tokens * (layer_parameters(config) + adapters),
        forward_attention=forward_attention,
    )


def attention_flops(config: Config, documents: Sequence[int]) -> float:
    """Forward, causal, each document by itself: 4 d h operations a pair, n^2 / 2 pairs, or n w - w^2 / 2 in a layer
    whose window is w < n."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types") or ["sliding_attention" if window else "full_attention"] * int(
        config["num_hidden_layers"]
    )
    pairs = 0.0
    for kind in kinds:
        reach = int(window) if kind == "sliding_attention" and window else None
        pairs += sum(n * n / 2.0 if reach is None or n <= reach else n * reach - reach**2 / 2.0 for n in documents)
    return 4.0 * attention_width(config) * pairs


def active_parameters(config: Config) -> int:
    """Parameters in the matrix products of one token, the head's too."""
    return layer_parameters(config) + int(config["vocab_size"]) * int(config["hidden_size"])


def layer_parameters(config: Config) -> int:
    """Of all layers, without norms and biases, which are no matrix products; of experts those that a token meets."""
    layers = int(config["num_hidden_layers"])
    return sum(_attention_parameters(config) + _mlp_parameters(config, index) for index in range(layers))


def attention_width(config: Config) -> int:
    """h d: of all heads of a layer together."""
    return _heads(config) * _head_dim(config)


def adapter_width(config: Config, targets: Sequence[str]) -> int:
    """Sum over all adapted matrices of rows plus columns: an adapter of rank r has r times as many parameters."""
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    q, kv = attention_width(config), _kv_heads(config) * _head_dim(config)
    sizes = {
        "q_proj": hidden + q,
        "k_proj": hidden + kv,
        "v_proj": hidden + kv,
        "o_proj": q + hidden,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": inner + hidden,
    }
    return int(config["num_hidden_layers"]) * sum(sizes[target] for target in targets if target in sizes)


def _attention_parameters(config: Config) -> int:
    hidden, size = int(config["hidden_size"]), _head_dim(config)
    return hidden * size * (2 * _heads(config) + 2 * _kv_heads(config))


def _mlp_parameters(config: Config, index: int) -> int:
    """gate, up and down of a dense layer; of a mixture the router, the experts chosen and the shared ones."""
    hidden = int(config["hidden_size"])
    experts = int(config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts") or 0)
    if not experts or not _is_mixture(config, index):
        return 3 * hidden * int(config["intermediate_size"])
    inner = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    shared += int(config.get("n_shared_experts") or 0) * inner
    chosen = int(config["num_experts_per_tok"])
    return hidden * experts + 3 * hidden * (chosen * inner + shared)


def _is_mixture(config: Config, index: int) -> bool:
    if index in (config.get("mlp_only_layers") or ()) or index < int(config.get("first_k_dense_replace") or 0):
        return False
    return (index + 1) % int(config.get("decoder_sparse_step") or 1) == 0


def _heads(config: Config) -> int:
    return int(config["num_attention_heads"])


def _kv_heads(config: Config) -> int:
    return int(config.get("num_key_value_heads") or _heads(config))


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or int(config["hidden_size"]) // _heads(config))
