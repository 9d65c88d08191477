"""Loading: everything is verified before anything is changed, and each rank reads the slices it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from prl.config.schema import ModelTable
from prl.errors import StoreError
from prl_models.provider import load_model
from prl_trainer_fsdp.assembly import skeleton_options
from prl_trainer_fsdp.checkpoint.format import BUFFER, OPTIMIZER, PARAMETER, Index, Piece, read_index
from prl_trainer_fsdp.checkpoint.layout import Box, boxes, local
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.learner import Learner, trained_parameters
from prl_trainer_fsdp.parallel.runtime import Runtime, max_over_ranks


class OtherCheckpoint(StoreError):
    """A checkpoint of another model or optimiser than the configuration's: that has to change, not the file."""

    exit_code = 2


Shapes = Mapping[str, tuple[int, ...]]


def load(learner: Learner, path: Path) -> dict[str, Any]:
    """Put a checkpoint into the learner; returns the facts given when it was saved. Collective.

    A checkpoint without any optimiser state (an imported one) leaves the optimiser as it is at a start.

    Raises:
        StoreError: a file is missing, truncated or altered, or belongs to another model or optimiser. Nothing was
            changed then.
    """
    index = read_index(path)
    tensors: list[tuple[str, str, Tensor]] = [(PARAMETER, name, parameter) for name, parameter in learner.parameters()]
    tensors += [(BUFFER, name, buffer) for name, buffer in learner.buffers()]
    for kind in (PARAMETER, BUFFER):
        compare(index, kind, {name: tuple(tensor.shape) for of, name, tensor in tensors if of == kind})
    state = {name: _Part.of(value) for name, value in learner.optimizer.named_state()}
    if index.of(OPTIMIZER):
        compare(index, OPTIMIZER, {name: part.whole for name, part in state.items()})
    _verify_together(index, learner.runtime)
    with Reader(index) as reader, torch.no_grad():
        for kind, name, tensor in tensors:
            local(tensor).copy_(reader.part(kind, name, _Part.of(tensor)))
        if index.of(OPTIMIZER):
            learner.optimizer.load_state(_Lazy(reader, state))
    learner.steps = index.facts.optimizer_steps
    _restore_random(index, learner.runtime)
    return index.facts.facts


def check(table: ModelTable, config: FsdpConfig, path: Path) -> None:
    """Compare a checkpoint with the model that a configuration describes, whose weights are not read for it.

    Raises:
        StoreError: it belongs to another model, with the name and both shapes.
        ConfigError, EnvironmentNotFit: the configuration's model cannot be trained.
    """
    index = read_index(path)
    compare_model(index, load_model(table.path, table.impl, skeleton_options(table, config)))


def compare_model(index: Index, model: Any) -> None:
    """Raises: StoreError: the checkpoint belongs to another model."""
    trained = {name: tuple(parameter.shape) for name, parameter in trained_parameters(model)}
    compare(index, PARAMETER, trained)


def compare(index: Index, kind: str, wanted: Shapes) -> None:
    """Raises: OtherCheckpoint: other names or shapes than those that are wanted."""
    stored = index.of(kind)
    what = "optimiser" if kind == OPTIMIZER else "model"
    for name, shape in wanted.items():
        if name in stored and stored[name].shape != shape:
            raise OtherCheckpoint(
                f"the checkpoint {index.path} belongs to another {what}: {name!r} is {list(stored[name].shape)} there, "
                f"{list(shape)} here"
            )
    if stored.keys() != wanted.keys():
        lacking, foreign = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
        sides = [f"it lacks {lacking[0]!r} ({len(lacking)} such)"] if lacking else []
        sides += [f"here is no {foreign[0]!r} ({len(foreign)} such)"] if foreign else []
        raise OtherCheckpoint(f"the checkpoint {index.path} belongs to another {what}: {'; '.join(sides)}")


