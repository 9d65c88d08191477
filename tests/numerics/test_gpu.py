"""On a GPU: every kernel against float32, and whole training steps in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prl.errors import EnvironmentNotFit
from prl.testing.numerics import assert_parity, relative_error, sharpen
from prl_models.batch import PackedBatch
from prl_models.blocks import head
from prl_models.blocks.attention import Padded, packed_attention
from prl_models.blocks.cache import selective
from prl_models.blocks.context import attend
from prl_models.blocks.kernel import AttentionKernel, Spans
from prl_models.blocks.ops import Ops
from prl_models.blocks.packing import Packing
from prl_models.blocks.torch_ops import TorchOps
from prl_models.kernels import choose, choose_attention
from prl_models.options import Kernels, ModelOptions
from prl_models.provider import load_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
LENGTHS = [300, 1, 40, 513, 77, 1024, 5]


KERNELS = ("flash4", "flash2", "cudnn", "flex", "varlen")
CUDA = torch.device("cuda")


def skip_or_raise(error: EnvironmentNotFit) -> NoReturn:
    """A library that is not there is no fault; one that is there without the private entry we call is ours."""
    cause = error.__cause__
    if isinstance(cause, ImportError) and not isinstance(cause, ModuleNotFoundError):
        raise error
    pytest.skip(str(error))


def kernel_or_skip(name: str, head_dim: int, window: int | None = None) -> AttentionKernel:
    try:
        return choose_attention(name, CUDA, torch.bfloat16, head_dim, windows=window is not None)[0]  # type: ignore[arg-type]
    except EnvironmentNotFit as error:
        skip_or_raise(error)


def stretches(queries: list[int], keys: list[int]) -> tuple[Spans, Spans]:
    """On the host and on the GPU."""
    bounds = [torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32) for lengths in (queries, keys)]
    longest = max(queries), max(keys)
    on_gpu = [x.cuda() for x in bounds] if queries != keys else [bounds[0].cuda()] * 2
    return Spans(bounds[0], bounds[1], *longest), Spans(on_gpu[0], on_gpu[1], *longest)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("shape", "queries", "keys", "causal", "window"),
    [
        ((16, 8, 128), LENGTHS, LENGTHS, True, None),
        ((8, 2, 64), LENGTHS, LENGTHS, True, None),
        ((4, 4, 128), LENGTHS, LENGTHS, True, None),
        ((16, 8, 128), LENGTHS, LENGTHS, True, 64),
        ((16, 8, 128), [13] * 300, [13] * 300, True, None),
        ((16, 8, 128), [300, 64], [700, 640], False, None),
        ((16, 8, 128), [640], [333], False, None),
        ((16, 8, 128), [300, 64], [700, 640], True, None),
    ],
    ids=["causal", "eight-of-64", "equal-heads", "window", "many", "rectangles", "one", "aligned-at-the-end"],
)
def test_attention_kernels(
    name: str, shape: tuple[int, int, int], queries: list[int], keys: list[int], causal: bool, window: int | None
) -> None:
    """Forward with its logsumexp, and backward with both of more keys than these, as in a ring."""
    heads, kv_heads, dim = shape  # few of them: kernels are compiled for each
    kernel = kernel_or_skip(name, dim, window)
    torch.manual_seed(0)
    on_host, on_gpu = stretches(queries, keys)
    shapes = ((sum(queries), heads), (sum(keys), kv_heads), (sum(keys), kv_heads))
    gpu = [torch.randn(*shape, dim, device=CUDA, dtype=torch.bfloat16) for shape in shapes]
    host = [x.float().cpu() for x in gpu]
    arguments = (dim**-0.5, causal, window)
    expected, total = Padded().forward(host[0], host[1], host[2], on_host, *arguments)
    found, lse = kernel.forward(gpu[0], gpu[1], gpu[2], on_gpu, *arguments)
    assert_parity(expected, found.float().cpu(), 4e-3, "output")
    assert lse.shape == total.shape and lse.dtype == torch.float32
    assert_parity(total, lse.cpu(), 1e-4, "logsumexp")

    grad = torch.randn(found.shape, device=CUDA, dtype=torch.bfloat16)
    for beyond in (0.0, 0.7):  # the logsumexp and the output of all keys, where there are others
        whole = (0.5 * found if beyond else found).contiguous()
        wanted = Padded().backward(
            grad.float().cpu(), host[0], host[1], host[2], whole.float().cpu(), total + beyond, on_host, *arguments
        )
        got = kernel.backward(grad, gpu[0], gpu[1], gpu[2], whole, lse + beyond, on_gpu, *arguments)
        for what, reference, value in zip("qkv", wanted, got, strict=True):
            assert value.dtype == torch.bfloat16
            assert_parity(reference, value.float().cpu(), 1e-2, f"gradient of {what}, {beyond}")


@pytest.mark.parametrize("name", KERNELS)
def test_attention_of_parts_of_one_product(name: str) -> None:
    """Queries, keys and values as views, a gradient that is not contiguous, and recomputation that keeps the result."""
    kernel = kernel_or_skip(name, 64)
    torch.manual_seed(0)
    bounds = np.cumsum([0, *LENGTHS]).astype(np.int32)
    packing = Packing(bounds, CUDA)
    qkv = torch.randn(int(bounds[-1]), 8 * 64, device=CUDA, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(4 * 64, int(bounds[-1]), device=CUDA, dtype=torch.bfloat16)

    def block(qkv: Tensor) -> Tensor:
        q, k, v = (2 * qkv).unflatten(-1, (-1, 64)).split((4, 2, 2), 1)
        return attend(q, k, v, packing, 0.125, None, kernel).flatten(1)

    (plain,) = torch.autograd.grad((block(qkv) * weight.t()).sum(), qkv)
    out = checkpoint(block, qkv, use_reentrant=False, context_fn=selective)
    (kept,) = torch.autograd.grad((out * weight.t()).sum(), qkv)
    assert_parity(plain, kept, 4e-3, "with recomputation")

    host = (2 * qkv.detach()).float().cpu().unflatten(-1, (-1, 64)).requires_grad_()
    q, k, v = host.split((4, 2, 2), 1)
    out = packed_attention(q, k, v, Packing(bounds, torch.device("cpu")), 0.125, None).flatten(1)
    (expected,) = torch.autograd.grad((out * weight.t().float().cpu()).sum(), host)
    assert_parity(2 * expected.flatten(1), plain.float().cpu(), 1e-2, "gradient")


def test_padded_attention_in_float32() -> None:
    torch.manual_seed(0)
    bounds = np.cumsum([0, *LENGTHS]).astype(np.int32)
    host = [torch.randn(int(bounds[-1]), heads, 64).requires_grad_() for heads in (8, 2, 2)]
    gpu = [x.detach().cuda().requires_grad_() for x in host]
    for window in (None, 64):
        expected = packed_attention(*host, Packing(bounds, torch.device("cpu")), 0.125, window)
        found = packed_attention(*gpu, Packing(bounds, CUDA), 0.125, window)
        weight = torch.randn_like(expected)
        assert_parity(expected, found.cpu(), 1e-5, "output")
        wanted = torch.autograd.grad((expected * weight).sum(), host)
        got = torch.autograd.grad((found * weight.cuda()).sum(), gpu)
        for name, reference, value in zip("qkv", wanted, got, strict=True):
            assert_parity(reference, value.cpu(), 1e-5, name)


@pytest.mark.parametrize("name", ["triton", "liger", "quack"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operations(name: str, dtype: torch.dtype) -> None:
    """Against torch's on the same GPU; bfloat16 against torch's in float32, since both round."""
    try:
        ops = choose(Kernels(operations=name), CUDA, dtype, 64).ops  # type: ignore[arg-type]
    except EnvironmentNotFit as error:
        skip_or_raise(error)
    torch.manual_seed(0)
    tokens, hidden, heads, kv_heads, dim, half = 333, 640, 6, 2, 64, 16
    shapes = {"x": (tokens, hidden), "residual": (tokens, hidden), "qkv": (tokens, (heads + 2 * kv_heads) * dim)}
    values = {key: torch.randn(*shape, device=CUDA).to(dtype) for key, shape in shapes.items()}
    values["gate_up"] = torch.randn(tokens, 2 * 400, device=CUDA).to(dtype)
    weights = {key: torch.rand(size, device=CUDA) + 0.5 for key, size in (("hidden", hidden), ("q", dim), ("k", dim))}
    angles = torch.randn(tokens, half, device=CUDA)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def run(ops: Ops, kind: torch.dtype) -> dict[str, Tensor]:
        v = {key: value.to(kind).requires_grad_() for key, value in values.items()}
        w = {key: value.clone().requires_grad_() for key, value in weights.items()}
        outputs = [ops.rms_norm(v["x"], w["hidden"], 1e-6)]
        outputs += ops.add_rms_norm(v["x"], v["residual"], w["hidden"], 1e-6)
        outputs += ops.qkv_norm_rope(v["qkv"], heads, kv_heads, w["q"], w["k"], 1e-6, cos.to(kind), sin.to(kind))
        outputs.append(ops.swiglu(v["gate_up"]))
        assert all(x.dtype == kind for x in outputs)
        torch.manual_seed(1)
        total = sum((x.float() * torch.randn(x.shape, device=CUDA)).sum() for x in outputs)
        gradients = torch.autograd.grad(total, [*v.values(), *w.values()])
        named = {f"output {i}": x for i, x in enumerate(outputs)}
        return named | {f"gradient of {key}": x for key, x in zip([*v, *w], gradients, strict=True)}

    expected, found = run(TorchOps(), torch.float32), run(ops, dtype)
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for key, reference in expected.items():
        assert_parity(reference, found[key].float(), limit, key)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_head(dtype: torch.dtype, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values in float32 from the model's logits; gradients within its rounding. A vocabulary of no round size."""
    torch.manual_seed(0)
    tokens, hidden_size, vocabulary = 700, 128, 10007
    if not kept:
        monkeypatch.setattr(head, "KEPT_BYTES", 0)
        monkeypatch.setattr(head, "CUDA_BYTES", 256 * vocabulary * dtype.itemsize)
    hidden = torch.randn(tokens, hidden_size, device=CUDA).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden_size, device=CUDA).mul_(0.2).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=CUDA)
    temperatures = torch.rand(tokens, device=CUDA) + 0.5
    a, b = torch.randn(tokens, device=CUDA), torch.randn(tokens, device=CUDA)
    z = (hidden @ weight.to(dtype).t()).double() / temperatures[:, None]
    log_p = z.log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    found = head.logprobs_and_entropy(hidden, weight, targets, temperatures)
    for what, reference, value in zip(("logprobs", "entropy"), expected, found, strict=True):
        assert value.dtype == torch.float32
        assert_parity(reference, value, 2e-5, what)
    wanted = torch.autograd.grad((a * expected[0] + b * expected[1]).sum(), (hidden, weight))
    got = torch.autograd.grad((a * found[0] + b * found[1]).sum(), (hidden, weight))
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for what, reference, value in zip(("hidden", "weight"), wanted, got, strict=True):
        assert value.dtype == (dtype if what == "hidden" else torch.float32)
        assert_parity(reference, value.float(), limit, what)


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
    sharpen(model, 3.0)
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


