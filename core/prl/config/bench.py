"""The tables of a measurement, `prl bench`: those of a run that matter for it, and what is measured."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from prl.config.schema import LossTable, ModelTable, Table, TrainerTable
from prl.contribution import wrong


class BenchModelTable(ModelTable):
    """The model whose step is measured."""

    path: str = ""
    """A folder or a name as in a run; left out where `bench.shapes` says what the model looks like."""


class BenchTable(Table):
    """What a step of `prl bench trainer` is made of."""

    shapes: str | dict[str, Any] = ""
    """Random weights instead of a checkpoint: a known name such as "qwen3-0.6b", or a table with the keys of a
    Hugging Face config.json."""
    documents: tuple[int, ...] = Field((16384,), min_length=1)
    """Lengths of the documents of every packed row, in tokens; each at least 2."""
    rows: int = Field(1, ge=1)
    """Packed rows (micro-batches) of every data-parallel rank in one step."""
    warmup: int = Field(2, ge=0)
    """Steps before those that are timed: kernels are compiled and memory is taken in them."""
    steps: int = Field(5, ge=1)
    """Steps that are timed; the median counts."""

    @model_validator(mode="after")
    def _documents_have_a_target(self) -> BenchTable:
        if min(self.documents) < 2:
            raise wrong("documents", f"a document of {min(self.documents)} tokens has nothing to train: at least 2")
        return self


class BenchConfig(Table):
    """One measurement of the trainer's step on synthetic data."""

    seed: int = Field(0, ge=0)
    """Of tokens, advantages and random weights."""
    model: BenchModelTable = BenchModelTable()
    loss: LossTable = LossTable()
    trainer: TrainerTable = TrainerTable()
    bench: BenchTable = BenchTable()

    @model_validator(mode="after")
    def _some_model(self) -> BenchConfig:
        if not self.model.path and not self.bench.shapes:
            raise wrong("bench.shapes", 'there is no model: give model.path, or shapes = "qwen3-0.6b"')
        return self
