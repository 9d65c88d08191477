"""A tiny Llama with grouped-query attention and sharp, varied distributions, and ways to drive a scheduler."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from prl.config.schema import ModelTable
from prl.messages import GenerateRequest, Generation
from prl.types import Sampling
from prl_engine_embedded import fixed, model, slots

VOCABULARY = 48
STOP = 7


def make_module(seed: int = 0, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "tie_word_embeddings": True, "initializer_range": 0.3,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


def request(index: int, *, prompt: Sequence[int] | None = None, **changes: Any) -> GenerateRequest:
    """Request `index` of an endless series: its prompt, length and seed depend on nothing else."""
    generator = torch.Generator().manual_seed(index)
    length = int(torch.randint(1, 40, (), generator=generator))
    tokens = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
    seed, stops = changes.pop("seed", 1000 + index), changes.pop("stops", [STOP])
    sampling = Sampling(**{"max_tokens": 12, **changes})
    return GenerateRequest(f"r{index}", list(prompt) if prompt is not None else tokens, sampling, stops, seed, 60.0)


class Runner:
    """A scheduler, and what came out of it by request id."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.results: dict[str, Any] = {}
        self._changed = threading.Condition()
        scheduler.start(self._deliver)

    def _deliver(self, results: list[Any]) -> None:
        with self._changed:
            for result in results:
                assert result.key[1] not in self.results, "answered twice"
                self.results[result.key[1]] = result.generation if result.generation is not None else result.failure
            self._changed.notify_all()

    def add(self, requests: Iterable[GenerateRequest]) -> None:
        self.scheduler.add([((self, item.id), item) for item in requests])

    def wait(self, *ids: str, timeout: float = 30) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: all(name in self.results for name in ids), timeout), "no answer"
            return [self.results[name] for name in ids]

    def run(self, requests: Sequence[GenerateRequest]) -> list[Any]:
        self.add(requests)
        return self.wait(*(item.id for item in requests))


def exact(generation: Generation) -> tuple[Any, ...]:
    return generation.token_ids, [value.hex() for value in generation.logprobs], generation.stop_reason


class Kit:
    STOP, VOCABULARY = STOP, VOCABULARY
    Runner = Runner
    exact = staticmethod(exact)
    make_module = staticmethod(make_module)
    request = staticmethod(request)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: list[Any] = []

    def load(self, folder: Path | None = None, attention: str = slots.ATTENTION) -> model.LoadedModel:
        slots.register()
        if folder is not None:
            return model.load(ModelTable(path=str(folder)), torch.device("cpu"), attention, 0)
        module = make_module().requires_grad_(False)
        module.set_attn_implementation(attention)
        return model.LoadedModel(module, torch.device("cpu"), 128)

    def fixed(self, loaded: model.LoadedModel | None = None, **options: Any) -> Runner:
        runner = Runner(fixed.FixedScheduler(loaded or self.load(), 64, 16, **options))
        self._open.append(runner.scheduler)
        return runner

    def track(self, scheduler: Any) -> Any:
        self._open.append(scheduler)
        return scheduler

    def close(self) -> None:
        for scheduler in self._open:
            scheduler.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_module().save_pretrained(folder)
    return folder


@pytest.fixture
def kit(model_folder: Path) -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kit = Kit(model_folder)
    yield kit
    kit.close()
    torch.set_num_threads(threads)