@pytest.mark.parametrize("operations", ["triton", "torch"])
def test_a_family_in_bfloat16_is_close_to_float32(folder: Path, operations: str) -> None:
    """With the kernels that are chosen here, against float32 on the CPU."""
    rng = np.random.default_rng(0)
    bounds = np.cumsum([0, 50, 7, 200]).astype(np.int32)
    ids = rng.integers(0, 512, bounds[-1]).astype(np.int32)
    targets = np.setdiff1d(np.arange(len(ids)), bounds[:-1])
    ones = np.ones(len(targets), np.float32)
    found = []
    for device, dtype in ((torch.device("cpu"), torch.float32), (CUDA, torch.bfloat16)):
        kernels = Kernels(operations=operations) if device == CUDA else Kernels()  # type: ignore[arg-type]
        model = load_model(str(folder), "custom", ModelOptions(device=device, dtype=dtype, kernels=kernels))
        if device == CUDA:
            assert model.kernels.attention != "padded" and model.kernels.operations == operations
        logprobs, entropy = model(PackedBatch.build(ids, bounds, targets, ones, device))
        (logprobs.mean() + 0.1 * entropy.mean()).backward()
        gradients = {name: parameter.grad.float().cpu() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
        found.append((logprobs.detach().cpu(), entropy.detach().cpu(), gradients))
    assert (found[0][0] - found[1][0]).abs().mean() < 0.05
    assert (found[0][1] - found[1][1]).abs().mean() < 0.05
    for name, reference in found[0][2].items():
        assert_parity(reference, found[1][2][name], 0.1, name)


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
        trainer.snapshot(0)
        trainer.checkpoint(0, tmp_path / "saved")
        again = Trainer(config, tmp_path / "again")
        again.load_checkpoint(tmp_path / "saved")
        first, second = (t.learner.step([row], {"ce": 598.0}, 0)["train/loss"] for t in (trainer, again))
        assert second == pytest.approx(first, rel=1e-5)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
