"""A model that is made in a second, and projects to run it in."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import Project, Run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer, 20,000 parameters, and a byte-level tokenizer. Its random weights are large, so that its
    distributions are peaked: on nearly uniform ones no disagreement would be seen."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Project:
    return Project(tmp_path / "project", tiny_model)


@pytest.fixture(scope="session")
def synchronous(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Run:
    """A whole run with max_staleness = 0, to which others are compared. Do not change it."""
    return Project(tmp_path_factory.mktemp("synchronous"), tiny_model).run().complete()


def make_tiny_model(folder: Path) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|pad|>", "<|end|>", "<|answer|>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", model_max_length=64
    )
    fast.chat_template = (
        "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}{{- m['content'] + '<|end|>' -}}"
        "{%- else -%}{{- m['content'] + '<|answer|>' -}}{%- endif -%}{%- endfor -%}"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.5,
        pad_token_id=fast.pad_token_id,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder
