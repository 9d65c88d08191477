"""The few calls of the CUDA runtime that torch does not offer: memory of one's own, and handles to it for others.

Arenas are taken with cudaMalloc and not from torch's allocator: a handle stands for a whole allocation, and what torch
keeps in expandable segments has none (CUDA C++ Programming Guide, "Interprocess Communication").
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prl.errors import EnvironmentNotFit, WeightsError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class CudaError(WeightsError):
    """A call of the CUDA runtime failed."""


class Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


def loaded_library(name: str) -> ctypes.CDLL | None:
    """The shared library that torch has loaded into this process, which a search by name might not find."""
    pattern = re.compile(rf"\S*/lib{name}\.so[.0-9]*$", re.MULTILINE)
    found = pattern.search(Path("/proc/self/maps").read_text())
    return ctypes.CDLL(found[0]) if found else None


@cache
def runtime() -> ctypes.CDLL:
    """Raises:
    EnvironmentNotFit: there is no NVIDIA GPU, or torch was built without CUDA.
    """
    if not torch.cuda.is_available():
        raise EnvironmentNotFit(
            'the channel cuda_ipc needs an NVIDIA GPU where trainer and engine run: use channel "shm" or "filesystem"'
        )
    torch.cuda.init()
    library = loaded_library("cudart")
    if library is None:
        raise EnvironmentNotFit("torch has loaded no libcudart: the channel cuda_ipc cannot take memory for others")
    library.cudaGetErrorString.restype = ctypes.c_char_p
    library.cudaMalloc.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)
    library.cudaFree.argtypes = (ctypes.c_void_p,)
    library.cudaIpcGetMemHandle.argtypes = (ctypes.POINTER(Handle), ctypes.c_void_p)
    library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(ctypes.c_void_p), Handle, ctypes.c_uint)
    library.cudaIpcCloseMemHandle.argtypes = (ctypes.c_void_p,)
    return library


def check(code: int, what: str) -> None:
    """Raises:
    CudaError: the code is not that of success.
    """
    if code:
        library = runtime()
        library.cudaGetLastError()  # or torch's next call would report it once more
        raise CudaError(f"{what}: CUDA error {code}, {library.cudaGetErrorString(code).decode()}")


def device_name(device: torch.device) -> str:
    """The same for every process, whatever GPUs it can see."""
    return str(torch.cuda.get_device_properties(device).uuid)


class Memory:
    """Bytes on the current GPU that torch can use; `close` gives them back, once."""

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size
        self._open = True

    def close(self) -> None:
        if self._open:
            self._open = False
            self._close()

    def _close(self) -> None:
        raise NotImplementedError

    def tensor(self) -> Tensor:
        """u8[size]; it keeps this alive."""
        return torch.as_tensor(_Described(self), device=torch.device("cuda", torch.cuda.current_device()))


class _Described:
    """What torch asks an object about memory it did not take (numba, "CUDA Array Interface", version 3)."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (memory.size,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
            "strides": None,
        }


class Arena(Memory):
    """Memory of this process, for others to open."""

    def __init__(self, size: int) -> None:
        address = ctypes.c_void_p()
        code = runtime().cudaMalloc(ctypes.byref(address), size)
        if code:
            torch.cuda.empty_cache()  # what torch holds back may be what is lacking
            code = runtime().cudaMalloc(ctypes.byref(address), size)
        free, total = torch.cuda.mem_get_info()
        check(code, f"{size} bytes for a version's weights, of {total} on this GPU {free} are free")
        assert address.value is not None
        super().__init__(address.value, size)

    def handle(self) -> str:
        handle = Handle()
        check(runtime().cudaIpcGetMemHandle(ctypes.byref(handle), self.address), "exporting memory")
        return bytes(handle.reserved).hex()

    def _close(self) -> None:
        torch.cuda.synchronize()
        check(runtime().cudaFree(self.address), "freeing memory")


class Opened(Memory):
    """Memory of another process. It is closed when nobody holds it any more."""

    def __init__(self, handle: str, size: int) -> None:
        address = ctypes.c_void_p()
        content = (ctypes.c_byte * HANDLE_BYTES).from_buffer_copy(bytes.fromhex(handle))
        code = runtime().cudaIpcOpenMemHandle(ctypes.byref(address), Handle(content), _LAZY_PEER_ACCESS)
        check(code, "opening the trainer's memory")
        assert address.value is not None
        super().__init__(address.value, size)

    def _close(self) -> None:
        torch.cuda.synchronize()
        check(runtime().cudaIpcCloseMemHandle(self.address), "closing the trainer's memory")

    def __del__(self) -> None:
        if hasattr(self, "_open"):
            self.close()
