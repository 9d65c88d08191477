"""Rules between names in memory and on disk: one answer for both directions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from prl.testing.numerics import assert_same_bits
from prl_models.conversion import Part, from_disk, parts, to_disk


def experts(name: str, shape: torch.Size) -> Sequence[Part] | None:
    """Fused experts in memory, [E, 2 I, H] and [E, H, I]; a matrix of each on disk."""
    found = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
    if found is None:
        return None
    prefix, kind = found.groups()
    if kind == "down_proj":
        return [Part(f"{prefix}.{e}.down_proj.weight", (e,)) for e in range(shape[0])]
    half = shape[1] // 2
    return [
        Part(f"{prefix}.{e}.{side}_proj.weight", (e, rows))
        for e in range(shape[0])
        for side, rows in (("gate", slice(half)), ("up", slice(half, None)))
    ]


def test_without_a_rule_a_tensor_has_one_name() -> None:
    tensor = torch.randn(3, 2)
    assert parts("a.weight", tensor.shape, [experts]) == [(Part("a.weight"), torch.Size([3, 2]))]
    assert_same_bits({"a.weight": tensor}, dict(to_disk("a.weight", tensor, [experts])))
    half = from_disk("a.weight", tensor.shape, [experts], lambda name: tensor.bfloat16())
    assert half.dtype == torch.float32 and torch.equal(half, tensor.bfloat16().float())


def test_a_split_tensor_comes_back_bit_for_bit() -> None:
    fused = torch.randn(3, 8, 5)
    disk = dict(to_disk("m.experts.gate_up_proj", fused, [experts]))
    assert len(disk) == 6 and disk["m.experts.2.up_proj.weight"].shape == (4, 5)
    assert torch.equal(disk["m.experts.1.gate_proj.weight"], fused[1, :4])
    back = from_disk("m.experts.gate_up_proj", fused.shape, [experts], disk.__getitem__)
    assert_same_bits({"": fused}, {"": back})


def test_parts_that_leave_something_out_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'a' on disk do not make up its shape \[2, 3\]"):
        parts("a", torch.Size([2, 3]), [lambda name, shape: [Part("b", (0,))]])


def test_the_rule_of_experts_is_the_one_of_transformers(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    disk = {
        key: tensor.contiguous()
        for name, parameter in model.named_parameters()
        for key, tensor in to_disk(name, parameter.detach(), [experts])
    }
    assert_same_bits(load_file(tmp_path / "model.safetensors"), disk)
