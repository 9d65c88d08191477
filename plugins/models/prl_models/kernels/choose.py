"""Which attention kernel and which operations a model is built with.

"auto" takes the fastest that is installed and fits; a name takes that one or says what it lacks. Measured on one H200
with 16 query and 8 key heads of 128 (forward and backward, TFLOP/s, one document of 16,384 tokens / eight of mixed
lengths): flash4 604 / 451, cudnn 530 / 178, flex 371 / 267 (before `flex.py` computes its forward twice), varlen 303 /
227 (with keys expanded, which it is spared here). "auto" does not take cuDNN: it makes a plan for every length that it
has not seen, and documents of a run have all lengths.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from prl_models.blocks.attention import Padded
from prl_models.blocks.kernel import AttentionKernel
from prl_models.blocks.ops import Ops
from prl_models.options import AttentionName, Kernels, KernelUnfit, OperationsName

log = logging.getLogger(__name__)

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Chosen:
    """`kernels` names them; why it was these is in the log."""

    attention: AttentionKernel
    ops: Ops
    kernels: Kernels


@dataclass(frozen=True)
class _Need:
    device: torch.device
    dtype: torch.dtype
    head_dim: int
    windows: bool

    @property
    def capability(self) -> int:
        """Major compute capability; 0 without an NVIDIA GPU."""
        if self.device.type != "cuda" or torch.version.hip is not None:
            return 0
        return int(torch.cuda.get_device_capability(self.device)[0])


@dataclass(frozen=True)
class _Lacks:
    """What a kernel cannot do, by its oldest compute capability, its largest head and the multiple heads must be."""

    oldest: int
    largest: int
    multiple: int = 8
    windows: bool = True
    blackwell: int | None = None  # the largest head there but `largest` itself, where that is less

    def of(self, need: _Need) -> str | None:
        if need.capability < self.oldest:
            found = f"{need.capability}.x" if need.capability else f"none (the device is {need.device})"
            return f"it needs an NVIDIA GPU of compute capability {self.oldest}.0 or newer, and there is {found}"
        if need.dtype not in HALVES:
            return f"it computes {' and '.join(map(str, HALVES))}, not {need.dtype}"
        if need.head_dim > self.largest or need.head_dim % self.multiple:
            return f"it takes heads of up to {self.largest} in steps of {self.multiple}, not {need.head_dim}"
        if self.blackwell is not None and need.capability >= 10 and self.blackwell < need.head_dim < self.largest:
            return f"on Blackwell it takes heads of up to {self.blackwell} or of {self.largest}, not {need.head_dim}"
        if need.windows and not self.windows:
            return "it has no sliding windows, and this model has"
        return None


@dataclass(frozen=True)
class _Candidate:
    """One kernel: how it is made (ImportError: not installed), what it cannot do, what installs it, what it is."""

    make: Callable[[], AttentionKernel]
    lacks: _Lacks
    install: str
    label: str


def choose(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, head_dim: int, *, windows: bool = False
) -> Chosen:
    """Kernels for a model.

    Args:
        kernels: what the configuration asks for.
        device, dtype: of the forward pass. head_dim: of queries, keys and values.
        windows: some layer has a sliding window.

    Raises:
        KernelUnfit: what was asked for by name is not installed, or cannot do this.
    """
    attention, _ = choose_attention(kernels.attention, device, dtype, head_dim, windows=windows)
    ops, why = _operations(kernels.operations, device)
    log.info("operations: %s", why)
    took = Kernels(cast(AttentionName, attention.name), cast(OperationsName, ops.name))
    return Chosen(attention, ops, took)


def choose_attention(
    asked: AttentionName, device: torch.device, dtype: torch.dtype, head_dim: int, *, windows: bool = False
) -> tuple[AttentionKernel, str]:
    """The kernel and why, as `choose`; also its errors."""
    kernel, why = _attention(asked, _Need(device, dtype, head_dim, windows))
    log.info("attention: %s", why)
    return kernel, why


def _attention(asked: AttentionName, need: _Need) -> tuple[AttentionKernel, str]:
    if asked == "padded":
        return Padded(), "batches of padded documents by torch, as asked"
    if asked != "auto":
        candidate = _CANDIDATES[asked]
        lack = candidate.lacks.of(need)
        if lack is not None:
            raise KernelUnfit(
                f'trainer.kernels.attention = "{asked}" cannot be used here: {lack}. Use "auto" or another kernel'
            )
        try:
            return candidate.make(), f"{candidate.label}, as asked"
        except ImportError as error:
            raise KernelUnfit(
                f'trainer.kernels.attention = "{asked}" is not installed ({error}): {candidate.install}'
            ) from error
    if need.capability == 0:
        return Padded(), "batches of padded documents by torch, because there is no NVIDIA GPU"
    for name in _FASTEST_FIRST:
        candidate = _CANDIDATES[name]
        if candidate.lacks.of(need) is not None:
            continue
        try:
            return candidate.make(), f"{candidate.label}, the fastest that is installed and fits"
        except ImportError:
            continue
    what = f"{need.dtype}, heads of {need.head_dim}" + (" and sliding windows" if need.windows else "")
    return Padded(), f"batches of padded documents by torch, because no kernel that is installed does {what}"


def _operations(asked: OperationsName, device: torch.device) -> tuple[Ops, str]:
    from prl_models.blocks.torch_ops import TorchOps

    if asked == "torch":
        return TorchOps(), "torch, as asked"
    if asked == "auto" and device.type != "cuda":
        return TorchOps(), "torch, because there is no GPU"
    name = "triton" if asked == "auto" else asked
    if device.type != "cuda":
        raise KernelUnfit(f'trainer.kernels.operations = "{name}" needs a GPU, and the device is {device}')
    try:
        return _make_ops(name), "own Triton kernels" if asked == "auto" else f"{name}, as asked"
    except ImportError as error:
        if asked == "auto":
            return TorchOps(), f"torch, because Triton is not installed ({error})"
        install = {"triton": "triton", "liger": "prl-models[liger]", "quack": "prl-models[quack]"}[name]
        raise KernelUnfit(
            f'trainer.kernels.operations = "{name}" is not installed ({error}): pip install "{install}"'
        ) from error


def _make_ops(name: str) -> Ops:
    if name == "triton":
        from prl_models.kernels.triton_ops import TritonOps

        return TritonOps()
    from prl_models.kernels.libraries import LigerOps, QuackOps

    return LigerOps() if name == "liger" else QuackOps()


def _flash4() -> AttentionKernel:
    from prl_models.kernels.flash import Flash4

    return Flash4()


def _flash2() -> AttentionKernel:
    from prl_models.kernels.flash import Flash2

    return Flash2()


def _varlen() -> AttentionKernel:
    from prl_models.kernels.flash import Varlen

    return Varlen()


def _cudnn() -> AttentionKernel:
    from prl_models.kernels.cudnn import Cudnn

    return Cudnn()


def _flex() -> AttentionKernel:
    from prl_models.kernels.flex import Flex

    return Flex()


_FASTEST_FIRST = ("flash4", "flash2", "varlen", "flex")
_CANDIDATES = {
    "flash4": _Candidate(
        _flash4, _Lacks(9, 256, blackwell=128), 'pip install "flash-attn-4[cu13]"', "FlashAttention 4"
    ),
    "flash2": _Candidate(_flash2, _Lacks(8, 256), "pip install flash-attn --no-build-isolation", "FlashAttention 2"),
    "cudnn": _Candidate(_cudnn, _Lacks(8, 128, windows=False), "it comes with torch", "cuDNN, document by document"),
    "flex": _Candidate(_flex, _Lacks(8, 256, 16), "pip install triton", "FlexAttention"),
    "varlen": _Candidate(_varlen, _Lacks(8, 256), "it comes with torch", "torch's variable-length attention"),
}