@dataclass(frozen=True)
class _Part:
    """What a rank needs of a tensor: slices of the whole, with their places in the local part."""

    whole: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[tuple[Box, tuple[slice, ...]]]

    @classmethod
    def of(cls, tensor: Tensor) -> _Part:
        return cls(tuple(tensor.shape), tuple(local(tensor).shape), tensor.dtype, boxes(tensor))


class Reader:
    """Reads slices of a checkpoint's tensors. The files are mapped, not read whole; close it after use."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def whole(self, kind: str, name: str) -> Tensor:
        """Raises: StoreError: a file cannot be read."""
        shape = self.index.of(kind)[name].shape
        return self.box(kind, name, Box((0,) * len(shape), shape))

    def part(self, kind: str, name: str, part: _Part) -> Tensor:
        """The local part of a tensor that is placed like `part`, on the host."""
        if len(part.boxes) == 1 and part.boxes[0][0].shape == part.shape:
            return self.box(kind, name, part.boxes[0][0])
        found = torch.empty(part.shape, dtype=part.dtype)
        for box, place in part.boxes:
            found[place] = self.box(kind, name, box)
        return found

    def box(self, kind: str, name: str, box: Box) -> Tensor:
        """One slice, put together from the pieces that meet it."""
        meeting = self._meeting(kind, name, box)
        if len(meeting) == 1:
            return self._read(*meeting[0])
        found = torch.empty(box.shape, dtype=getattr(torch, self.index.of(kind)[name].dtype))
        for file, piece, both in meeting:
            found[both.within(box.offset)] = self._read(file, piece, both)
        return found

    def _meeting(self, kind: str, name: str, box: Box) -> list[tuple[str, Piece, Box]]:
        pieces = self.index.of(kind)[name].pieces
        pairs = ((file, piece, piece.box.meet(box)) for file, piece in pieces)
        return [(file, piece, both) for file, piece, both in pairs if both is not None]

    def _read(self, file: str, piece: Piece, box: Box) -> Tensor:
        path = self.index.path / file
        try:
            if file not in self._files:
                self._files[file] = self._stack.enter_context(safe_open(path, "pt"))
            if box == piece.box:
                tensor: Tensor = self._files[file].get_tensor(piece.key)
            else:
                tensor = self._files[file].get_slice(piece.key)[box.within(piece.offset)]
        except (OSError, SafetensorError) as error:
            raise StoreError(f"the checkpoint file {path} cannot be read: {error}") from error
        return tensor


class _Lazy(Mapping[str, Tensor]):
    """The optimiser's state by name, each tensor read when it is asked for."""

    def __init__(self, reader: Reader, parts: Mapping[str, _Part]) -> None:
        self._reader = reader
        self._parts = parts

    def __getitem__(self, name: str) -> Tensor:
        return self._reader.part(OPTIMIZER, name, self._parts[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _verify_together(index: Index, runtime: Runtime) -> None:
    """The ranks share the files out, and none goes on before all are verified."""
    error: StoreError | None = None
    try:
        index.verify(runtime.rank, runtime.world)
    except StoreError as found:
        error = found
    failed = max_over_ranks(torch.tensor([float(error is not None)], device=runtime.device), runtime)
    if error is not None:
        raise error
    if failed[0]:
        raise StoreError(f"the checkpoint {index.path} is damaged, as another rank says. Resume from an older one")


def _restore_random(index: Index, runtime: Runtime) -> None:
    """Each rank goes on with its own state. One that did not exist gets a seed from that of another."""
    rounds, saved = divmod(runtime.rank, len(index.ranks))
    for device, text in index.ranks[saved].random.items():
        if device != "cpu" and device != runtime.device.type:
            continue
        state = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
        generator = torch.default_generator
        if device == "cuda":
            generator = torch.cuda.default_generators[runtime.device.index or 0]
        generator.set_state(state)
        if rounds:
            base = generator.initial_seed()
            generator.manual_seed((base + 0x9E3779B97F4A7C15 * runtime.rank) % (1 << 63))
