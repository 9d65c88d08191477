"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) with transformers' own frequencies.

Frequencies that depend on a row's length (dynamic, longrope) are refused: documents of one row have different lengths,
and a token would be embedded differently in training than when it was sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from prl.errors import EnvironmentNotFit

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FIXED = ("linear", "yarn", "llama3")
"""Types of transformers' `ROPE_INIT_FUNCTIONS` whose frequencies do not depend on the row."""


@dataclass(frozen=True)
class RopeSpec:
    """Angle of a position in dimension pair i: position * frequencies[i]; cosine and sine are multiplied by `scale`.
    The first 2 * len(frequencies) dimensions of a head are rotated."""

    frequencies: tuple[float, ...]
    scale: float = 1.0


def rope_spec(config: PretrainedConfig, head_dim: int, partial: bool = False) -> RopeSpec:
    """
    Args:
        partial: the family's code in transformers knows `partial_rotary_factor`.

    Raises:
        EnvironmentNotFit: a type of scaling that is not known, or that depends on the row.
    """
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    share = float(parameters.get("partial_rotary_factor") or 1.0)
    if share != 1.0 and not partial:
        raise EnvironmentNotFit(
            f"model type {config.model_type!r} with partial_rotary_factor = {share:g} is not implemented: it rotates "
            f"whole heads"
        )
    if kind == "default":
        size = int(head_dim * share)
        inverse = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size))
        return RopeSpec(tuple(inverse.tolist()))
    if kind not in _FIXED:
        raise EnvironmentNotFit(
            f"model type {config.model_type!r} with rope_type = {kind!r} is not implemented: there are default, "
            f"{', '.join(_FIXED)}"
        )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inverse, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return RopeSpec(tuple(inverse.float().tolist()), float(scale))


class Rope(nn.Module):
    """The table is not part of a model's weights: it is made again from the spec wherever the model is placed."""

    frequencies: Tensor

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        super().__init__()
        self.scale = spec.scale
        table = torch.tensor(spec.frequencies, dtype=torch.float32, device=device)
        self.register_buffer("frequencies", table, persistent=False)

    @torch.no_grad()
    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """i64[T] -> cosines and sines [T, R / 2], made in float32."""
        angles = positions[:, None].float() * self.frequencies
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)
