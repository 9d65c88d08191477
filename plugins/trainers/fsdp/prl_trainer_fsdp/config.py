"""The trainer's own keys of `[trainer]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from prl.contribution import PluginConfig, wrong


class FsdpConfig(PluginConfig):
    lr: float = Field(1e-6, gt=0)
    """Learning rate at its highest."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How it falls after the warm-up: not at all, in a straight line, or along half a cosine."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which it rises in a straight line; step 1 already trains with lr / warmup_steps."""
    decay_steps: int = Field(0, ge=0)
    """Step at which it has fallen to `min_lr_ratio`, counted from the start; needed unless constant."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """What remains of `lr` at the end of the schedule, as a share of it."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's averaging of gradients and of their squares."""
    eps: float = Field(1e-8, gt=0)
    """AdamW: added to the root of the averaged squares."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decay of matrices; vectors (norms, biases) never decay."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients with a larger norm are scaled down to it; 0 never scales."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" takes a GPU where there is one."""
    recompute: bool = False
    """Keep only the inputs of every layer and compute it again in the backward pass: about a third more work, a
    fraction of the memory."""

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> FsdpConfig:
        if self.schedule != "constant" and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f'schedule = "{self.schedule}" needs decay_steps (now {self.decay_steps}) above '
                f"warmup_steps ({self.warmup_steps}): usually the number of steps of the run"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise wrong("betas", f"both must be at least 0 and below 1, not {list(self.betas)}")
        return self
