"""The keys of the environment's table. `prl config explain` prints the docstrings."""

from __future__ import annotations

from pydantic import Field, model_validator

from prl.contribution import PluginConfig, wrong


class ArithmeticConfig(PluginConfig):
    max_number: int = Field(20, ge=2)
    """Operands are from 1 to this."""
    num_terms: int = Field(3, ge=2, le=8)
    """Operands of a task."""
    held_out: float = Field(0.1, gt=0, lt=1)
    """Share of all tasks that belong to the evaluation split, by a hash of the expression."""
    seed: int = 0
    """Of the order in which tasks come."""
    num_tasks: int = Field(100_000, ge=1)
    """Tasks of the training split."""
    eval_tasks: int = Field(200, ge=1)
    """Tasks of the evaluation split, all different."""

    @model_validator(mode="after")
    def _enough(self) -> ArithmeticConfig:
        """`wrong` names the key that should be changed, so that the error points at its line."""
        expected = self.max_number**self.num_terms * self.held_out
        if expected < 2 * self.eval_tasks:
            raise wrong("eval_tasks", f"is {self.eval_tasks}, but only about {expected:.0f} tasks are held out")
        return self
