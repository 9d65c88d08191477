"""Numbers of one step, summed over rows and ranks before anything is divided.

Mismatch is measured on tokens that the trainer's own version sampled: there trainer and engine should compute the same
probability, and what remains is numerics or a bug. Older tokens differ because the policy moved; they are reported
apart, as drift; so are all tokens once the parameters have moved within the step. With
d = log p_trainer - log p_sampler:

    kl          mean of e^d - 1 - d      the k3 estimator of KL(sampler || trainer) (Schulman 2020)
    p99         99th percentile of |d|
    mean_exp    mean of e^|d|

Under a correction (`prl_trainer_fsdp.corrections`) all of this is as without it, and `correction/` says of the trained
tokens which share had its weight changed, the mean factor, and mean and maximum of e^d.

The percentile comes from a histogram of |d| on a logarithmic scale, so it is the same however rows and ranks divide the
tokens; a bin is 1.2 % wide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prl.loss import LossOutputs
from prl_trainer_fsdp.corrections import Corrected
from prl_trainer_fsdp.parallel.runtime import Runtime, max_over_ranks, sum_over_ranks
from prl_trainer_fsdp.rows import DeviceRow

_BINS = 2200
_DECADES = (-9.0, 2.0)
_MAX_DIFFERENCE = 20.0
"""Larger differences count as this one: e^20 is 5e8, and a sum of such stays finite."""


class StepMetrics:
    """Collects on the device without waiting for it; `reduce` transfers everything once."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._sums: dict[str, list[tuple[Tensor | float, Tensor | float]]] = {}
        self._bins = {name: torch.zeros(_BINS, dtype=torch.float64, device=runtime.device) for name in _KINDS}
        self._largest = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=runtime.device)

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        self._sums.setdefault(name, []).append((total, count))

    @torch.no_grad()
    def add_row(self, row: DeviceRow, corrected: Corrected, outputs: LossOutputs, *, moved: bool = False) -> None:
        """Book one row. `moved`: the parameters are no longer those of its version, so nothing is mismatch."""
        at, inputs = row.targets, corrected.inputs
        logprobs, entropy = (x.detach().index_select(0, at) for x in (inputs.logprobs, inputs.entropy))
        self.add("train/loss", outputs.loss.detach(), 0.0)
        self.add("train/entropy", entropy.sum(), len(at))
        self.add("train/tokens", float(len(row.sampled)), 0.0)
        self.add("train/trained_tokens", float(len(at)), 0.0)
        for name, (total, count) in _others(corrected, outputs).items():
            self.add(name, total, count)
        sampled = row.sampled.index_select(0, at)
        age = (inputs.version - row.versions.index_select(0, at)) * sampled
        difference = (logprobs - row.sampler_logprobs.index_select(0, at)).double()
        difference = difference.clamp(-_MAX_DIFFERENCE, _MAX_DIFFERENCE)
        own = sampled & (age == 0) if not moved else torch.zeros_like(sampled)
        for name, where in (("mismatch", own), ("drift", sampled & ~own)):
            self._add_difference(name, difference, where)
        self.add("staleness/token_mean", age.sum(), sampled.sum())
        if len(age):
            largest = [
                torch.as_tensor(x, dtype=torch.float64, device=age.device) for x in (age.max(), corrected.ratio_max)
            ]
            self._largest = torch.maximum(self._largest, torch.stack(largest))

    def add_nothing(self, corrected: Corrected, outputs: LossOutputs) -> None:
        """Of a row without tokens, or one that another rank counts: the same names."""
        names = [*_OF_ROWS, *(f"{kind}/{name}" for kind in _KINDS for name in ("kl", "mean_exp", "tokens"))]
        for name in (*names, *_others(corrected, outputs)):
            self.add(name, 0.0, 0.0)

    def _add_difference(self, name: str, difference: Tensor, where: Tensor) -> None:
        weight = where.double()
        count, size = weight.sum(), difference.abs()
        self.add(f"{name}/kl", ((torch.expm1(difference) - difference) * weight).sum(), count)
        self.add(f"{name}/mean_exp", (size.exp() * weight).sum(), count)
        low, high = _DECADES
        position = (size.clamp(min=10.0**low).log10() - low) * (_BINS / (high - low))
        self._bins[name].index_add_(0, position.long().clamp_(0, _BINS - 1), weight)
        self.add(f"{name}/tokens", count, 0.0)

    def reduce(self) -> dict[str, float]:
        """Means and sums over all rows and ranks; every rank has to call it with the same names."""
        names = sorted(self._sums)
        flat = [_total(self._sums[name], part) for name in names for part in (0, 1)]
        values = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=self._runtime.device) for x in flat])
        packed = torch.cat([values, *(self._bins[name] for name in _KINDS)])
        host = sum_over_ranks(packed, self._runtime).cpu()
        largest = max_over_ranks(self._largest, self._runtime).tolist()
        result: dict[str, float] = {}
        for name, (total, count) in zip(names, host[: len(flat)].view(-1, 2).tolist(), strict=True):
            if name in _SUMS:
                result[name] = total
            elif count:
                result[name] = total / count
        for index, name in enumerate(_KINDS):
            quantile = _quantile(host[len(flat) + index * _BINS :][:_BINS], 0.99)
            if quantile is not None:
                result[f"{name}/p99"] = quantile
        result.update(zip(_MAXIMA, largest, strict=True))
        if "correction/share" not in result:
            del result["correction/ratio_max"]
        return result


_KINDS = ("mismatch", "drift")
_MAXIMA = ("staleness/token_max", "correction/ratio_max")
_OF_ROWS = ("train/loss", "train/entropy", "train/tokens", "train/trained_tokens", "staleness/token_mean")
_SUMS = ("train/loss", "train/tokens", "train/trained_tokens", "mismatch/tokens", "drift/tokens")


def _others(corrected: Corrected, outputs: LossOutputs) -> dict[str, tuple[Tensor | float, Tensor | float]]:
    """What the loss and the correction report of a row: the same names for every row and rank of a step."""
    loss = {f"loss/{name}": pair for name, pair in outputs.metrics.items()}
    return loss | {f"correction/{name}": pair for name, pair in corrected.metrics.items()}


def _total(pairs: list[tuple[Tensor | float, Tensor | float]], part: int) -> Tensor | float:
    total: Tensor | float = 0.0
    for pair in pairs:
        total = total + pair[part]
    return total


def _quantile(bins: Tensor, share: float) -> float | None:
    """The middle of the bin that holds the quantile; None without any token."""
    count = float(bins.sum())
    if not count:
        return None
    index = int(torch.searchsorted(bins.cumsum(0), share * count))
    low, high = _DECADES
    return float(10.0 ** (low + (min(index, _BINS - 1) + 0.5) * (high - low) / _BINS))
