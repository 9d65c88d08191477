"""A tiny model with peaked distributions, batches of documents in groups, and a trainer over them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from prl.config.schema import RunConfig
from prl.messages import TrainBatch, TrainSample, TrainUpdate
from prl.packing import pack
from prl.rows import denominators
from prl.testing.numerics import sharpen
from prl.types import Credit, SampleBody, SampleHeader
from prl_trainer_fsdp.parallel.runtime import Runtime
from prl_trainer_fsdp.trainer import Trainer

VOCAB = 61
CPU = Runtime(0, 1, torch.device("cpu"))
PEAK = 6.0


def save_model(folder: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """A Llama with grouped heads in the Hugging Face format."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=tied,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )
    sharpen(model, PEAK)
    model.save_pretrained(folder)
    return folder


def run_config(model: Path, *, impl: str = "auto", dtype: str = "float32", seed: int = 0, **trainer: Any) -> RunConfig:
    own = {"use": "fsdp", "threads": 1, "device": "cpu", "lr": 1e-2, "row_tokens": 64, **trainer}
    table = {"path": str(model), "impl": impl, "dtype": dtype}
    return RunConfig.model_validate({"model": table, "envs": [{"use": "none"}], "trainer": own, "seed": seed})


def sample(
    rng: np.random.Generator, prompt: np.ndarray, answer: int, version: int, advantage: float, surprise: float = 1.0
) -> TrainSample:
    tokens = np.concatenate([prompt, rng.integers(3, VOCAB, answer)]).astype("<i4")
    length, first = len(tokens), len(prompt)
    sampled = np.arange(length) >= first
    logprobs = np.where(sampled, -rng.exponential(surprise, length), 0.0).astype("<f4")
    versions = np.where(sampled, version, -1).astype("<i4")
    header = SampleHeader(length, ((first, answer),), version, version, 0.8)
    credit = Credit(advantages=((length, advantage),), rl=((length, 1.0),))
    body = SampleBody(tokens.tobytes(), sampled.tobytes(), logprobs.tobytes(), versions.tobytes())
    return TrainSample(header, credit, msgspec.msgpack.encode(body))


def samples(seed: int, version: int = 0, groups: int = 3, size: int = 4, surprise: float = 1.0) -> list[TrainSample]:
    """Groups that share a prompt, answers of uneven length, advantages of both signs. At a `surprise` of 4 the sampler
    finds about as many tokens more probable than the model as less."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(groups):
        prompt = rng.integers(3, VOCAB, int(rng.integers(1, 6)))
        made += [
            sample(rng, prompt, int(rng.integers(1, 14)), version, float(rng.normal()), surprise) for _ in range(size)
        ]
    return made


def batches(made: list[TrainSample], step: int, ranks: int = 1, row_tokens: int = 64) -> list[TrainBatch]:
    """One batch per rank, packed as the controller packs."""
    dealt = pack([s.header.num_tokens for s in made], row_tokens, ranks)
    whole = denominators((s.header, s.credit) for s in made)
    updates = [TrainUpdate([[made[index] for index in row] for row in rows], whole) for rows in dealt]
    return [TrainBatch("test", 0, step, step - 1, [update]) for update in updates]


def trained(config: RunConfig, at: Path, steps: int = 2) -> Trainer:
    """By one process."""
    trainer = Trainer(config, at, CPU)
    for step in range(1, steps + 1):
        trainer.train(batches(samples(step, step - 1), step)[0])
    return trainer


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.learner.parameters()}


def run_ranks(script: Path, ranks: int, *arguments: str) -> str:
    """Run a script as so many ranks; its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = ["-m", "prl_trainer_fsdp.ranks", str(ranks), str(script), *arguments]
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout
