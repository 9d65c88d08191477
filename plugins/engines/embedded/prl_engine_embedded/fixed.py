"""The fixed-shape scheduler: one row per slot, every pass of a shape that depends on nothing but the request itself.

A prefill pass always has the same number of rows for one padded prompt length, a decode pass always has one row per
slot. Rows of a float32 matrix product do not depend on their index or companions at a fixed number of rows of at least
8, attention and sampling are row-wise, and random numbers are counted per request: so a request's tokens and
log-probabilities are the same bits whatever slot it gets and whoever is beside it (float32, one thread).

Where few slots are in use a whole pass is wasteful. `tiers` allows passes of an eighth, a quarter and a half of the
rows; a repeatable run has them only where they were seen to give the same bits on this machine.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import deque
from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch

from prl import faults
from prl.engine.backend import Key, Result
from prl.engine.methods import Failure
from prl.messages import GenerateRequest, Generation
from prl_engine_embedded.model import LoadedModel
from prl_engine_embedded.sampling import sample, uniforms
from prl_engine_embedded.scheduler import problem_with
from prl_engine_embedded.slots import SlotCache
from prl_engine_embedded.stepped import SteppedScheduler

log = logging.getLogger(__name__)

PASS_TOKENS = 16_384
"""A prefill pass has fewer rows for long prompts, so that rows x length stays below this."""
FIRST_WINDOW = 32
MIN_ROWS = 8
PATIENCE = 16
"""Steps after which a waiting request goes first, whatever its pass costs."""


class Row:
    """A request on its way. `tokens` is the prompt and what was sampled after it, `arrived` the step it came in."""

    __slots__ = (
        "arrived",
        "key",
        "limit",
        "logprobs",
        "prompt_length",
        "request",
        "slot",
        "stops",
        "tokens",
        "versions",
    )

    def __init__(self, key: Key, request: GenerateRequest, limit: int, arrived: int = 0) -> None:
        self.key = key
        self.arrived = arrived
        self.request = request
        self.tokens = list(request.token_ids)
        self.prompt_length = len(self.tokens)
        self.limit = limit
        self.stops = frozenset(request.stop_token_ids)
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.slot = -1


def padded_length(length: int) -> int:
    """The length a prompt is padded to: steps of 4 up to 16, 8 up to 64, 16 up to 256, then 64."""
    for top, step in ((16, 4), (64, 8), (256, 16)):
        if length <= top:
            return -(-length // step) * step
    return -(-length // 64) * 64


def tier(count: int, most: int, allowed: bool = True) -> int:
    """Rows of a pass that has work for `count`: an eighth, a quarter, a half or all of `most`, and at least 8."""
    rows = most
    while allowed and rows % 2 == 0 and rows > most // 8 and rows // 2 >= max(count, MIN_ROWS):
        rows //= 2
    return rows


class FixedScheduler(SteppedScheduler):
    """See `Scheduler` and the module. `pinned_window` allocates the longest sequence at once instead of growing on
    need."""

    def __init__(
        self,
        model: LoadedModel,
        slots: int,
        prefill_rows: int,
        *,
        pinned_window: bool = False,
        tiers: bool = True,
    ) -> None:
        super().__init__()
        self._model = model
        self._slots = slots
        self.capacity = slots
        self._prefill_rows = prefill_rows
        device = model.device
        window = -(-model.max_tokens // 16) * 16 if pinned_window else min(FIRST_WINDOW, model.max_tokens)
        self._cache = SlotCache(slots, window)
        self._rows: list[Row | None] = [None] * slots
        self._free = list(range(slots))
        """A heap: the lowest free slot is taken first, so that passes over few rows suffice."""
        self._tiers = tiers
        self._waiting: dict[int, deque[Row]] = {}
        self._num_waiting = 0
        self._idle = 0
        self._steps = 0
        self._inputs = torch.zeros(slots, dtype=torch.long, device=device)
        self._positions = torch.zeros(slots, dtype=torch.long, device=device)
        self._active = torch.zeros(slots, dtype=torch.long, device=device)
        self._temperatures = torch.ones(slots, device=device)
        self._seeds = np.zeros(slots, np.uint64)
        self._counts = np.zeros(slots, np.uint64)
        self._bias = self._new_bias(window)
        self._last: torch.Tensor | None = None
        model.module.get_output_embeddings().register_forward_pre_hook(self._keep_last)

    @property
    def load(self) -> int:
        return self._slots - len(self._free) + self._num_waiting + self.num_arrived

    @torch.inference_mode()
    def weights_changed(self, recompute: bool) -> None:
        """Rebuild the keys and values of everything in flight, except of each row's last token, which is fed next."""
        if not recompute:
            return
        try:
            self._rebuild()
        except Exception as error:  # out of memory: the weights are whole, what was computed with the former is not
            log.exception("keys and values could not be rebuilt")
            self.fail_everything(f"keys and values could not be rebuilt: {type(error).__name__}: {error}")

    def _rebuild(self) -> None:
        by_length: dict[int, list[Row]] = {}
        for row in self._rows:
            if row is not None:
                by_length.setdefault(padded_length(len(row.tokens) - 1), []).append(row)
        for length, rows in by_length.items():
            step = self._rows_of(length, len(rows))
            for start in range(0, len(rows), step):
                part = rows[start : start + step]
                self._prefill_pass(length, part, [row.tokens[:-1] for row in part])

    def has_work(self) -> bool:
        return bool(self._num_waiting or len(self._free) < self._slots)

    @torch.inference_mode()
    def step(self, arrived: Iterable[tuple[Key, GenerateRequest]], aborted: set[Key]) -> None:
        """Take requests in, drop aborted ones, fill slots, and sample one token in every slot."""
        self._steps += 1
        for key, request in arrived:
            self._admit(key, request)
        if aborted:
            self._drop(aborted)
        while self._prefill_some():
            pass
        if len(self._free) < self._slots:
            self._decode()

    def _admit(self, key: Key, request: GenerateRequest) -> None:
        problem = problem_with(request, self._model.max_tokens)
        if problem is not None:
            self.finished.append(Result(key, None, problem))
            return
        limit = min(request.sampling.max_tokens, self._model.max_tokens - len(request.token_ids))
        row = Row(key, request, limit, self._steps)
        self._waiting.setdefault(padded_length(row.prompt_length), deque()).append(row)
        self._num_waiting += 1

    def _drop(self, aborted: set[Key]) -> None:
        self._release([row.slot for row in self._rows if row is not None and row.key in aborted])
        for length, queue in self._waiting.items():
            kept = deque(row for row in queue if row.key not in aborted)
            self._num_waiting -= len(queue) - len(kept)
            self._waiting[length] = kept

    def _rows_of(self, length: int, count: int) -> int:
        """Rows of a prefill pass of `count` prompts padded to `length`."""
        return tier(count, max(MIN_ROWS, min(self._prefill_rows, PASS_TOKENS // length)), self._tiers)

    def _prefill_some(self) -> bool:
        """One prefill pass, if a pass is worth its price now.

        A pass costs the same however few of its rows are used, a free slot costs one row of every decode pass. So a
        pass that would not be nearly full waits until the idle slots have cost as much as its unused rows would. The
        length most requests have goes first, unless one of another length has waited for long.
        """
        if not self._free or not self._num_waiting:
            self._idle = 0
            return False
        queues = {length: queue for length, queue in self._waiting.items() if queue}
        length = min(queues, key=lambda length: queues[length][0].arrived)
        urgent = self._steps - queues[length][0].arrived > PATIENCE
        if not urgent:
            length = max(queues, key=lambda length: len(queues[length]))
        available = min(len(self._free), len(self._waiting[length]))
        most = self._rows_of(length, self._slots)
        rows = self._rows_of(length, available)
        count = min(rows, available)
        # A pass of few rows is not worth its calls if more will come: wait as long as for the rows it leaves unused.
        wasted = (rows - count) + (most - rows) // 4
        nothing_runs = len(self._free) == self._slots
        if not nothing_runs and not urgent and self._idle < wasted * length:
            return False
        self._idle = 0
        queue = self._waiting[length]
        chosen = [queue.popleft() for _ in range(count)]
        self._num_waiting -= count
        self._start(length, chosen)
        return True

    def _start(self, length: int, rows: list[Row]) -> None:
        """Compute these prompts and sample the first token of each."""
        for row in rows:
            row.slot = heapq.heappop(self._free)
            self._rows[row.slot] = row
        self._need_window(length)
        logits = self._prefill_pass(length, rows, [row.tokens for row in rows])
        slots = [row.slot for row in rows]
        self._seeds[slots] = [row.request.seed & 0xFFFF_FFFF_FFFF_FFFF for row in rows]
        self._counts[slots] = 0
        index = torch.tensor(slots, device=self._model.device)
        self._temperatures[index] = torch.tensor(
            [row.request.sampling.temperature for row in rows], device=self._model.device
        )
        lengths = torch.tensor([row.prompt_length for row in rows], device=self._model.device)
        self._positions[index] = lengths
        self._active[index] = 1
        visible = torch.arange(self._cache.window, device=self._model.device)[None] < lengths[:, None]
        self._bias[index] = torch.where(visible, 0.0, -math.inf)[:, None, None]
        tokens, logprobs = self._sample(logits[: len(rows)], index, slots)
        self._inputs[index] = tokens
        self._counts[slots] = 1
        self._take(rows, tokens.tolist(), logprobs.tolist())

    def _prefill_pass(self, length: int, rows: list[Row], sequences: list[list[int]]) -> torch.Tensor:
        """Write the keys and values of right-padded `sequences` into their rows' slots; logits [R, V] after each."""
        count = self._rows_of(length, len(rows))
        ids = np.zeros((count, length), np.int64)
        for index, sequence in enumerate(sequences):
            ids[index, : len(sequence)] = sequence
        last = [len(sequence) - 1 for sequence in sequences] + [0] * (count - len(sequences))
        device = self._model.device
        positions = torch.arange(length, device=device)[None].expand(count, length)
        self._cache.prefill(torch.tensor([row.slot for row in rows], device=device))
        self._last = torch.tensor(last, device=device)
        try:
            return self._forward(torch.from_numpy(ids).to(device), positions, None)
        finally:
            self._last = None
            self._cache.bypass()

    def _decode(self) -> None:
        faults.point("engine.decode")
        if self._num_waiting:
            self._idle += min(len(self._free), self._num_waiting)
        rows = [row for row in self._rows if row is not None]
        self._need_window(max(len(row.tokens) for row in rows))
        used = slice(tier(rows[-1].slot + 1, self._slots, self._tiers))
        positions, bias = self._positions[used], self._bias[used]
        bias[:, 0, 0].scatter_(1, positions[:, None], 0.0)
        self._cache.decode(positions)
        logits = self._forward(self._inputs[used, None], positions[:, None], bias)
        self._cache.bypass()
        tokens, logprobs = self._sample(logits, used, used)
        self._inputs[used] = tokens
        self._positions += self._active
        self._counts += np.uint64(1)
        chosen, scores = tokens.tolist(), logprobs.tolist()
        self._take(rows, [chosen[row.slot] for row in rows], [scores[row.slot] for row in rows])

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        output = self._model.module(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=self._cache, use_cache=True
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _keep_last(self, module: object, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Before the head: keep each prompt's last position only, so that logits are [R, 1, V], not [R, T, V]."""
        if self._last is None:
            return None
        hidden = args[0]
        return (hidden[torch.arange(hidden.shape[0], device=hidden.device), self._last][:, None], *args[1:])

    def _sample(
        self, logits: torch.Tensor, index: torch.Tensor | slice, slots: list[int] | slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        uniform = torch.from_numpy(uniforms(self._seeds[slots], self._counts[slots])).to(logits.device)
        return sample(logits, self._temperatures[index], uniform)

    def _take(self, rows: list[Row], tokens: list[int], logprobs: list[float]) -> None:
        """Append one sampled token to every row and end those that are complete."""
        version = self.version
        self.tokens += len(rows)
        released: list[int] = []
        for row, token, logprob in zip(rows, tokens, logprobs):
            if not math.isfinite(logprob):
                self._cache.clear([row.slot])
                self._finish(row, failure=Failure("engine_nan", _nan_message(row, version)))
                released.append(row.slot)
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(version)
            if token in row.stops:
                self._finish(row, "stop")
                released.append(row.slot)
            elif len(row.logprobs) >= row.limit:
                self._finish(row, "length")
                released.append(row.slot)
        self._release(released)

    def _finish(self, row: Row, reason: Literal["stop", "length"] = "stop", failure: Failure | None = None) -> None:
        generation = None
        if failure is None:
            generation = Generation(row.tokens[row.prompt_length :], row.logprobs, row.versions, reason)
        self.finished.append(Result(row.key, generation, failure))

    def _release(self, slots: list[int]) -> None:
        """Empty these slots. They still take part in every pass: they look at their first position only, which is
        finite, so that no NaN comes of them."""
        if not slots:
            return
        for slot in slots:
            self._rows[slot] = None
            heapq.heappush(self._free, slot)
        index = torch.tensor(slots, device=self._model.device)
        for state in (self._active, self._positions, self._inputs):
            state[index] = 0
        self._bias[index] = self._empty_bias

    def _need_window(self, tokens: int) -> None:
        """Make the window hold `tokens`: it doubles, so a growing sequence is copied a few times only."""
        window = self._cache.window
        if tokens <= window:
            return
        while window < tokens:
            window *= 2
        # A prompt of the longest length is padded to a multiple of 64.
        window = min(window, max(-(-self._model.max_tokens // 64) * 64, tokens))
        self._cache.resize(window)
        bias = self._new_bias(window)
        bias[..., : self._bias.shape[-1]] = self._bias
        self._bias = bias

    def _new_bias(self, window: int) -> torch.Tensor:
        self._empty_bias = torch.full((1, 1, window), -math.inf, device=self._model.device)
        self._empty_bias[..., 0] = 0
        return self._empty_bias.repeat(self._slots, 1, 1, 1)

    @torch.inference_mode()
    def fail_everything(self, why: str) -> None:
        """A pass raised: what it left in the cache cannot be trusted, so every request starts again elsewhere."""
        rows = [row for row in self._rows if row is not None]
        for row in rows:
            self._finish(row, failure=Failure("", why, retryable=True))
        self._release([row.slot for row in rows])
        for queue in self._waiting.values():
            self.finished.extend(Result(row.key, None, Failure("", why, retryable=True)) for row in queue)
            queue.clear()
        self._num_waiting = 0


def _nan_message(row: Row, version: int) -> str:
    return (
        f"version {version} of the weights gave logits that are not numbers after {len(row.tokens)} tokens of request "
        f"{row.request.id}: the training has diverged or the weights are corrupted"
    )
