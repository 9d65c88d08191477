"""Which scheduler a configuration gets, and with how many slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prl.config.schema import RunConfig
from prl.errors import EnvironmentNotFit, UsageError
from prl_engine_embedded import build
from prl_engine_embedded.config import EmbeddedConfig
from prl_engine_embedded.continuous import ContinuousScheduler
from prl_engine_embedded.fixed import FixedScheduler

OWN = {"device": "cpu", "slots": 16, "prefill_rows": 8, "cache_tokens": 1024}


@pytest.fixture
def chosen(kit: Any) -> Any:
    def choose(path: Path, max_staleness: int = 4, **own: Any) -> Any:
        data = {"model": {"path": str(path)}, "envs": [{"use": "x"}], "loop": {"max_staleness": max_staleness}}
        found = build.build_scheduler(RunConfig.model_validate(data), EmbeddedConfig(**{**OWN, **own}))
        return kit.track(found[1])

    return choose


@pytest.fixture
def sliding(tmp_path: Path) -> Path:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4, max_position_embeddings=64,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path / "sliding")
    return tmp_path / "sliding"


def test_auto(chosen: Any, model_folder: Path, sliding: Path) -> None:
    assert isinstance(chosen(model_folder), FixedScheduler)
    assert isinstance(chosen(model_folder, max_staleness=0), FixedScheduler)
    if build.can_pause():
        assert isinstance(chosen(model_folder, batching="continuous"), ContinuousScheduler)
        assert isinstance(chosen(sliding), ContinuousScheduler)


def test_what_cannot_be_served_is_named_with_a_remedy(
    chosen: Any, model_folder: Path, sliding: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in ({"batching": "fixed"}, {"max_staleness": 0}):
        with pytest.raises(UsageError, match=r"Mistral.*continuous"):
            chosen(sliding, **options)
    monkeypatch.setattr(build, "can_pause", lambda: False)
    with pytest.raises(UsageError, match="Mistral"):
        chosen(sliding)
    with pytest.raises(EnvironmentNotFit, match=r"5\.19"):
        chosen(model_folder, batching="continuous")


def test_slots_fit_into_memory(kit: Any) -> None:
    model = kit.load()
    assert build.bytes_per_token(model) == 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head size, float32
    slot = 128 * build.bytes_per_token(model)
    assert [build.fitting_slots(model, 64, free) for free in (1e12, 2 * 40 * slot, 2 * 39 * slot, 0)] == [64, 40, 32, 8]


def test_a_gpu_has_no_continuous_batching() -> None:
    """There its log-probabilities were now and then not the trainer's while weights changed."""
    with pytest.raises(EnvironmentNotFit, match=r'batching = "fixed", or engine.use = "vllm"'):
        build._require_continuous(torch.device("cuda"))
