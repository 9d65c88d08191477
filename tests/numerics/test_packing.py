"""Attention over packed documents against each document alone; shared prefixes; a real model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from prl.testing.numerics import assert_parity, sharpen
from prl_models.batch import PackedBatch
from prl_models.blocks.attention import packed_attention
from prl_models.blocks.packing import Packing, shared_prefixes
from prl_models.options import ModelOptions

CPU = torch.device("cpu")


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lengths", [[3, 1, 7, 7, 2], [1], [60, 5, 90, 33, 1, 47], [13] * 4])
def test_documents_do_not_see_one_another(lengths: list[int], window: int | None, kv_heads: int) -> None:
    torch.manual_seed(0)
    total, bounds = sum(lengths), np.cumsum([0, *lengths]).astype(np.int32)
    q = torch.randn(total, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(total, kv_heads, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(total, 4, 8, dtype=torch.float64)
    parts = []
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        length = int(last - first)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        seen = (distance >= 0) & (distance < (window or length))
        heads = (x[first:last].transpose(0, 1).repeat_interleave(4 // x.shape[1], 0) for x in (q, k, v))
        parts.append(F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=0.3).transpose(0, 1))
    expected = torch.cat(parts)
    found = packed_attention(q, k, v, Packing(bounds, CPU), 0.3, window)
    assert_parity(expected, found, 1e-10, "output")
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    got = torch.autograd.grad((found * weight).sum(), (q, k, v))
    for name, reference, value in zip("qkv", wanted, got, strict=True):
        assert_parity(reference, value, 1e-10, name)


def test_shared_prefixes_number_what_follows_the_same() -> None:
    tokens = np.array([1, 2, 3, 1, 2, 4, 2, 2, 1, 2, 3, 5], np.int32)
    found = shared_prefixes(tokens, np.array([0, 3, 6, 8, 12], np.int32))
    assert found is not None
    assert found[0] == found[3] == found[8] and found[1] == found[4] == found[9] and found[2] == found[10]
    assert len(set(found.tolist())) == found.max() + 1 == 7
    assert found[6] != found[7] and found[1] != found[7], "the same token after another prefix is another"


def test_nothing_shared_is_not_worth_a_map() -> None:
    assert shared_prefixes(np.arange(40, dtype=np.int32), np.array([0, 13, 40], np.int32)) is None


@pytest.mark.parametrize("bounds", [[0], [1, 3], [0, 3, 3], [0, 4, 2]])
def test_bounds_that_are_none_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="bounds must ascend"):
        Packing(np.array(bounds, np.int32), CPU)


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral", "qwen3_moe", "deepseek_v3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models with sharpened weights; mistral with a window of four tokens, deepseek_v3 with
    values narrower than keys."""
    import transformers as t

    common = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 6}
    groups = {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
    }
    deepseek = {**common, **latent, **groups, "num_key_value_heads": 4, "num_experts_per_tok": 2}
    config = {
        "deepseek_v3": lambda: t.DeepseekV3Config(**deepseek),
        "llama": lambda: t.LlamaConfig(**common, tie_word_embeddings=True),
        "qwen3": lambda: t.Qwen3Config(**common),
        "mistral": lambda: t.MistralConfig(**common, sliding_window=4),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(**common, **moe),
    }[request.param]()
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config)
    sharpen(model, 5.0)
    out = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(out)
    return out


@pytest.mark.parametrize("share", [False, True])
def test_a_packed_model_equals_transformers_on_each_document(folder: Path, share: bool) -> None:
    from transformers import AutoModelForCausalLM

    from prl_models.hf import HfProvider

    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 61, 6)
    documents = [np.concatenate([prompt, rng.integers(3, 5, n)]) for n in (3, 5, 3, 40, 1)]
    bounds = np.cumsum([0, *map(len, documents)]).astype(np.int32)
    ids = np.concatenate(documents).astype(np.int32)
    targets = np.setdiff1d(np.arange(len(ids)), bounds[:-1])
    weight = torch.tensor(rng.normal(size=(2, len(targets))), dtype=torch.float32)

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    values = []
    for document in documents:
        tokens = torch.tensor(document)
        log_p = plain(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        values.append(torch.stack([log_p.gather(1, tokens[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]))
    expected = torch.cat(values, 1)
    (expected * weight).sum().backward()

    model = HfProvider().load(str(folder), ModelOptions())
    batch = PackedBatch.build(ids, bounds, targets, np.ones(len(targets), np.float32), CPU, share=share)
    assert (batch.packing.num_tokens < len(ids)) == share
    found = torch.stack(model(batch))
    (found * weight).sum().backward()
    assert (expected - found).abs().max() < 1e-4
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.hf.named_parameters():
        assert_parity(wanted[name], parameter.grad, 2e-5, name)


def test_weights_have_the_names_and_bits_of_the_folder(folder: Path) -> None:
    """Also where transformers fuses experts in memory: on disk every expert has its own matrices."""
    from safetensors.torch import load_file

    from prl.testing.numerics import assert_same_bits
    from prl_models.hf import HfProvider

    model = HfProvider().load(str(folder), ModelOptions())
    assert_same_bits(load_file(folder / "model.safetensors"), dict(model.disk_tensors(lambda tensor: tensor)))


def test_a_head_that_is_more_than_a_product_is_refused(tmp_path: Path) -> None:
    import transformers as t

    from prl.errors import EnvironmentNotFit
    from prl_models.hf import HfProvider

    keys = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = t.GraniteConfig(vocab_size=61, logits_scaling=8.0, num_key_value_heads=4, **keys)
    t.GraniteForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(EnvironmentNotFit, match="head is more than a matrix"):
        HfProvider().load(str(tmp_path), ModelOptions())
