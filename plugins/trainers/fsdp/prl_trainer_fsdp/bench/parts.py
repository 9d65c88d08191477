"""Clocks, peaks and profiles of a step, whoever's step it is.

On CUDA a part's time is what passes between two events on the stream that computes, so a part that waits for
communication is charged with it; elsewhere it is wall time.
"""

from __future__ import annotations

import gc
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Step = Callable[["Clock"], None]

CATEGORIES = (
    ("communication", r"nccl|gloo"),
    ("triton", r"^_|triton"),
    ("attention", r"flash|fmha|sdpa|attention"),
    ("optimizer", r"multi_tensor|adam|lpnorm|foreach"),
    ("products", r"gemm|nvjet|cutlass|xmma|cublas|splitk"),
    ("copies", r"memcpy|memset|copy"),
)
"""A kernel's category by the first pattern that its name has; what is left is "other"."""
SHOWN_KERNELS = 25


@dataclass(frozen=True)
class Measured:
    """Timed steps, one after another: seconds of each, the median of every part, the most memory in any."""

    step_s: list[float]
    parts: dict[str, float]
    peak_bytes: int


class Clock:
    """Told where parts begin; the last one ends with `finish`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def mark(self, part: str) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def finish(self) -> dict[str, float]:
        """Seconds of every part, those of the same name added up. Waits for the device."""
        self.mark("end")
        if self._cuda:
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        for (part, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds = begin.elapsed_time(end) / 1000 if self._cuda else end - begin
            found[part] = found.get(part, 0.0) + seconds
        return found


def measure(step: Step, device: torch.device, warmup: int, steps: int) -> Measured:
    """Run `warmup` steps, then time `steps`. The peak is that of the timed ones: optimiser state is there already."""
    for _ in range(warmup):
        step(Clock(device))
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds, parts = [], []
    for _ in range(steps):
        clock = Clock(device)
        began = time.perf_counter()
        step(clock)
        parts.append(clock.finish())
        seconds.append(time.perf_counter() - began)
    names = dict.fromkeys(name for found in parts for name in found)
    middle = {name: median(found.get(name, 0.0) for found in parts) for name in names}
    return Measured(seconds, middle, peak_bytes(device))


def peak_bytes(device: torch.device) -> int:
    """Most bytes held by tensors since the last reset; without CUDA the most that this process ever had."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def profiled(step: Step, device: torch.device) -> profile:
    """One step under torch's profiler."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as trace:
        step(Clock(device))
        if device.type == "cuda":
            torch.cuda.synchronize()
    return trace


def save_profile(trace: profile, file: Path) -> None:
    """A trace for a browser's viewer where the name ends in .json, else a table of the costliest operations."""
    if file.suffix == ".json":
        trace.export_chrome_trace(str(file))
        return
    averages = trace.key_averages()
    sort = "self_cuda_time_total" if any(event.self_device_time_total for event in averages) else "self_cpu_time_total"
    file.write_text(averages.table(sort_by=sort, row_limit=60, max_name_column_width=90))


def communication_s(trace: profile) -> float:
    """Seconds of NCCL's kernels, or of gloo's operations on CPU, overlapped or not."""
    total = 0.0
    for event in trace.key_averages():
        if event.key.startswith(("ncclDevKernel", "ncclKernel")):
            total += event.self_device_time_total
        elif event.key.startswith("gloo:"):
            total += event.cpu_time_total
    return total / 1e6


def kernel_times(trace: profile) -> dict[str, Any]:
    """Milliseconds of one step by category of kernel, and the costliest kernels."""
    found: dict[str, float] = {}
    kernels: list[tuple[str, float, int]] = []
    for event in trace.key_averages():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        spent = event.self_device_time_total / 1000 if on_device else 0.0
        if not spent or getattr(event, "is_user_annotation", False):
            continue
        kernels.append((event.key, spent, event.count))
        name = category(event.key)
        found[name] = found.get(name, 0.0) + spent
    kernels.sort(key=lambda kernel: -kernel[1])
    return {
        "categories": {name: round(spent, 3) for name, spent in sorted(found.items(), key=lambda item: -item[1])},
        "kernels": [[name[:160], round(spent, 3), count] for name, spent, count in kernels[:SHOWN_KERNELS]],
    }


def category(kernel: str) -> str:
    return next((name for name, pattern in CATEGORIES if re.search(pattern, kernel, re.IGNORECASE)), "other")
