"""What the provider `hf` refuses, before a weight is read where the configuration says it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t

from prl.errors import ConfigError, EnvironmentNotFit
from prl_models.batch import PackedBatch
from prl_models.hf import HfProvider
from prl_models.options import ModelOptions

COMMON = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
DENSE = {**COMMON, "intermediate_size": 48, "num_key_value_heads": 2}
SHARED: Any = SimpleNamespace(size=3, style="ulysses")


def refused(config: Any, folder: Path, match: str, context: Any = None) -> None:
    """The folder has a configuration and no weights: reading them would be another error."""
    config.save_pretrained(folder)
    with pytest.raises((EnvironmentNotFit, ConfigError), match=match):
        HfProvider().load(str(folder), ModelOptions(context=context))


def test_a_state_along_the_row(tmp_path: Path) -> None:
    refused(t.MambaConfig(**COMMON, state_size=4), tmp_path, "'mamba' cannot be trained.*leak.*(recurrent|linear)")


def test_layers_of_gated_delta_nets_among_others(tmp_path: Path) -> None:
    config = t.Qwen3NextConfig(**DENSE, head_dim=8)
    refused(config, tmp_path, "'qwen3_next' cannot be trained.*leak.*its layers linear_attention")


def test_an_indexer_of_sparse_attention(tmp_path: Path) -> None:
    config = t.GlmMoeDsaConfig(**DENSE, index_topk=8, bos_token_id=1, eos_token_id=2)
    refused(config, tmp_path, r"'glm_moe_dsa' cannot be trained.*indexer chooses which keys.*index_topk = 8")


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_soft_caps(tmp_path: Path, key: str) -> None:
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None, key: 30.0}
    refused(
        t.Gemma2Config(**DENSE, head_dim=8, **caps), tmp_path, f"'gemma2' cannot be trained.*caps its.*{key} = 30.0"
    )


def test_chunked_attention(tmp_path: Path) -> None:
    config = t.Llama4TextConfig(**DENSE, head_dim=8, num_local_experts=2, intermediate_size_mlp=48)
    refused(config, tmp_path, "cannot be trained.*leak.*chunked_attention")


def test_heads_that_ranks_cannot_divide(tmp_path: Path) -> None:
    refused(t.LlamaConfig(**DENSE), tmp_path, r"cp is 3.* divide the 4 attention heads.*use cp = 2, 4, or", SHARED)


def test_a_window_in_a_ring(tmp_path: Path) -> None:
    context: Any = SimpleNamespace(size=2, style="ring")
    refused(
        t.MistralConfig(**DENSE, sliding_window=7),
        tmp_path,
        r'"ring", which cannot compute.*window of 7 tokens',
        context,
    )


def test_frequencies_that_depend_on_the_longest_position(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    context: Any = SimpleNamespace(size=2, style="ulysses")
    refused(t.LlamaConfig(**DENSE, rope_parameters=rope), tmp_path, "cp = 2: .*'dynamic' rotary", context)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_longest_document(tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 9}
    config = t.LlamaConfig(**DENSE, rope_parameters=rope, max_position_embeddings=9 if kind == "dynamic" else 18)
    t.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = HfProvider().load(str(tmp_path), ModelOptions())
    for length in (9, 10):
        ids, targets = np.arange(length + 3, dtype=np.int32), np.array([1, 4])
        bounds = np.array([0, 3, length + 3], np.int32)
        batch = PackedBatch.build(ids, bounds, targets, np.ones(2, np.float32), torch.device("cpu"))
        if length == 9:
            model(batch)
        else:
            with pytest.raises(EnvironmentNotFit, match="a document has 10 tokens, and beyond 9 transformers chooses"):
                model(batch)


def test_attention_that_is_not_in_the_registry(tmp_path: Path) -> None:
    config = t.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    t.BloomForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(EnvironmentNotFit, match="'bloom' cannot be trained.*transformers' registry"):
        HfProvider().load(str(tmp_path), ModelOptions())


@pytest.mark.parametrize("case", ["float32 12 grouped_mm", "bfloat16 12 eager", "bfloat16 16 grouped_mm"])
def test_experts_are_grouped_where_their_rows_allow_it(tmp_path: Path, case: str) -> None:
    dtype, width, chosen = case.split()
    config = t.Qwen3MoeConfig(
        **DENSE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=int(width)
    )
    t.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    model = HfProvider().load(str(tmp_path), ModelOptions(dtype=getattr(torch, dtype)))
    assert model.hf.get_experts_implementation()[""] == chosen
    assert len(model.blocks) == 2
