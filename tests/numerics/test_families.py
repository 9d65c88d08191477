"""The own families against transformers, on peaked models: log-probabilities, entropies, every gradient, bits on disk.

Every reference is transformers on one document at a time; the own model gets all of them in one packed row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prl.testing.numerics import assert_parity, assert_same_bits
from prl_models.batch import PackedBatch
from prl_models.blocks.head import logprobs_and_entropy
from prl_models.options import ModelOptions
from prl_models.provider import load_model

CPU = torch.device("cpu")
VOCAB = 61
LENGTHS = (9, 5, 60, 40, 2)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "qwen3-yarn-tied-window": {
        "head_dim": 16,
        "rope_parameters": YARN,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "llama-llama3-tied-biases": {
        "rope_parameters": LLAMA3,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama-linear": {"rope_parameters": LINEAR, "num_key_value_heads": 4, "pad_token_id": None},
    "mistral": {"sliding_window": 4, "head_dim": 16},
    "ministral": {
        "head_dim": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
}


def tiny(name: str, folder: Path) -> Path:
    """A model of two layers in the Hugging Face format, its weights sharpened and its biases and norms uneven."""
    import transformers as t

    kind = name.split("-")[0]
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = t.AutoConfig.for_model(kind, **{**common, **CONFIGS[name]})
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0 if "layers" in key else 25.0)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Row:
    """Documents and a weight for every log-probability and entropy, so that every gradient matters."""

    documents: list[np.ndarray]
    weight: Tensor

    @property
    def bounds(self) -> np.ndarray:
        return np.cumsum([0, *map(len, self.documents)]).astype(np.int32)

    def batch(self, share: bool = False) -> PackedBatch:
        ids = np.concatenate(self.documents).astype(np.int32)
        targets = np.setdiff1d(np.arange(len(ids)), self.bounds[:-1])
        return PackedBatch.build(ids, self.bounds, targets, np.ones(len(targets), np.float32), CPU, share=share)


def row(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Row:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCAB, 4)  # with padding tokens, whose embedding has no gradient
    documents = [np.concatenate([prompt, rng.integers(0, VOCAB, 64)])[:length] for length in lengths]
    count = sum(lengths) - len(lengths)
    return Row(documents, torch.tensor(rng.normal(size=(2, count)), dtype=torch.float32))


def transformers_model(folder: Path, dtype: torch.dtype, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)


def alone(model: Any, document: np.ndarray) -> Tensor:
    """[2, N]: transformers' log-probabilities and entropies of one document."""
    tokens = torch.from_numpy(document)
    log_p = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return torch.stack([log_p.gather(1, tokens[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])


def packed(model: Any, documents: list[np.ndarray]) -> Tensor:
    found: Tensor = model(Row(documents, torch.empty(0)).batch())[0]
    return found


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=[name for name in CONFIGS if name != "ministral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(request.param, tmp_path_factory.mktemp("model"))


def test_values_and_every_gradient_are_those_of_transformers(folder: Path) -> None:
    made = row()
    plain = transformers_model(folder, torch.float32, "eager")
    expected = torch.cat([alone(plain, document) for document in made.documents], 1)
    assert expected[0].min() < -7 and expected[1].min() < 2, "the model is too flat for a test of agreement"
    (expected * made.weight).sum().backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    model: Any = load_model(str(folder), "custom", ModelOptions())
    for share in (False, True):
        batch = made.batch(share)
        assert (batch.packing.num_tokens < sum(LENGTHS)) == share
        model.zero_grad()
        found = torch.stack(model(batch))
        (found * made.weight).sum().backward()
        assert_parity(expected, found, 1e-5, "log-probabilities and entropies")
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert gradients.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert_parity(gradient, gradients[name], 5e-6, name)


def test_logits_are_those_of_transformers(folder: Path) -> None:
    made = row()
    model: Any = load_model(str(folder), "custom", ModelOptions())
    plain = transformers_model(folder, torch.float32, "eager")
    with torch.no_grad():
        hidden = model.hidden_states(made.batch()).split([len(document) for document in made.documents])
        for document, states in zip(made.documents, hidden, strict=True):
            logits = plain(input_ids=torch.from_numpy(document)[None], use_cache=False).logits[0]
            assert_parity(logits, states @ plain.get_output_embeddings().weight.t(), 1e-5, "logits")


def test_bfloat16_has_the_bits_of_transformers(folder: Path) -> None:
    """One document of more than 48 tokens: those are computed by the attention that transformers uses on a CPU."""
    made = row((60,))
    plain = transformers_model(folder, torch.bfloat16, "sdpa")
    model: Any = load_model(str(folder), "custom", ModelOptions(dtype=torch.bfloat16))
    batch = made.batch()
    with torch.no_grad():
        tokens = torch.from_numpy(made.documents[0])
        hidden = plain.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        assert torch.equal(model.hidden_states(batch), hidden)
        weight = plain.get_output_embeddings().weight
        expected = logprobs_and_entropy(hidden[:-1], weight, batch.labels, batch.temperatures)
        found = model(batch)
    assert found[0].dtype == torch.float32
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_gradients_in_bfloat16_are_float32_and_near(folder: Path) -> None:
    made = row()
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        model: Any = load_model(str(folder), "custom", ModelOptions(dtype=dtype))
        (torch.stack(model(made.batch())) * made.weight).sum().backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.cosine_similarity(*gradients, dim=0) > 0.95


def test_a_document_does_not_change_with_its_neighbours(folder: Path) -> None:
    model: Any = load_model(str(folder), "custom", ModelOptions())
    made = row()
    with torch.no_grad():
        before = packed(model, made.documents).split([length - 1 for length in LENGTHS])
        changed = [*made.documents]
        changed[2] = (changed[2] + 7) % VOCAB
        after = packed(model, changed).split([length - 1 for length in LENGTHS])
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(old, new) == (index != 2), f"document {index}"


def test_what_is_written_is_what_was_read(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from prl_models.hf import export_hf

    model: Any = load_model(str(folder), "custom", ModelOptions())
    assert_same_bits(load_file(folder / "model.safetensors"), dict(model.disk_tensors(lambda tensor: tensor)))
    out = export_hf(model.disk_tensors(lambda tensor: tensor), folder, tmp_path / "out")
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (out, folder))
    assert_same_bits(theirs.state_dict(), ours.state_dict())


def test_the_family_that_the_documents_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    from prl import registry
    from prl.contribution import Contribution

    page = Path(__file__).parents[2] / "docs/plugins/model.md"
    (shown,) = re.findall(r"```python\n(# ministral.py\n.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "ministral.py").write_text(shown)
    monkeypatch.syspath_prepend(tmp_path)
    folder = tiny("ministral", tmp_path / "model")
    documents = row().documents
    plain = transformers_model(folder, torch.float32, "eager")
    with registry.override("models", "ministral", Contribution("ministral:build")), torch.no_grad():
        found = packed(load_model(str(folder), "custom", ModelOptions()), documents)
        assert_parity(torch.cat([alone(plain, document)[0] for document in documents]), found, 1e-5)
