"""On a GPU: variable-length kernels against float32 on the CPU, and whole training steps in bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from prl.testing.numerics import assert_parity, relative_error
from prl_models.batch import PackedBatch
from prl_models.blocks.attention import packed_attention
from prl_models.blocks.packing import Packing
from prl_models.options import ModelOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
LENGTHS = [300, 1, 40, 513, 77, 1024, 5]


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_on_the_gpu(dtype: torch.dtype, window: int | None) -> None:
    torch.manual_seed(0)
    bounds = np.cumsum([0, *LENGTHS]).astype(np.int32)
    total = int(bounds[-1])
    shapes = ((total, 8, 64), (total, 2, 64), (total, 2, 64))
    host = [torch.randn(shape).to(dtype).float().requires_grad_() for shape in shapes]
    gpu = [x.detach().to("cuda", dtype).requires_grad_() for x in host]
    weight = torch.randn(total, 8, 64)
    expected = packed_attention(*host, Packing(bounds, torch.device("cpu")), 0.125, window)
    found = packed_attention(*gpu, Packing(bounds, torch.device("cuda")), 0.125, window)
    limit = 0.02 if dtype == torch.bfloat16 else 1e-5
    assert_parity(expected, found.cpu(), limit, "output")
    wanted = torch.autograd.grad((expected * weight).sum(), host)
    got = torch.autograd.grad((found.float() * weight.cuda()).sum(), gpu)
    for name, reference, value in zip("qkv", wanted, got, strict=True):
        assert_parity(reference, value.float().cpu(), limit, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers as t

    config = t.Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    out = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(out)
    return out


def test_a_model_in_float32_equals_the_cpu(folder: Path) -> None:
    from prl_models.hf import HfProvider

    rng = np.random.default_rng(0)
    bounds = np.cumsum([0, 50, 7, 200]).astype(np.int32)
    ids = rng.integers(0, 512, bounds[-1]).astype(np.int32)
    targets = np.setdiff1d(np.arange(len(ids)), bounds[:-1])
    ones = np.ones(len(targets), np.float32)
    found = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        model = HfProvider().load(str(folder), ModelOptions(device=device))
        logprobs, entropy = model(PackedBatch.build(ids, bounds, targets, ones, device))
        (logprobs.mean() + entropy.mean()).backward()
        gradients = [parameter.grad.cpu() for parameter in model.parameters()]
        found.append((torch.stack([logprobs, entropy]).detach().cpu(), gradients))
    assert relative_error(found[0][0], found[1][0]) < 1e-4
    for reference, value in zip(found[0][1], found[1][1], strict=True):
        assert_parity(reference, value, 1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_publish_and_checkpoint(folder: Path, tmp_path: Path, dtype: str) -> None:
    import torch.distributed as dist

    from prl.config.schema import RunConfig
    from prl.rows import PackedRow
    from prl_trainer_fsdp.trainer import Trainer

    own = {"use": "fsdp", "device": "cuda", "lr": 1e-3}
    model = {"path": str(folder), "dtype": dtype}
    config = RunConfig.model_validate({"model": model, "envs": [{"use": "none"}], "trainer": own})
    rng = np.random.default_rng(0)
    total = 600
    ones, zeros = np.ones(total, np.float32), np.zeros(total, np.float32)
    weights = ones.copy()
    weights[[0, 200]] = 0
    row = PackedRow(
        token_ids=rng.integers(0, 512, total).astype(np.int32),
        position_ids=np.concatenate([np.arange(200), np.arange(400)]).astype(np.int32),
        cu_seqlens=np.array([0, 200, 600], np.int32),
        sampled=np.zeros(total, np.bool_),
        logprobs=zeros,
        versions=np.full(total, -1, np.int32),
        temperatures=ones,
        advantages=zeros,
        rl=zeros,
        ce=weights,
        ref_kl=zeros,
    )
    try:
        trainer = Trainer(config, tmp_path / "run")
        losses = [trainer.learner.step([row], {"ce": 598.0}, 0)["train/loss"] for _ in range(20)]
        assert losses[-1] < 0.5 * losses[0], losses
        assert trainer.publish(0).num_bytes > 0
        trainer.checkpoint(0, tmp_path / "saved")
        again = Trainer(config, tmp_path / "again")
        again.load_checkpoint(tmp_path / "saved")
        first, second = (t.learner.step([row], {"ce": 598.0}, 0)["train/loss"] for t in (trainer, again))
        assert second == pytest.approx(first, rel=1e-5)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
