"""The contract that every environment keeps, and what is particular to this one."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from acme_arithmetic.config import ArithmeticConfig
from acme_arithmetic.env import Arithmetic, value
from prl.testing.contracts import env as contract


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_it_is_an_environment(check) -> None:
    check(lambda: Arithmetic(ArithmeticConfig()))


@pytest.mark.parametrize(("expression", "expected"), [("3 + 4 * 5", 23), ("7 - 2 - 1", 4), ("2 * 3 - 4 * 5", -14)])
def test_values(expression: str, expected: int) -> None:
    assert value(expression) == expected


@pytest.mark.parametrize(("answer", "reward"), [("23", 1.0), ("It is 23.", 1.0), ("23 or 24", 0.0), ("", 0.0)])
def test_the_last_number_counts(answer: str, reward: float) -> None:
    env = Arithmetic(ArithmeticConfig())
    task = env._task("t", "3 + 4 * 5")
    assert env.score(task, answer)["reward"] == reward


def test_too_small_a_world_is_refused() -> None:
    with pytest.raises(ValidationError, match="only about 1 tasks are held out"):
        ArithmeticConfig(max_number=3, num_terms=2)
