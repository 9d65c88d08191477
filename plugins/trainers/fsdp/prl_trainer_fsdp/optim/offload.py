"""The host's memory in place of the device's for an optimiser's state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostState:
    """The state of one optimiser, element by element tensors in one piece of the host's memory (page-locked for CUDA).

    Between steps `optimizer.state` holds views of that piece; during a step, views of a copy on the device.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._places: list[tuple[dict[str, Tensor], str, Tensor]] = []
        large = [(state, key) for state in optimizer.state.values() for key, value in state.items() if value.ndim > 0]
        self.device = large[0][0][large[0][1]].device if large else torch.device("cpu")
        size = sum(state[key].numel() for state, key in large)
        self._host = torch.empty(size, pin_memory=self.device.type == "cuda")
        self._copy: Tensor | None = None
        start = 0
        for state, key in large:
            value = state[key]
            view = self._host[start : start + value.numel()].view(value.shape)
            view.copy_(value)
            state[key] = view
            self._places.append((state, key, view))
            start += value.numel()

    def bring(self) -> None:
        """Start the copy to the device, on the current stream."""
        assert self._copy is not None
        self._copy.copy_(self._host, non_blocking=True)

    def reserve(self) -> None:
        self._copy = torch.empty_like(self._host, device=self.device)

    def use(self) -> None:
        """From here on the optimiser sees the copy."""
        assert self._copy is not None
        for state, key, view in self._places:
            start = view.storage_offset()
            state[key] = self._copy[start : start + view.numel()].view(view.shape)

    def take_back(self) -> None:
        """The copy goes to the host, on the current stream, and the optimiser sees that again."""
        assert self._copy is not None
        self._host.copy_(self._copy, non_blocking=True)
        for state, key, view in self._places:
            state[key] = view

    def drop(self) -> None:
        self._copy = None


def step_all(units: Sequence[tuple[torch.optim.Optimizer, HostState | None]]) -> None:
    """A step of every optimiser; of those with a `HostState` the next one's comes while one is used."""
    offloaded = [(optimizer, host) for optimizer, host in units if host is not None]
    for optimizer, host in units:
        if host is None:
            optimizer.step()
    if not offloaded:
        return
    if offloaded[0][1].device.type == "cuda":
        _step_on_streams(offloaded)
        return
    for optimizer, host in offloaded:
        host.reserve()
        host.bring()
        host.use()
        optimizer.step()
        host.take_back()
        host.drop()


def _step_on_streams(units: Sequence[tuple[torch.optim.Optimizer, HostState]]) -> None:
    """Copies in and out run on streams of their own. At most three copies exist: one comes, one is used, one goes.

    The device's memory is taken and returned on the main stream: the incoming copy waits for what the main stream was
    given before the memory was taken, the main stream waits for the outgoing copy before it is returned.
    """
    main, inward, outward = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()

    def bring(host: HostState) -> None:
        host.reserve()
        inward.wait_stream(main)
        with torch.cuda.stream(inward):
            host.bring()
            arrived.append(inward.record_event())

    arrived: list[torch.cuda.Event] = []
    left: list[torch.cuda.Event] = []
    bring(units[0][1])
    for index, (optimizer, host) in enumerate(units):
        if index >= 2:
            main.wait_event(left[index - 2])
            units[index - 2][1].drop()
        if index + 1 < len(units):
            bring(units[index + 1][1])
        main.wait_event(arrived[index])
        host.use()
        optimizer.step()
        outward.wait_stream(main)
        with torch.cuda.stream(outward):
            host.take_back()
            left.append(outward.record_event())
    outward.synchronize()  # the host may read its own memory from here on
    for _, host in units[-2:]:
        host.drop()
