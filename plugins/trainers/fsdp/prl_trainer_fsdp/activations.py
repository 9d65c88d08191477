"""What the backward pass needs of each block, in the host's memory until then.

While a block is computed, `saved_tensors_hooks` collect what autograd saves. At its end the copies to the host start,
on a stream of their own, and the device's memory is given up one block later, when they are done. In the backward pass
the first tensor that a block is asked for also starts the way back of the block before it. The last block stays: its
backward pass begins at once. torch's own `save_on_cpu` copies on the stream that computes: nothing overlaps.

Whole storages travel, so that what comes back has the strides that it had, hence the same bits, and views of one tensor
go once. Parameters stay (a sharded one is gathered again where it is needed), and so do tensors below `SMALL` bytes and
small parts of large storages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALL = 1 << 20
"""Bytes below which a copy costs more than it frees; on CPU, where nothing is freed, every tensor goes."""
PART = 16
"""A tensor of less than one such part of its storage stays."""


def offload_activations(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Replace the blocks' forwards. Together with recomputation call it after that: only a block's inputs travel."""
    offload = _Offload(device)
    for index, block in enumerate(blocks[:-1]):
        block.forward = offload.around(block, block.forward, index == 0)
    last = blocks[-1]
    last.forward = offload.before(last.forward)


class _Offload:
    """`current`: the region computed last in this forward pass."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = (torch.cuda.Stream(), torch.cuda.Stream()) if device.type == "cuda" else None
        self.current: _Region | None = None

    def around(self, block: nn.Module, forward: Callable[..., Any], first: bool) -> Callable[..., Any]:
        def computed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            before = None if first else self.current
            region = _Region(self, block, before)
            with saved_tensors_hooks(region.pack, _unpack):
                result = forward(*args, **kwargs)
            region.send()
            if before is not None:
                before.leave()
            self.current = region
            return result

        return computed

    def before(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def computed(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            if self.current is not None:
                self.current.leave()
                self.current = None
            return result

        return computed


class _Saved:
    """A storage of a region, as bytes: `here` on the device, `host` on the host, or both. It must not change before it
    is copied, which autograd itself does not notice of what a hook has taken."""

    def __init__(self, region: _Region, tensor: Tensor) -> None:
        self.region = region
        self.seen: Tensor | None = tensor.detach()
        self.version = tensor._version
        storage = tensor.untyped_storage()
        self.here: Tensor | None = _view(storage, torch.uint8, 0, (storage.nbytes(),), (1,))
        self.host: Tensor | None = None


@dataclass(frozen=True)
class _Packed:
    """A tensor that was saved: a view of a storage."""

    saved: _Saved
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Region:
    """What one block saved in one forward pass. It lives as long as anything of that does."""

    def __init__(self, offload: _Offload, block: nn.Module, before: _Region | None) -> None:
        self.offload = offload
        self.before = before
        self.parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
        self.collected: dict[int, _Saved] = {}
        self.saved: list[weakref.ref[_Saved]] = []
        self.event: torch.cuda.Event | None = None
        self.asked = False

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        if not self._travels(tensor):
            return tensor
        key = tensor.untyped_storage().data_ptr()
        if key not in self.collected:
            self.collected[key] = _Saved(self, tensor)
            self.saved.append(weakref.ref(self.collected[key]))
        return _Packed(self.collected[key], tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())

    def _travels(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, nn.Parameter):  # the compiler's, of which there is only a shape
            return False
        if tensor.device.type != self.offload.device.type or tensor.layout != torch.strided:
            return False
        storage = tensor.untyped_storage()
        if (tensor.is_cuda and tensor.nbytes < SMALL) or tensor.nbytes * PART < storage.nbytes():
            return False
        return storage.data_ptr() not in self.parameters

    def send(self) -> None:
        """Start the copies to the host."""
        streams = self.offload.streams
        if streams is None:
            self._copy_out(pinned=False)
            return
        streams[0].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]):
            self._copy_out(pinned=True)
            self.event = streams[0].record_event()

    def _copy_out(self, pinned: bool) -> None:
        for saved in self.collected.values():
            assert saved.here is not None and saved.seen is not None
            assert saved.seen._version == saved.version, "a tensor that the backward pass needs was changed in place"
            saved.host = torch.empty_like(saved.here, device="cpu", pin_memory=pinned)
            saved.host.copy_(saved.here, non_blocking=True)

    def leave(self) -> None:
        """Give the device's memory back once the copies are done: what computes from now on may take it."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        for saved in self.collected.values():
            saved.here = saved.seen = None
        self.collected.clear()

    def fetch(self) -> None:
        """Start the copies back. Their memory is taken on the stream that computes, which will also free it."""
        if self.asked:
            return
        self.asked = True
        gone = [saved for ref in self.saved if (saved := ref()) is not None and saved.here is None]
        for saved in gone:
            assert saved.host is not None
            saved.here = torch.empty_like(saved.host, device=self.offload.device)
        streams = self.offload.streams
        if streams is None:
            _copy_back(gone)
            return
        streams[1].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[1]):
            _copy_back(gone)
            self.event = streams[1].record_event()

    def arrive(self) -> None:
        """What is computed from here on has this region's tensors; those of the block before it are on their way."""
        self.fetch()
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
            self.event = None
        if self.before is not None:
            self.before.fetch()
            self.before = None


def _copy_back(gone: Sequence[_Saved]) -> None:
    for saved in gone:
        assert saved.here is not None and saved.host is not None
        saved.here.copy_(saved.host, non_blocking=True)


def _unpack(packed: Tensor | _Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    packed.saved.region.arrive()
    assert packed.saved.here is not None
    storage = packed.saved.here.untyped_storage()
    return _view(storage, packed.dtype, packed.offset, packed.shape, packed.stride)


def _view(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
