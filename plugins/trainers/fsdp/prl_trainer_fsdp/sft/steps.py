"""One step's rows, rendered and packed: the same on every rank, of which each takes its part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from prl.config.data import SftDataTable
from prl.errors import ConfigError
from prl.packing import Cost, pack
from prl.rows import PackedRow
from prl_trainer_fsdp.sft.order import Draw, Order
from prl_trainer_fsdp.sft.records import BadRow, Record
from prl_trainer_fsdp.sft.rendering import Example, Renderer
from prl_trainer_fsdp.sft.sources import Source

LONGEST = 64
"""Rows of each source, the longest by their text, that are rendered before the model is loaded."""
CHUNK = 256
"""Examples that are rendered at a time where there are many."""


class Row(msgspec.Struct, frozen=True):
    """One packed row: token ids <i4, a byte for each that is 1 where it is trained, and the lengths of its examples."""

    token_ids: bytes
    trained: bytes
    lengths: list[int]

    def packed(self) -> PackedRow:
        """Every trained token weighs 1 in the component `ce`."""
        lengths = np.array(self.lengths, np.int64)
        ends = np.cumsum(lengths)
        total = int(lengths.sum())
        nothing = np.zeros(total, np.float32)
        return PackedRow(
            token_ids=np.frombuffer(self.token_ids, "<i4"),
            position_ids=(np.arange(total) - np.repeat(ends - lengths, lengths)).astype(np.int32),
            cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
            sampled=np.zeros(total, np.bool_),
            logprobs=nothing,
            versions=np.full(total, -1, np.int32),
            temperatures=np.ones(total, np.float32),
            advantages=nothing,
            rl=nothing,
            ce=np.frombuffer(self.trained, np.bool_).astype(np.float32),
            ref_kl=nothing,
        )


class Part(msgspec.Struct, frozen=True):
    """A rank's part of one step, or of the evaluation.

    Args:
        rows: this rank's; every rank has as many.
        trained: trained tokens of all ranks.
        examples: of all ranks, without those left out.
        left_out: reason to number of examples: "bad_row", "too_long", and "truncated", which are trained cut off.
        notes: which, the first few, and why.
    """

    rows: list[Row]
    trained: int
    examples: int
    left_out: dict[str, int]
    notes: list[str]


class Preparer:
    """Renders and packs for one of `ranks` data-parallel ranks.

    Raises, from every method:
        ConfigError: a row is wrong, or too long, and this is not to be passed over.
    """

    def __init__(
        self,
        config: SftDataTable,
        sources: Sequence[Source],
        order: Order,
        renderer: Renderer,
        row_tokens: int,
        rank: int = 0,
        ranks: int = 1,
        cost: Cost | None = None,
        vocab_size: int = 0,
    ) -> None:
        self._config = config
        self._sources = sources
        self._order = order
        self._renderer = renderer
        self._row_tokens = row_tokens
        self._rank, self._ranks = rank, ranks
        self._cost = cost
        self._vocab_size = vocab_size  # 0: not known

    def step(self, step: int) -> Part:
        """Steps count from 1."""
        part = self._part(self._order.step(step), self._sources)
        if not part.trained:
            raise ConfigError([f"step {step}: none of its examples can be trained: {part.left_out}", *part.notes])
        return part

    def evaluation(self, sources: Sequence[Source]) -> Part:
        """All rows of some sources."""
        draws = [Draw(number, row) for number, source in enumerate(sources) for row in range(len(source))]
        part = self._part(draws, sources)
        if not part.trained:
            raise ConfigError([f"data.eval: none of its examples can be used: {part.left_out}", *part.notes])
        return part

    def check_longest(self, sources: Sequence[Source]) -> None:
        """Render the longest rows: what is too long, or what no template can render, ends the run before the model is
        loaded and not after hours."""
        for number, source in enumerate(sources):
            self._examples([Draw(number, row) for row in source.longest(LONGEST)], sources, {}, [])

    def _part(self, draws: Sequence[Draw], sources: Sequence[Source]) -> Part:
        left_out: dict[str, int] = {}
        notes: list[str] = []
        examples = self._examples(draws, sources, left_out, notes)
        dealt = pack([len(example) for example in examples], self._row_tokens, self._ranks, self._cost)
        rows = [_row(examples[index] for index in row) for row in dealt[self._rank]]
        return Part(rows, sum(example.num_trained for example in examples), len(examples), left_out, notes)

    def _examples(
        self, draws: Sequence[Draw], sources: Sequence[Source], left_out: dict[str, int], notes: list[str]
    ) -> list[Example]:
        kept = []
        for place, found in self._rendered(draws, sources):
            problem, reason, example = self._judged(found)
            if reason:
                left_out[reason] = left_out.get(reason, 0) + 1
                notes.append(f"{place}: {problem}")
            elif problem:
                raise ConfigError([f"{place}: {problem}"])
            if example is not None:
                kept.append(example)
        return kept

    def _rendered(self, draws: Sequence[Draw], sources: Sequence[Source]) -> Iterator[tuple[str, Example | BadRow]]:
        """Place and example of each draw, in their order."""
        for start in range(0, len(draws), CHUNK):
            chunk = draws[start : start + CHUNK]
            records = [_record(sources[draw.source], draw.row) for draw in chunk]
            good = [record for record in records if not isinstance(record, BadRow)]
            encoded = iter(self._renderer.encode(good))
            for draw, record in zip(chunk, records, strict=True):
                yield sources[draw.source].place(draw.row), record if isinstance(record, BadRow) else next(encoded)

    def _judged(self, found: Example | BadRow) -> tuple[str, str, Example | None]:
        """What is wrong with an example, as what it is counted where that does not end the run, and what is trained."""
        if isinstance(found, BadRow):
            return str(found), "bad_row" if self._config.on_bad_row == "skip" else "", None
        if self._vocab_size and (largest := int(found.token_ids.max(initial=0))) >= self._vocab_size:
            problem = f"the tokenizer makes token {largest}, but the model's config.json has vocab_size = "
            return f"{problem}{self._vocab_size}: take the tokenizer that belongs to the model", "", None
        if len(found) > self._row_tokens:
            problem = f"the example has {len(found)} tokens and a packed row holds {self._row_tokens}"
            if self._config.too_long == "stop":
                return f"{problem}: raise trainer.row_tokens, shorten it, or set data.too_long", "", None
            cut = found.cut(self._row_tokens)
            if self._config.too_long == "truncate" and cut.num_trained:
                return problem, "truncated", cut
            return problem, "too_long", None
        if not found.num_trained:
            return "it has no token to train", "bad_row" if self._config.on_bad_row == "skip" else "", None
        return "", "", found


def _record(source: Source, row: int) -> Record | BadRow:
    try:
        return source.record(row)
    except BadRow as error:
        return error


def _row(examples: Iterable[Example]) -> Row:
    found = list(examples)
    ids: Any = b"".join(example.token_ids.astype("<i4").tobytes() for example in found)
    return Row(ids, b"".join(example.trained.tobytes() for example in found), [len(example) for example in found])
