"""Putting a received version into the model, whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from prl.errors import WeightsError


class Swap:
    """One exchange of the model's parameters and persistent buffers, which can be taken back.

    Values are copied in place: addresses stay, so that compiled code and, on a CPU, the alignment that the bits of a
    matrix product may depend on stay too. The former values are kept until `commit` or `rollback`: for that time the
    weights are in memory three times (the received ones, the new, the former).
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._targets: dict[str, torch.Tensor] = dict(module.state_dict(keep_vars=False))
        self._former: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fitted(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors under the model's own names. Nothing is changed.

        Some models have other parameters than their files (experts that are one tensor each on disk and one for all in
        memory): where the names differ, transformers loads the tensors as it would load the files.

        Raises:
            WeightsError: names or shapes are not the model's.
        """
        if not set(tensors) <= set(self._targets):
            tensors = self._converted(tensors)
        self._check(tensors)
        return tensors

    def _converted(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        module = self._module
        try:
            loaded, info = type(module).from_pretrained(
                None,
                config=module.config,
                state_dict=dict(tensors),
                dtype=module.dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
            )
        except Exception as error:
            raise WeightsError(f"transformers cannot load these weights: {type(error).__name__}: {error}") from error
        shapes = sorted(str(key) for key in info["mismatched_keys"])
        missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
        if missing or unexpected or shapes:
            raise WeightsError(_misfit(missing, unexpected, len(tensors)) + _few("of another shape", shapes))
        converted: Mapping[str, torch.Tensor] = loaded.state_dict()
        return converted

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        unexpected = sorted(set(tensors) - set(self._targets))
        given = {self._targets[name].data_ptr() for name in tensors if name in self._targets}
        # A tied parameter has several names; one of them is enough.
        missing = sorted(
            name for name, target in self._targets.items() if name not in tensors and target.data_ptr() not in given
        )
        if unexpected or missing:
            raise WeightsError(_misfit(missing, unexpected, len(tensors)))
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != tuple(self._targets[name].shape):
                raise WeightsError(
                    f"{name} has shape {tuple(tensor.shape)}, the model's has {tuple(self._targets[name].shape)}"
                )

    @torch.no_grad()
    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy every tensor, as `fitted` returned them, into the model."""
        for name, tensor in tensors.items():
            target = self._targets[name]
            address = target.data_ptr()
            if address not in self._former:
                self._former[address] = (target, target.clone())
            target.copy_(tensor)

    @torch.no_grad()
    def rollback(self) -> None:
        for target, former in self._former.values():
            target.copy_(former)
        self._former.clear()

    def commit(self) -> None:
        self._former.clear()


def _misfit(missing: list[str], unexpected: list[str], count: int) -> str:
    return (
        f"the weights do not fit the model: {_few('missing', missing)}{_few('unexpected', unexpected)}"
        f"{count} tensors were received; trainer and engine must be given the same model.path"
    )


def _few(what: str, names: list[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{what} {shown}; "
