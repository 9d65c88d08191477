"""Packing: every sample exactly once, rows bounded, first fit exact, ranks equal in rows and close in work."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.errors import ConfigError
from prl.model_config import vocab_size
from prl.packing import DEFAULT_COST, Cost, cost_of, first_fit_decreasing, model_cost, pack

ROW = 16384
LENGTHS = st.lists(st.integers(1, 60), max_size=60)


def naive_first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for row, space in enumerate(free):
            if space >= lengths[index]:
                rows[row].append(index)
                free[row] -= lengths[index]
                break
        else:
            rows.append([index])
            free.append(capacity - lengths[index])
    return rows


def distributions() -> dict[str, list[int]]:
    """10,000 samples of 1,000,000 tokens in all."""
    rng = np.random.default_rng(1)
    raw = {
        "lognormal": rng.lognormal(4.2, 0.9, 10_000),
        "uniform": rng.integers(1, 200, 10_000).astype(float),
        "pareto": rng.pareto(1.5, 10_000) * 50 + 1,
        "equal": np.full(10_000, 100.0),
    }
    return {name: np.clip(values * (1e6 / values.sum()), 1, ROW).astype(int).tolist() for name, values in raw.items()}


@given(LENGTHS, st.integers(60, 200))
def test_equals_the_definition_of_first_fit_decreasing(lengths: list[int], capacity: int) -> None:
    assert first_fit_decreasing(np.array(lengths, np.int64), capacity) == naive_first_fit_decreasing(lengths, capacity)


@given(LENGTHS, st.integers(60, 200), st.integers(1, 7))
def test_every_sample_once_rows_bounded_and_equal_in_number(lengths: list[int], capacity: int, ranks: int) -> None:
    dealt = pack(lengths, capacity, ranks)
    assert sorted(i for rows in dealt for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= capacity for rows in dealt for row in rows)
    assert len(dealt) == ranks
    assert len({len(rows) for rows in dealt}) == 1
    assert dealt == pack(lengths, capacity, ranks)


@given(LENGTHS, st.integers(60, 200), st.integers(1, 7))
def test_no_row_is_empty_while_there_are_samples_for_it(lengths: list[int], capacity: int, ranks: int) -> None:
    rows = [row for rows in pack(lengths, capacity, ranks) for row in rows]
    if not all(rows):
        assert all(len(row) <= 1 for row in rows)


@pytest.mark.parametrize("name", ["lognormal", "uniform", "pareto", "equal"])
def test_at_most_one_row_above_the_bound_by_total_length(name: str) -> None:
    lengths = distributions()[name]
    (rows,) = pack(lengths, ROW)
    assert len(rows) <= -(-sum(lengths) // ROW) + 1


@pytest.mark.parametrize("name", ["lognormal", "uniform", "pareto", "equal"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_have_about_the_same_work(name: str, ranks: int) -> None:
    lengths = np.array(distributions()[name])
    cost = Cost()
    loads = [sum(cost(lengths[row]).sum() for row in rows) for rows in pack(lengths.tolist(), ROW, ranks, cost)]
    assert max(loads) / np.mean(loads) < 1.05


def test_one_short_batch_is_spread_over_all_ranks() -> None:
    dealt = pack([10] * 16, 1000, 4)
    assert [[len(row) for row in rows] for rows in dealt] == [[4]] * 4


def test_quadratic_work_counts() -> None:
    lengths = [1000] * 4 + [10] * 400
    loads = [
        sum(sum(lengths[i] ** 2 for i in row) for row in rows)
        for rows in pack(lengths, 1000, 2, Cost(linear=0.0, quadratic=1.0))
    ]
    assert max(loads) / min(loads) < 1.01


@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_to_pack(ranks: int) -> None:
    assert pack([], 100, ranks) == [[]] * ranks


@pytest.mark.parametrize(
    ("lengths", "ranks", "words"),
    [
        ([5, 101, 7], 1, ["sample 1", "101", "100", "row_tokens"]),
        ([5, 0], 1, ["sample 1", "0 tokens"]),
        ([5], 0, ["0 ranks"]),
    ],
)
def test_what_cannot_be_packed_is_refused(lengths: list[int], ranks: int, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        pack(lengths, 100, ranks)
    assert all(word in str(error.value) for word in words)


def test_ten_thousand_samples_are_packed_fast() -> None:
    """The benchmark holds 40 ms; here is room for a busy machine, none for a quadratic algorithm."""
    lengths = distributions()["lognormal"]
    seconds = []
    for _ in range(3):
        start = time.process_time()
        pack(lengths, ROW)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.2


def test_the_rank_with_the_least_work_so_far_gets_the_most_expensive_row() -> None:
    """Four rows of one sample each on two ranks: 8 + 4 and 7 + 5, not 8 + 5 and 7 + 4."""
    ranks = pack([8, 7, 5, 4], 8, 2)
    assert [sorted(index for row in rows for index in row) for rows in ranks] == [[0, 3], [1, 2]]


QWEN3_06B = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
}


def test_cost_is_that_of_the_models_numbers(tmp_path: Path) -> None:
    """Qwen3-0.6B has 596,049,920 parameters, 65,536 of them in norms; its head is its embedding."""
    cost = cost_of(QWEN3_06B)
    assert cost.linear == 6 * (596_049_920 - 65_536)
    assert cost.quadratic == 6 * 28 * 16 * 128
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    assert model_cost(str(tmp_path)) == cost
    assert model_cost("some/name") == model_cost(str(tmp_path / "none")) == DEFAULT_COST
    (tmp_path / "config.json").write_text("[1, 2]")
    assert model_cost(str(tmp_path)) == DEFAULT_COST == cost_of({"hidden_size": "?", "num_hidden_layers": 2})


def test_cost_knows_experts_windows_and_nested_configs(tmp_path: Path) -> None:
    experts = {"num_experts_per_tok": 8, "moe_intermediate_size": 384, "num_experts": 128}
    router = 6 * 28 * 1024 * 128
    assert cost_of({**QWEN3_06B, **experts}).linear == cost_of(QWEN3_06B).linear + router  # 8 x 384 = 3072
    kinds = ["sliding_attention"] * 21 + ["full_attention"] * 7
    windowed = cost_of({**QWEN3_06B, "layer_types": kinds})
    assert windowed.linear == cost_of(QWEN3_06B).linear and windowed.quadratic == cost_of(QWEN3_06B).quadratic / 4
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vlm", "text_config": QWEN3_06B}))
    assert model_cost(str(tmp_path)) == cost_of(QWEN3_06B)
    assert vocab_size(str(tmp_path)) == 151936 and vocab_size("some/name") == 0


def test_ranks_are_balanced_by_the_cost_given() -> None:
    """Two long documents and short ones of as many tokens: where only attention counts, each rank has a long one, and
    where only weights do, equal tokens are enough."""
    lengths = np.array([4096] * 2 + [64] * 128)
    for cost in (Cost(1.0, 0.0), Cost(0.0, 1.0)):
        loads = [sum(cost(lengths[row]).sum() for row in rows) for rows in pack(lengths.tolist(), 4096, 2, cost)]
        assert max(loads) <= 1.05 * min(loads), (cost, loads)
