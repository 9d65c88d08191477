"""Changes between two sets of bits: what is applied is what was, in the shortest form; checksums see every change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prl.errors import WeightsError
from prl_channels.checksum import ROW, checksum
from prl_channels.encoding import delta
from prl_channels.encoding.delta import INTEGERS, apply, changes_between, pack_bits, unpack_bits
from prl_channels.manifest import Block


def applied(old: Tensor, new: Tensor) -> tuple[Tensor, str, int]:
    """What becomes of `old`, integers [n]; the form, and its bytes."""
    changes = changes_between(old, new)
    if changes is None:
        return old, "", 0
    payload = torch.cat([torch.zeros(8, dtype=torch.uint8), *changes.pieces])
    size, element = payload.numel() - 8, old.element_size()
    content = old.view(torch.uint8).clone()
    block = Block(changes.form, 0, content.numel(), 8, size, element, changes.count)
    apply(block, content, payload)
    return content.view(old.dtype), changes.form, size


def changed_at(count: int, element: int, places: list[int]) -> tuple[Tensor, Tensor]:
    old = torch.zeros(count, dtype=INTEGERS[element])
    new = old.clone()
    new[places] = 1
    return old, new


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Any bits, of which any share has changed, evenly or in runs."""
    element, count = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 2000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = rng.integers(0, 256, count * element, dtype=np.uint8)
    new = rng.integers(0, 256, count * element, dtype=np.uint8)
    share = draw(st.sampled_from([0.0, 0.002, 0.02, 0.1, 0.2, 0.5, 1.0]))
    run = draw(st.sampled_from([1, 7, 300]))
    kept = np.repeat(rng.random(-(-count // run)) >= share, run)[:count]
    new = np.where(np.repeat(kept, element), old, new)
    return torch.from_numpy(old).view(INTEGERS[element]), torch.from_numpy(new).view(INTEGERS[element])


@settings(derandomize=True, deadline=None, max_examples=300)
@given(pairs())
def test_any_change_of_any_bits_is_applied_and_never_larger_than_full(pair: tuple[Tensor, Tensor]) -> None:
    old, new = pair
    kept = old.clone()
    got, _, size = applied(old, new)
    assert got.equal(new), "compared as integers: every bit"
    assert old.equal(kept)
    assert size <= new.nbytes


@pytest.mark.parametrize(
    ("count", "element", "places", "form", "size"),
    [
        (1000, 2, [], "", 0),
        (1000, 2, [999], "gaps2", 4),
        (1000, 2, [*range(0, 500, 50), 999], "gaps1", 13 * 3),  # two that have not changed bridge a gap
        (1000, 2, list(range(0, 1000, 50)), "gaps1", 20 * 3),
        (100_000, 2, [0, 99_999], "gaps2", 3 * 4),
        (100_000, 4, list(range(0, 100_000, 20_000)), "gaps2", 5 * 6),
        (1000, 2, list(range(0, 1000, 4)), "mask", 250 * 2 + 128),
        (1000, 1, list(range(0, 1000, 2)), "mask", 500 + 128),
        (1000, 2, list(range(950)), "raw", 2000),
        (1, 8, [0], "raw", 8),
    ],
)
def test_the_shortest_form_is_taken(count: int, element: int, places: list[int], form: str, size: int) -> None:
    old, new = changed_at(count, element, places)
    got, found, found_size = applied(old, new)
    assert got.equal(new) and (found, found_size) == (form, size)


def test_a_gap_of_exactly_what_a_type_holds_needs_no_bridge() -> None:
    near = list(range(20))
    for gap, bridges in ((255, 0), (256, 1), (511, 1), (512, 2)):
        old, new = changed_at(2000, 4, [*near, near[-1] + gap + 1])
        got, form, size = applied(old, new)
        assert got.equal(new)
        assert (form, size) == ("gaps1", (21 + bridges) * 5)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_bits_are_packed_as_documented(flags: list[bool]) -> None:
    packed = pack_bits(torch.tensor(flags))
    assert packed.numel() == -(-len(flags) // 64) * 8
    assert np.unpackbits(packed.numpy(), bitorder="little")[: len(flags)].tolist() == flags
    assert unpack_bits(packed)[: len(flags)].tolist() == flags


@pytest.mark.parametrize(
    "change",
    [
        {"form": "gaps3"},
        {"element": 3},
        {"count": 19},
        {"form": "mask"},
        {"form": "raw"},
        {"bytes": 800},
        {"size": 59},
    ],
)
def test_a_block_that_does_not_fit_its_form_is_refused(change: dict[str, object]) -> None:
    old, new = changed_at(1000, 2, list(range(9, 1000, 50)))
    changes = changes_between(old, new)
    assert changes is not None
    payload = torch.cat(list(changes.pieces))
    good = {"form": "gaps1", "start": 0, "bytes": 2000, "offset": 0, "size": 60, "element": 2, "count": 20}
    apply(Block(**good), old.view(torch.uint8).clone(), payload)  # type: ignore[arg-type]
    with pytest.raises(WeightsError, match="block"):
        apply(Block(**{**good, **change}), old.view(torch.uint8).clone(), payload)  # type: ignore[arg-type]


def test_large_parts_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from prl_channels.layout import gather

    monkeypatch.setattr(delta, "BLOCK_BYTES", 64)
    old, new = torch.zeros(200, dtype=torch.bfloat16), torch.zeros(200, dtype=torch.bfloat16)
    new[[0, 150]] = -0.0
    ((gathered, _),) = gather([("w", new), ("b", torch.zeros(3, dtype=torch.uint8))], 1000, None)
    base = torch.cat([old.view(torch.uint8), torch.zeros(3, dtype=torch.uint8)])
    encoded = delta.encode(base, gathered.packed(), gathered)
    assert [(block.start, block.bytes) for block in encoded.blocks] == [(0, 64), (256, 64)]
    assert all(block.offset % 8 == 0 for block in encoded.blocks)
    payload = torch.cat(list(encoded.pieces))
    for block in encoded.blocks:
        apply(block, base, payload)
    assert base.equal(gathered.packed()) and checksum(base) == encoded.checksum


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 40), st.sampled_from([0, 8 * ROW - 3, 8 * ROW, 24 * ROW + 5]), st.data())
def test_a_checksum_sees_every_changed_byte_exchange_and_length(few: int, many: int, data: st.DataObject) -> None:
    content = torch.from_numpy(np.random.default_rng(few).integers(0, 256, few + many, dtype=np.uint8))
    before = checksum(content)
    assert before == checksum(content.clone())
    assert before != checksum(torch.cat([content, torch.zeros(1, dtype=torch.uint8)]))
    if content.numel():
        at = data.draw(st.integers(0, content.numel() - 1))
        other = content.clone()
        other[at] ^= 1 << data.draw(st.integers(0, 7))
        assert checksum(other) != before
        turned = content.roll(1)
        assert turned.equal(content) or checksum(turned) != before


def test_a_checksum_sees_what_is_only_in_the_highest_lane_of_words() -> None:
    """Four elements make a word: changes of only the last of each leave a plain sum 16 bits."""
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(3000):
        content = np.zeros((4, 4), np.int16)
        content[:, 3] = rng.integers(-(2**15), 2**15, 4)
        seen.add(checksum(torch.from_numpy(content).view(torch.uint8).reshape(-1)))
    assert len(seen) == 3000


def test_a_checksum_does_not_depend_on_where_the_bytes_lie() -> None:
    content = torch.arange(200, dtype=torch.uint8)
    assert checksum(content[3:100]) == checksum(content[3:100].clone())
