"""Saving: a copy of everything in the host's memory between two steps, then files while training goes on."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from prl import faults
from prl.errors import StoreError
from prl.store.files import atomic_write
from prl_models.shards import Entry, bytes_of, write_file
from prl_trainer_fsdp.checkpoint.format import (
    BUFFER,
    FACTS,
    OPTIMIZER,
    PARAMETER,
    Facts,
    Piece,
    RankFile,
    Stored,
    rank_name,
)
from prl_trainer_fsdp.checkpoint.layout import Owners, boxes, local
from prl_trainer_fsdp.learner import Learner
from prl_trainer_fsdp.parallel.runtime import Runtime

log = logging.getLogger(__name__)

_json = msgspec.json.Encoder(order="sorted").encode


@dataclass
class _Copy:
    """A slice that this rank writes: where its values are, and what the index says of it."""

    kind: str
    name: str
    whole: tuple[int, ...]
    piece: Piece
    source: Tensor


@dataclass(frozen=True)
class _Taken:
    """A snapshot: `held` of this rank, whose file is yet to be written, and `facts` of the whole on the first rank."""

    entries: list[Entry]
    held: RankFile
    facts: Facts | None


class Saver:
    """Saves one learner; one checkpoint at a time. All ranks take their snapshots between the same two steps.

    The host's memory for the copy is kept: it is as large as this rank's share of parameters and optimiser state, and
    on a GPU machine pinned, so that the copy runs at the speed of the bus.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._taken: _Taken | None = None
        self._writing = threading.Lock()
        self._thread: _Writer | None = None

    def take(self, facts: Mapping[str, Any]) -> float:
        """Copy everything that continuing needs; training may go on afterwards.

        Waits for a former snapshot that is just being written, and replaces one that nobody wrote.

        Returns:
            Seconds that it took.
        """
        started = time.perf_counter()
        learner, runtime = self._learner, self._learner.runtime
        with self._writing:
            self._taken = None
            _synchronise(runtime)  # offloaded state may still be on its way to the host
            # Larger elements first, so that each begins at a multiple of its size: the file has no gaps.
            copies = sorted(_copies(learner), key=lambda copy: -copy.source.element_size())
            entries = [Entry(copy.piece.key, copy.source.dtype, copy.piece.shape) for copy in copies]
            self._reserve(sum(entry.num_bytes for entry in entries))
            at = 0
            for copy, entry in zip(copies, entries, strict=True):
                target = self._buffer[at : at + entry.num_bytes].view(entry.dtype).view(entry.shape)
                target.copy_(copy.source.detach(), non_blocking=True)
                at += entry.num_bytes
            _synchronise(runtime)
            held = RankFile(f"{rank_name(runtime.rank)}.safetensors", 0, "", _described(copies), _random(runtime))
            whole = Facts(runtime.world, learner.steps, dict(facts)) if runtime.is_leader else None
            self._taken = _Taken(entries, held, whole)
        return time.perf_counter() - started

    def write(self, path: Path) -> dict[str, str]:
        """Write what `take` copied, on any thread.

        Returns:
            Name to sha256 of this rank's files, all of them on the disk.

        Raises:
            StoreError: a file cannot be written.
        """
        with self._writing:
            taken, self._taken = self._taken, None
            assert taken is not None, "no snapshot was taken"
            try:
                return _write(taken, bytes_of(self._buffer), path)
            except OSError as error:
                raise StoreError(
                    f"the checkpoint cannot be written to {path}: {error}; free space there, then use --resume"
                ) from error

    def begin(self, facts: Mapping[str, Any], path: Path) -> float:
        """`take`, and `write` in a thread of its own; `wait` for it before the next. Returns the seconds of `take`."""
        seconds = self.take(facts)
        self._thread = _Writer(self, path)
        self._thread.start()
        return seconds

    @property
    def pending(self) -> bool:
        """Whether a checkpoint was begun and nobody has waited for it."""
        return self._thread is not None

    def written(self) -> bool:
        """Whether every rank's files are there, or could not be written: `wait` will not block. Collective."""
        mine = self._thread is None or not self._thread.is_alive()
        return _all_ranks(mine, self._learner.runtime)

    def wait(self) -> dict[str, str]:
        """Wait until the files of all ranks are on the disk. Collective.

        Returns:
            Name to sha256 of all ranks' files on the leader, of this rank's on the others.

        Raises:
            StoreError: some rank could not write them.
        """
        writer, self._thread = self._thread, None
        assert writer is not None, "no checkpoint was begun"
        writer.join()
        runtime = self._learner.runtime
        if not _all_ranks(writer.error is None, runtime):
            raise writer.error or StoreError(f"another rank could not write the checkpoint to {writer.path}")
        return _gathered(writer.files, runtime)

    def _reserve(self, size: int) -> None:
        if self._buffer.numel() == size:
            return
        _unpin(self._buffer)
        self._buffer = torch.empty(size, dtype=torch.uint8)
        if size and self._learner.runtime.device.type == "cuda":
            _pin(self._buffer)


