"""Ranks that share rows against one process: attention in float64, models in float32. One launch of four ranks computes
everything (`context_ranks.py`), and the tests look at what it found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from prl.errors import ConfigError
from prl.testing.numerics import sharpen
from prl_models.blocks.context import check_heads
from prl_models.blocks.packing import Packing
from prl_models.blocks.ring import ring_plan, zigzag

from ..unit.trainer.helpers import run_ranks

MODELS = ("llama", "qwen3", "qwen3_moe", "glm4_moe", "minimax_m2")


def save_models(folder: Path) -> None:
    """Sharpened: on near-uniform distributions nothing could fail. `llama` has one key head; glm4_moe, qwen3_moe and
    minimax_m2 come through the provider `hf`."""
    import transformers as t

    common = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    dense = {**common, "intermediate_size": 48, "num_key_value_heads": 2}
    experts = {**dense, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    glm = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    configs = {
        "llama": lambda: t.LlamaConfig(**{**dense, "num_key_value_heads": 1}, tie_word_embeddings=True),
        "qwen3": lambda: t.Qwen3Config(**dense),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(**experts, num_experts=4),
        "glm4_moe": lambda: t.Glm4MoeConfig(**experts, **glm, use_qk_norm=True, attention_bias=True),
        "minimax_m2": lambda: t.MiniMaxM2Config(**dense, num_local_experts=4, num_experts_per_tok=2),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        model = t.AutoModelForCausalLM.from_config(config())
        sharpen(model, 5.0)
        model.save_pretrained(folder / name)


def errors_of(folder: Path, ranks: int, device: str) -> dict[str, float]:
    """The largest error of any rank."""
    run_ranks(Path(__file__).with_name("context_ranks.py"), ranks, str(folder), device)
    worst: dict[str, float] = {}
    for rank in range(ranks):
        for check, error in json.loads((folder / f"errors-{rank}.json").read_text()).items():
            worst[check] = max(error, worst.get(check, 0.0))
    return worst


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("context")
    save_models(folder)
    return errors_of(folder, 4, "cpu")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("style", ["ulysses", "ring"])
def test_attention_of_a_shared_row_equals_that_of_one_process(errors: dict[str, float], style: str, ranks: int) -> None:
    """Float64; also where a recomputed block takes the attention that was kept, and exchanges no more than it must."""
    found = {check: error for check, error in errors.items() if check.startswith(f"{style} of {ranks}: ")}
    assert len(found) >= 18
    assert max(found.values()) < 1e-10, found
    assert errors[f"bfloat16 {style} of {ranks}"] < 2e-2  # of values rounded to 4e-3


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("style", ["ulysses", "ring"])
def test_a_model_on_shared_rows_equals_one_process(errors: dict[str, float], style: str, model: str) -> None:
    """Float32; documents straddle the cuts; also with every target on one of the ranks."""
    found = {check: error for check, error in errors.items() if check.startswith(f"{style} {model}: ")}
    assert len(found) == 4
    for check, error in found.items():
        assert error < (5e-6 if check.endswith("gradients") else 1e-5), check


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_attention_of_a_row_that_gpus_share(tmp_path: Path) -> None:
    """Through NCCL, bfloat16, by the kernel that is chosen there."""
    found = errors_of(tmp_path, 2, "cuda")
    assert len(found) == 6
    assert max(found.values()) < 2e-2, found


@pytest.mark.parametrize("heads, kv_heads, cp", [(32, 4, 2), (32, 4, 8), (48, 8, 6), (4, 1, 4), (40, 8, 1), (14, 2, 7)])
def test_heads_that_ranks_can_divide(heads: int, kv_heads: int, cp: int) -> None:
    check_heads(heads, kv_heads, cp, "ulysses")


def test_heads_that_they_cannot_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"cp is 3.* divide the 14 attention heads.*2 key/value.*cp = 2, 7, 14, "):
        check_heads(14, 2, 3, "ulysses")
    check_heads(14, 2, 3, "ring")
    with pytest.raises(ConfigError, match=r'"ring", which cannot compute the sliding window of 4096 tokens.*"ulysses"'):
        check_heads(32, 8, 2, "ring", window=4096)
    check_heads(32, 8, 2, "ulysses", window=4096)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_sees_every_pair_of_a_document_once(size: int) -> None:
    """Over random rows: what the plans of all ranks compute is exactly the causal part of every document, and no rank
    has much more of it than another where one document fills the row."""
    rng = np.random.default_rng(size)
    for _ in range(40):
        tokens = 2 * size * int(rng.integers(1, 6))
        cuts = np.sort(rng.choice(np.arange(1, tokens), int(rng.integers(0, min(6, tokens - 1))), replace=False))
        bounds = np.concatenate([[0], cuts, [tokens]]).astype(np.int32)
        document = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        wanted = np.tril(document[:, None] == document[None, :]).astype(int)
        seen, work = np.zeros_like(wanted), []
        plans = [ring_plan(Packing(bounds, torch.device("cpu")), size, rank) for rank in range(size)]
        for rank, plan in enumerate(plans):
            mine = zigzag(tokens, size, rank)
            for queries, keys in plan.local.pairs:
                assert queries == keys
                seen[np.ix_(mine[queries], mine[keys])] += np.tril(np.ones((len(mine[queries]),) * 2, int))
            for step, part in enumerate(plan.steps, 1):
                owner = (rank - step) % size
                if part is not None:
                    theirs = zigzag(tokens, size, owner)
                    sent = np.concatenate([theirs[tail] for tail in plans[owner].tails])
                    assert len(sent) == plan.lengths[owner]
                    seen[np.ix_(mine[part.queries], sent[part.keys])] += 1
            work.append(seen[mine].sum())
        np.testing.assert_array_equal(seen, wanted)
        if len(bounds) == 2:
            assert max(work) == min(work)


def test_short_documents_send_little_around_a_ring() -> None:
    packing = Packing(np.arange(0, 641, 10).astype(np.int32), torch.device("cpu"))
    assert max(ring_plan(packing, 4, 0).lengths) == 0, "cuts are at bounds of documents"
    packing = Packing(np.array([0, *range(5, 636, 10), 640], np.int32), torch.device("cpu"))
    assert ring_plan(packing, 4, 0).lengths == (5, 10, 10, 5), "half a document at every cut but the row's and a rank's"
