"""The chunked head against the naive one, in float64, and its memory."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import torch

from prl.testing.numerics import assert_parity
from prl_models.blocks.head import _ChunkedHead, _FusedHead, logprobs_and_entropy

TOKENS, HIDDEN, VOCAB = 37, 16, 53


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
def test_values_and_gradients_of_both_outputs(chunk: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, requires_grad=True)
    targets, temperatures = torch.randint(0, VOCAB, (TOKENS,)), torch.rand(TOKENS, dtype=torch.float64) + 0.5
    a, b = torch.randn(TOKENS, dtype=torch.float64), torch.randn(TOKENS, dtype=torch.float64)

    log_p = (hidden @ weight.t() / temperatures[:, None]).log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    wanted = torch.autograd.grad((a * expected[0] + b * expected[1]).sum(), (hidden, weight))

    found = logprobs_and_entropy(hidden, weight, targets, temperatures, chunk)
    got = torch.autograd.grad((a * found[0] + b * found[1]).sum(), (hidden, weight))
    for name, reference, value in zip(
        ("logprobs", "entropy", "hidden", "weight"), (*expected, *wanted), (*found, *got), strict=True
    ):
        assert_parity(reference, value, 1e-10, name)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_bfloat16_inputs_give_float32_outputs(kind: torch.dtype) -> None:
    """A float32 weight is cast for the product, and its gradient is float32."""
    torch.manual_seed(0)
    hidden = torch.randn(8, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN).to(torch.bfloat16).to(kind).requires_grad_()
    logprobs, entropy = logprobs_and_entropy(hidden, weight, torch.arange(8), torch.ones(8), 3)
    assert logprobs.dtype == entropy.dtype == torch.float32
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == kind


@pytest.mark.parametrize("head", [_ChunkedHead, _FusedHead])
def test_a_rank_without_targets_has_a_gradient_of_zeros(head: type[torch.autograd.Function]) -> None:
    """And not none: where ranks share the weight, the others wait for its part in the sum."""
    if head is _FusedHead:
        pytest.importorskip("triton")
    hidden = torch.randn(3, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    logprobs, entropy = head.apply(hidden.index_select(0, none), weight, none, torch.ones(0), 16)
    (logprobs.sum() + entropy.sum()).backward()
    for tensor in (hidden, weight):
        assert tensor.grad is not None and not tensor.grad.any()


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_alone_has_its_gradient(used: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, requires_grad=True)
    arguments = (hidden, weight, torch.randint(0, VOCAB, (TOKENS,)), torch.ones(TOKENS))
    expected = torch.autograd.grad(
        sum(x.sum() * (i == used) for i, x in enumerate(logprobs_and_entropy(*arguments, 8))), (hidden, weight)
    )
    found = torch.autograd.grad(logprobs_and_entropy(*arguments, 8)[used].sum(), (hidden, weight))
    for name, reference, value in zip(("hidden", "weight"), expected, found, strict=True):
        assert_parity(reference, value, 1e-12, name)


PROGRAM = """
import resource, torch
from prl_models.blocks.head import logprobs_and_entropy
torch.set_num_threads(1)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
hidden = torch.randn(4096, 16, requires_grad=True); weight = torch.randn(8192, 16, requires_grad=True)
logprobs_and_entropy(hidden[:64], weight, torch.zeros(64, dtype=torch.long), torch.ones(64), 64)[0].sum().backward()
before = peak()
logprobs, entropy = logprobs_and_entropy(hidden, weight, torch.zeros(4096, dtype=torch.long), torch.ones(4096), 64)
(logprobs.sum() + entropy.sum()).backward()
print(peak() - before)
"""


def test_no_matrix_of_tokens_by_vocabulary_exists() -> None:
    """4,096 x 8,192 in float32 is 128 MiB; chunks of 64 tokens are 2 MiB each."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    assert float(done.stdout) < 40, f"the peak rose by {done.stdout.strip()} MiB"
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
