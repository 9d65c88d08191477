"""What this package contributes. It is imported to validate a configuration, so it imports nothing heavy."""

from __future__ import annotations

from acme_arithmetic.config import ArithmeticConfig
from prl.contribution import Contribution

ARITHMETIC = Contribution(
    factory="acme_arithmetic.env:Arithmetic",
    config=ArithmeticConfig,
    summary="Sums and products of small numbers, checked exactly; one turn",
)
