"""Rows: unpacking gives back what was packed, the loss's conventions hold, and denominators agree with the weights."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from prl.messages import TrainSample
from prl.rows import COMPONENTS, PackedRow, assemble, denominators
from prl.types import Credit, Runs, SampleBody, SampleHeader

STREAMS = ("advantages", *COMPONENTS)


def make_sample(
    sampled: list[bool], streams: dict[str, list[float]], seed: int, temperature: float = 1.0
) -> TrainSample:
    """A sample of len(sampled) tokens; `streams` are per token and become run lengths."""
    rng = np.random.default_rng(seed)
    mask = np.array(sampled)
    body = SampleBody(
        rng.integers(0, 1000, len(mask)).astype("<i4").tobytes(),
        mask.tobytes(),
        np.where(mask, -rng.random(len(mask)), 0).astype("<f4").tobytes(),
        np.where(mask, 3, -1).astype("<i4").tobytes(),
    )
    runs = tuple((start, count) for start, count, value in run_lengths(sampled) if value)
    header = SampleHeader(len(mask), runs, 3, 3, temperature)
    credit = Credit(
        **{name: tuple((c, float(v)) for _, c, v in run_lengths(stream)) for name, stream in streams.items()}
    )
    return TrainSample(header, credit, msgspec.msgpack.encode(body))


def run_lengths(values: list[float] | list[bool]) -> list[tuple[int, int, float]]:
    runs: list[tuple[int, int, float]] = []
    for index, value in enumerate(values):
        if runs and runs[-1][2] == value:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, value)
        else:
            runs.append((index, 1, value))
    return runs


@st.composite
def samples(draw: st.DrawFn) -> TrainSample:
    length = draw(st.integers(1, 12))
    values = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=length, max_size=length)
    streams = {name: draw(values) for name in STREAMS if draw(st.booleans())}
    sampled = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    return make_sample(sampled, streams, draw(st.integers(0, 1000)), draw(st.sampled_from([0.7, 1.0])))


def documents(row: PackedRow) -> list[dict[str, list[float]]]:
    fields = ["token_ids", "position_ids", "sampled", "logprobs", "versions", "temperatures", *STREAMS]
    bounds = row.cu_seqlens.tolist()
    return [
        {name: getattr(row, name)[start:end].tolist() for name in fields} for start, end in itertools.pairwise(bounds)
    ]


def expand(runs: Runs, length: int) -> NDArray[np.float32]:
    return np.array([v for count, v in runs for _ in range(count)] or [0.0] * length, np.float32)


@given(st.lists(samples(), max_size=6))
def test_unpacking_gives_back_what_was_packed(row: list[TrainSample]) -> None:
    packed = assemble(row)
    assert packed.num_documents == len(row)
    for sample, document in zip(row, documents(packed), strict=True):
        segment = msgspec.msgpack.decode(sample.body, type=SampleBody).segment()
        length = sample.header.num_tokens
        assert document["token_ids"] == segment.token_ids.tolist()
        assert document["position_ids"] == list(range(length))
        assert document["sampled"] == segment.sampled.tolist()
        assert document["logprobs"] == segment.logprobs.tolist()
        assert document["versions"] == segment.versions.tolist()
        assert document["temperatures"] == [np.float32(sample.header.temperature)] * length
        assert document["advantages"] == expand(sample.credit.advantages, length).tolist()
        has_loss = np.arange(length) > 0
        for name, allowed in (("rl", segment.sampled), ("ref_kl", segment.sampled), ("ce", True)):
            expected = expand(getattr(sample.credit, name), length) * (has_loss & allowed)
            assert document[name] == expected.tolist()


@given(st.lists(samples(), max_size=6), st.randoms())
def test_order_changes_nothing_but_the_order(row: list[TrainSample], random: np.random.Generator) -> None:
    order = list(range(len(row)))
    random.shuffle(order)
    straight, shuffled = documents(assemble(row)), documents(assemble([row[i] for i in order]))
    assert [straight[i] for i in order] == shuffled
    pairs = [(sample.header, sample.credit) for sample in row]
    assert denominators(pairs) == denominators([pairs[i] for i in order])


@given(st.lists(samples(), max_size=6))
def test_denominators_are_the_sums_of_the_weights(row: list[TrainSample]) -> None:
    packed = assemble(row)
    totals = denominators((sample.header, sample.credit) for sample in row)
    for name in COMPONENTS:
        weight = float(getattr(packed, name).sum(dtype=np.float64))
        assert totals[name] == (weight or 1.0)


def test_dtypes_and_an_empty_row() -> None:
    full, empty = assemble([make_sample([False, True], {"rl": [1, 1]}, 0)]), assemble([])
    for name in PackedRow.__dataclass_fields__:
        assert getattr(full, name).dtype == getattr(empty, name).dtype, name
        assert getattr(full, name).dtype in (np.int32, np.float32, np.bool_), name
        assert len(getattr(empty, name)) == (1 if name == "cu_seqlens" else 0)


def test_a_component_nobody_uses_divides_by_one() -> None:
    sample = make_sample([False, True, True], {"rl": [1, 1, 1]}, 0)
    assert denominators([(sample.header, sample.credit)]) == {"rl": 2.0, "ce": 1.0, "ref_kl": 1.0}


def test_small_weights_are_not_raised_to_one() -> None:
    """A sequence mean has weights of 1 / T; a floor of 1 would silently scale its loss."""
    sample = make_sample([False, True, True], {"rl": [0.125] * 3}, 0)
    assert denominators([(sample.header, sample.credit)])["rl"] == 0.25


def break_credit(sample: TrainSample) -> TrainSample:
    return TrainSample(sample.header, Credit(rl=((2, 1.0),)), sample.body)


def break_body(sample: TrainSample) -> TrainSample:
    body = msgspec.msgpack.decode(sample.body, type=SampleBody)
    short = SampleBody(body.token_ids, body.sampled, body.logprobs[:-4], body.versions)
    return TrainSample(sample.header, sample.credit, msgspec.msgpack.encode(short))


def break_runs(sample: TrainSample) -> TrainSample:
    return TrainSample(msgspec.structs.replace(sample.header, runs=((0, 1),)), sample.credit, sample.body)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (break_credit, ["'rl'", "sample 1", "2 tokens of 3"]),
        (break_body, ["sample 1", "3 tokens", "8 of log-probabilities"]),
        (break_runs, ["token 0", "sample 1", "disagree"]),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(damage, words: list[str]) -> None:  # type: ignore[no-untyped-def]
    good = make_sample([False, True, True], {"rl": [1, 1, 1]}, 0)
    with pytest.raises(ValueError, match="sample 1") as error:
        assemble([good, damage(good)])
    assert all(word in str(error.value) for word in words), str(error.value)


def test_denominators_do_not_depend_on_the_order_of_the_samples() -> None:
    weights = [0.1, 0.2, 0.3, 1e-9, 0.7]
    samples = [
        (SampleHeader(2, ((1, 1),), 0, 0), Credit(rl=((2, w),), ce=((2, w),), ref_kl=((2, w),))) for w in weights
    ]
    assert len({tuple(denominators(order).values()) for order in itertools.permutations(samples)}) == 1
