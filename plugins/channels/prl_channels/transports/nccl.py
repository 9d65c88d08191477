"""From the trainer's GPU to engines' GPUs by NCCL, between processes that need not share a host.

The trainer keeps every segment on its GPU until the release; engines pull (`pull`). A pair of processes is a
communicator of two ranks, apart from all others of both processes and so from torch's and vLLM's own. NCCL is called
directly: torch's process groups end the whole process when a transfer outlasts its time, while the death of an engine
must not touch the trainer. Here a transfer is watched, and its communicator aborted.
"""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from prl.errors import EnvironmentNotFit, WeightsError
from prl_channels.config import NcclConfig
from prl_channels.transports import pull
from prl_channels.transports.cuda import loaded_library

UNIQUE_ID_BYTES = 128
IN_PROGRESS = 7
UINT8 = 1
LARGEST = 1 << 30
"""Bytes of one transfer; a segment may be larger."""
POLL_S = 0.0005


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


@cache
def library() -> ctypes.CDLL:
    """Raises:
    EnvironmentNotFit: there is no NVIDIA GPU, or torch has no NCCL.
    """
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        raise EnvironmentNotFit(
            'the channel nccl needs NVIDIA GPUs where trainer and engine run: use channel "shm" or "filesystem"'
        )
    torch.cuda.init()
    found = loaded_library("nccl")
    if found is None:
        raise EnvironmentNotFit("torch has loaded no libnccl: the channel nccl cannot be used with this build")
    found.ncclGetErrorString.restype = ctypes.c_char_p
    found.ncclCommInitRank.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int)
    for name in ("ncclSend", "ncclRecv"):
        getattr(found, name).argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
    found.ncclCommAbort.argtypes = (ctypes.c_void_p,)
    found.ncclCommGetAsyncError.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
    return found


def check(code: int, what: str) -> None:
    """Raises:
    WeightsError: the code is neither that of success nor of something that goes on.
    """
    if code not in (0, IN_PROGRESS):
        raise WeightsError(f"{what}: NCCL error {code}, {library().ncclGetErrorString(code).decode()}")


class NcclCarrier:
    """A communicator of two ranks, with a stream of its own."""

    def __init__(self, communicator: int, rank: int, device: torch.device) -> None:
        self._communicator: int | None = communicator
        self._other = 1 - rank
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, tensors: Sequence[Tensor], deadline: float) -> None:
        self._move("ncclSend", tensors, deadline)

    def receive(self, tensors: Sequence[Tensor], deadline: float) -> None:
        self._move("ncclRecv", tensors, deadline)

    def close(self) -> None:
        """Abort: also what hangs in a transfer whose other side has died ends."""
        if self._communicator is not None:
            library().ncclCommAbort(self._communicator)
            self._communicator = None

    def _move(self, call: str, tensors: Sequence[Tensor], deadline: float) -> None:
        transfer = getattr(library(), call)
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            for tensor in tensors:
                for piece in tensor.split(LARGEST) if tensor.numel() else ():
                    address, size = piece.data_ptr(), piece.numel()
                    code = transfer(address, size, UINT8, self._other, self._communicator, self._stream.cuda_stream)
                    check(code, f"{call} of {size} bytes")
            done = torch.cuda.Event()
            done.record(self._stream)
            self._wait(done, deadline)

    def _wait(self, done: torch.cuda.Event, deadline: float) -> None:
        state = ctypes.c_int()
        while not done.query():
            check(library().ncclCommGetAsyncError(self._communicator, ctypes.byref(state)), "asking for errors")
            check(state.value, "the transfer of weights")
            if time.monotonic() > deadline:
                raise WeightsError("the transfer of weights was not over within channel.timeout_s: it is given up")
            time.sleep(POLL_S)


class NcclCarriers:
    """`device` is this side's GPU: threads begin with the first one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def offer(self) -> str:
        identity = UniqueId()
        check(library().ncclGetUniqueId(ctypes.byref(identity)), "beginning a communicator")
        return bytes(identity.internal).hex()

    def make(self, offer: str, rank: int, connection: socket.socket, deadline: float) -> pull.Carrier:
        """Blocks until the other side does the same, or NCCL's own time limit: a peer that dies just then is rare,
        and costs this pair's thread only."""
        content = (ctypes.c_byte * UNIQUE_ID_BYTES).from_buffer_copy(bytes.fromhex(offer))
        torch.cuda.set_device(self._device)
        communicator = ctypes.c_void_p()
        code = library().ncclCommInitRank(ctypes.byref(communicator), 2, UniqueId(content), rank)
        check(code, "a communicator of trainer and engine, which need a GPU each")
        assert communicator.value is not None
        return NcclCarrier(communicator.value, rank, self._device)


class NcclOutlet(pull.PullOutlet):
    def __init__(self, config: NcclConfig) -> None:
        library()
        device = torch.device("cuda", torch.cuda.current_device())
        super().__init__("nccl", config, NcclCarriers(device), device)


class NcclInlet(pull.PullInlet):
    def __init__(self, config: NcclConfig) -> None:
        library()
        device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(config, NcclCarriers(device), device)
