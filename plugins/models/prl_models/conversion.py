"""Names and shapes on disk against those in memory.

A rule answers for one tensor in memory with its parts on disk: a name, and the index of the tensor that it fills. The
parts tile the tensor, so one answer serves both directions, one tensor at a time: reading fills the indices, writing
takes them out. The third expert's matrix of a fused `experts.down_proj`, for instance, is
`Part("experts.2.down_proj.weight", (2,))`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Part:
    """A tensor on disk, and where it stands in the one in memory; the empty index is all of it."""

    name: str
    index: Index = ()


Rule = Callable[[str, torch.Size], Sequence[Part] | None]
"""Parts of the tensor of this name and shape in memory; None: another rule's concern."""


def parts(name: str, shape: torch.Size, rules: Sequence[Rule]) -> list[tuple[Part, torch.Size]]:
    """The parts of a tensor by the first rule that answers, with their shapes; without one it has the same name.

    Raises:
        ValueError: a rule's parts do not have as many elements as the tensor.
    """
    answers = (rule(name, shape) for rule in rules)
    found = next((answer for answer in answers if answer is not None), (Part(name),))
    whole = torch.empty(shape, device="meta")
    shaped = [(part, whole[part.index].shape) for part in found]
    if sum(math.prod(size) for _, size in shaped) != math.prod(shape):
        raise ValueError(f"the parts of {name!r} on disk do not make up its shape {list(shape)}")
    return shaped


def to_disk(name: str, tensor: Tensor, rules: Sequence[Rule]) -> Iterator[tuple[str, Tensor]]:
    """The tensors on disk of one in memory."""
    for part, _ in parts(name, tensor.shape, rules):
        yield part.name, tensor[part.index]


def from_disk(name: str, shape: torch.Size, rules: Sequence[Rule], read: Callable[[str], Tensor]) -> Tensor:
    """The tensor in memory, float32; `read` gives a tensor on disk by its name."""
    found = [part for part, _ in parts(name, shape, rules)]
    if len(found) == 1:
        return read(found[0].name).float().reshape(shape)
    whole = torch.empty(shape, dtype=torch.float32)
    for part in found:
        whole[part.index] = read(part.name)
    return whole