class _Writer(threading.Thread):
    """A daemon: what a process that ends has not finished is no checkpoint."""

    def __init__(self, saver: Saver, path: Path) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.path = path
        self.files: dict[str, str] = {}
        self.error: Exception | None = None
        self._saver = saver

    def run(self) -> None:
        try:
            self.files = self._saver.write(self.path)
        except Exception as error:  # raised by `wait`
            self.error = error


def _copies(learner: Learner) -> Iterator[_Copy]:
    owners = Owners(learner.runtime.rank, learner.runtime.world)
    for kind, name, tensor in named_tensors(learner):
        if owners.is_mine(tensor):
            held = boxes(tensor)
            for number, (box, place) in enumerate(held):
                key = f"{kind}/{name}" + (f"#{number}" if len(held) > 1 else "")
                yield _Copy(kind, name, tuple(tensor.shape), Piece(key, box.offset, box.shape), local(tensor)[place])


def named_tensors(learner: Learner) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, name, tensor) of all that is saved: what is trained, persistent buffers, the optimiser's state."""
    for name, parameter in learner.parameters():
        yield PARAMETER, name, parameter
    for name, buffer in learner.buffers():
        yield BUFFER, name, buffer
    for name, value in learner.optimizer.named_state():
        yield OPTIMIZER, name, value


def _described(copies: list[_Copy]) -> dict[str, dict[str, Stored]]:
    found: dict[str, dict[str, Stored]] = {}
    for copy in copies:
        dtype = str(copy.source.dtype).removeprefix("torch.")
        stored = found.setdefault(copy.kind, {}).setdefault(copy.name, Stored(copy.whole, dtype, []))
        stored.pieces.append(copy.piece)
    return found


def _random(runtime: Runtime) -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if runtime.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(runtime.device)
    return {device: state.numpy().tobytes().hex() for device, state in states.items()}


def _write(taken: _Taken, data: memoryview, path: Path) -> dict[str, str]:
    path.mkdir(parents=True, exist_ok=True)
    faults.point("trainer.write")
    held = taken.held
    held.bytes, held.sha256 = write_file(path / held.file, taken.entries, [data])
    return write_documents(path, held, taken.facts)


def write_documents(path: Path, held: RankFile, facts: Facts | None) -> dict[str, str]:
    """The JSON files beside a file that is written. Returns name to sha256 of all three.

    Raises:
        StoreError: they cannot be written.
    """
    files = {held.file: held.sha256}
    documents: dict[str, RankFile | Facts] = {f"{Path(held.file).stem}.json": held}
    if facts is not None:
        documents[FACTS] = facts
    for name, document in documents.items():
        text = msgspec.json.format(_json(document), indent=1 if name == FACTS else 0)
        atomic_write(path / name, text)
        files[name] = hashlib.sha256(text).hexdigest()
    return files


def _all_ranks(mine: bool, runtime: Runtime) -> bool:
    if runtime.world == 1:
        return mine
    flag = torch.tensor(int(mine), device=runtime.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def _gathered(files: Mapping[str, str], runtime: Runtime) -> dict[str, str]:
    """The files of all ranks on the leader."""
    if runtime.world == 1:
        return dict(files)
    text = torch.frombuffer(bytearray(_json(files)), dtype=torch.uint8).to(runtime.device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=runtime.device) for _ in range(runtime.world)]
    dist.all_gather(sizes, torch.tensor([text.numel()], device=runtime.device))
    longest = max(int(size) for size in sizes)
    texts = [torch.zeros(longest, dtype=torch.uint8, device=runtime.device) for _ in range(runtime.world)]
    dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - text.numel())))
    if not runtime.is_leader:
        return dict(files)
    merged: dict[str, str] = {}
    for size, padded in zip(sizes, texts, strict=True):
        merged |= msgspec.json.decode(padded[: int(size)].cpu().numpy().tobytes())
    return merged


def _synchronise(runtime: Runtime) -> None:
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)


def _pin(buffer: Tensor) -> None:
    """Lock the pages of ordinary memory: torch's own pinned allocator rounds sizes up to powers of two."""
    cudart: Any = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))
    if code:
        log.warning("%d bytes for snapshots cannot be page-locked (CUDA error %d): slower copies", buffer.numel(), code)


def _unpin(buffer: Tensor) -> None:
    if buffer.numel() and buffer.is_pinned():
        cudart: Any = torch.cuda.cudart()
        cudart.cudaHostUnregister(buffer.data_ptr())
