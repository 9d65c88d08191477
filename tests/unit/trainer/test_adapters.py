"""Adapters that are published as such: a plain model with what the channel brought computes the trainer's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from prl import adapters
from prl.adapters import PEFT_CONFIG, PEFT_PREFIX, PEFT_WEIGHTS, Adapter, peft_config
from prl.config.schema import RunConfig
from prl.protocols import ReceivedWeights
from prl_trainer_fsdp.trainer import Trainer

from .helpers import CPU, batches, run_config, samples

LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}
ADAPTER = Adapter(4, 8.0, ("q_proj", "v_proj", "down_proj"))
ENGINE = """
from typing import ClassVar
from prl.contribution import PluginConfig

class Engine:
    class Config(PluginConfig):
        takes_adapters: ClassVar[bool] = True

    def __init__(self, config: Config) -> None: ...
"""


def configured(model: Path, at: Path, engine: dict[str, Any] | None = None, **own: Any) -> RunConfig:
    """With an engine that takes adapters, unless another is given."""
    file = at / "engine.py"
    file.write_text(ENGINE)
    config = run_config(model, **{"lora": LORA, **own})
    table = {"use": f"{file}:Engine", **(engine or {})}
    return RunConfig.model_validate({**config.model_dump(), "engine": table})


def received(trainer: Trainer, config: RunConfig) -> ReceivedWeights:
    reference = trainer.publish(trainer.version)
    got: ReceivedWeights = config.channel.build().receiver().receive(reference)
    assert reference.adapter == (got.adapter is not None)
    return got


def test_what_is_published_depends_on_trainer_and_engine(model: Path, tmp_path: Path) -> None:
    assert adapters.published(configured(model, tmp_path)) == ADAPTER
    assert adapters.published(configured(model, tmp_path, {"adapters": "merged"})) is None
    assert adapters.published(configured(model, tmp_path, {"use": "embedded"})) is None
    whole = configured(model, tmp_path, lora=None)
    assert adapters.published(whole) is None and adapters.trained(whole) is None
    assert adapters.trained(configured(model, tmp_path, {"use": "embedded"})) == ADAPTER


@pytest.mark.parametrize("impl", ["auto", "hf"])
def test_an_adapter_beside_the_base_model_reproduces_the_probes(model: Path, tmp_path: Path, impl: str) -> None:
    """At version 0, where B is zero, that is the base model itself; after training it is another."""
    config = configured(model, tmp_path, impl=impl)
    trainer = Trainer(config, tmp_path / "weights", CPU)
    base = scores(model, None, trainer)
    first = received(trainer, config)
    assert first.adapter == ADAPTER
    assert all((tensor == 0).all() for name, tensor in first.tensors.items() if ".lora_B." in name)
    assert wanted(first) == pytest.approx(base, abs=2e-6)
    for step in (1, 2):
        trainer.train(batches(samples(step, step - 1), step)[0])
    got = received(trainer, config)
    assert len(got.tensors) == 2 * 3 * 2
    assert wanted(got) == pytest.approx(scores(model, got, trainer), abs=1e-5)
    assert max(abs(a - b) for a, b in zip(wanted(got), scores(model, None, trainer), strict=True)) > 0.1


def test_adapters_are_a_small_part_of_the_weights_in_the_precision_of_the_forward_pass(
    model: Path, tmp_path: Path
) -> None:
    config = configured(model, tmp_path, dtype="bfloat16")
    trainer = Trainer(config, tmp_path / "a", CPU)
    merged = Trainer(configured(model, tmp_path, {"adapters": "merged"}, dtype="bfloat16"), tmp_path / "b", CPU)
    assert trainer.publish(0).num_bytes < 0.6 * merged.publish(0).num_bytes  # of 32 columns, 4 are not few
    assert {tensor.dtype for tensor in received(trainer, config).tensors.values()} == {torch.bfloat16}


def test_peft_loads_what_was_published(model: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    config = configured(model, tmp_path)
    trainer = Trainer(config, tmp_path / "weights", CPU)
    trainer.train(batches(samples(1, 0), 1)[0])
    got = received(trainer, config)
    folder = tmp_path / "peft"
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in got.tensors.items()}, folder / PEFT_WEIGHTS)
    assert got.adapter is not None
    (folder / PEFT_CONFIG).write_text(json.dumps(peft_config(got.adapter, str(model))))
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder)
    assert wanted(got) == pytest.approx(plain_scores(loaded, [probe.token_ids for probe in got.probes]), abs=1e-5)


def wanted(received: ReceivedWeights) -> list[float]:
    """The trainer's log-probabilities of the probes, first tokens excluded."""
    return [value for probe in received.probes for value in probe.logprobs[1:]]


def scores(model: Path, received: ReceivedWeights | None, trainer: Trainer) -> list[float]:
    """Of the trainer's probes, by transformers' own model with W + alpha / rank B A in the place of every W."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model)
    if received is not None:
        assert received.adapter is not None
        scale = received.adapter.alpha / received.adapter.rank
        for name, down in received.tensors.items():
            if name.endswith(".lora_A.weight"):
                layer = module.get_submodule(name.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight"))
                up = received.tensors[name.replace("lora_A", "lora_B")]
                with torch.no_grad():
                    layer.weight += scale * up @ down
    return plain_scores(module, [probe.token_ids for probe in trainer._probes])


def plain_scores(module: Any, sequences: list[list[int]]) -> list[float]:
    found: list[float] = []
    for tokens in sequences:
        ids = torch.tensor([tokens])
        with torch.no_grad():
            logprobs = module(ids).logits[0, :-1].float().log_softmax(-1)
        found += logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return found
