"""`[data]` of a supervised run: where examples come from, how many of them are trained, and what a wrong one does."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from prl.config.tables import Table
from prl.contribution import wrong


def _as_sources(value: Any) -> Any:
    """A path, or one table, in place of an array of tables."""
    if isinstance(value, str):
        return [{"path": value}] if value else []
    return [value] if isinstance(value, dict) else value


class SftSourceTable(Table):
    """Where examples come from."""

    path: str
    """A JSONL or Parquet file, a folder that `datasets` saved, a folder of data files, or a name on a dataset hub."""
    format: Literal["auto", "jsonl", "parquet", "datasets"] = "auto"
    """"auto" goes by the file's ending; folders and names on a hub are read by the library `datasets`."""
    split: str = "train"
    """Part of a dataset that has several."""
    config: str = ""
    """Configuration of a dataset that has several."""
    weight: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Share of the examples that comes from it; 0 in every source: an epoch holds each row of each source once."""
    messages: str = "messages"
    """The column of conversations."""
    prompt: str = "prompt"
    """The column of what precedes a completion: text or messages."""
    completion: str = "completion"
    """The column of what is trained after a prompt: text or messages."""
    tools: str = "tools"
    """The column of the tools that a conversation may call; it may be missing."""


Sources = Annotated[list[SftSourceTable], BeforeValidator(_as_sources)]


class SftDataTable(Table):
    """Examples to imitate."""

    train: Sources = Field(min_length=1)
    """A path, or a table or an array of tables as below. A row holds "messages", or "prompt" and "completion"."""
    eval: Sources = []
    """The same, held out: its loss is reported, and nothing is trained on it."""
    steps: int = Field(0, ge=0)
    """Optimiser steps; 0 leaves it to `epochs`."""
    epochs: int = Field(0, ge=0)
    """Passes over the data, instead of `steps`; without either, one."""
    batch_size: int = Field(128, ge=1)
    """Examples of one optimiser step."""
    shuffle: bool = False
    """Draw the examples of every epoch in a random order of its own instead of the file's."""
    eval_every: int = Field(0, ge=0)
    """Steps between evaluations; 0 only at the end."""
    eval_at_start: bool = True
    """Evaluate before the first step: where the run began."""
    renderer: str = "auto"
    """What makes tokens of conversations: "template", the name of a renderer of the library `renderers`, or "auto":
    the library where it knows the model by its name on the hub, its chat template otherwise."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """A row that is not what it should be ends the run before anything is trained, or is left out and counted."""
    too_long: Literal["stop", "skip", "truncate"] = "stop"
    """A sequence longer than `trainer.row_tokens` ends the run, is left out and counted, or cut off and counted."""
    workers: int = Field(0, ge=0)
    """Processes of each rank that prepare coming steps; 0 is a thread of the trainer's process."""
    prefetch: int = Field(2, ge=1)
    """Steps that each of them prepares ahead."""

    @model_validator(mode="after")
    def _one_length(self) -> SftDataTable:
        if self.steps and self.epochs:
            raise wrong("epochs", f"is {self.epochs} and steps is {self.steps}: give one of them")
        return self

    @model_validator(mode="after")
    def _weights_of_all_or_none(self) -> SftDataTable:
        weighted = [source.weight > 0 for source in self.train]
        if any(weighted) and not all(weighted):
            index = weighted.index(False)
            raise wrong(
                f"train.{index}.weight", "is 0 while another source has a weight: give all of them one, or none"
            )
        return self
