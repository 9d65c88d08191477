"""Every kind of constraint against texts made by hand, and as properties."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl_envs import constraints
from prl_envs.config import ConstraintKind
from prl_envs.constraints import KINDS, meets

RIVER, BOTH, TITLED = {"words": ["river"]}, {"words": ["river", "stone"]}, {"keys": ["title", "reason"]}
OPENING, CLOSING = {"phrase": "Here we go:"}, {"phrase": "Over and out."}
REQUEST = {"request": "Why do we care about tea?"}
TWICE = {"phrase": "by the way", "n": 2}

MET: list[tuple[str, dict[str, Any], str]] = [
    ("max_words", {"n": 3}, "One, two -- three!"),
    ("min_words", {"n": 3}, "one\ntwo\n\nthree"),
    ("exact_words", {"n": 2}, "well-known (things)"),
    ("sentences", {"n": 1}, "No mark at the end"),
    ("sentences", {"n": 2}, 'She said "yes." It was 3.5 degrees'),
    ("sentences", {"n": 3}, "What?! Well... Fine."),
    ("bullets", {"n": 2}, "Two:\n- one\n  * two"),
    ("bullets", {"n": 1}, "\u2022 one"),
    ("paragraphs", {"n": 2}, "one\nstill one\n \n\n two"),
    ("lowercase", {}, "caf\u00e9 no. 5, all small"),
    ("uppercase", {}, "CAF\u00c9 NO. 5, ALL LARGE"),
    ("starts_with", OPENING, "  HERE we\ngo: tea"),
    ("starts_with", {"phrase": "In short"}, "In short, tea"),
    ("ends_with", CLOSING, "Tea. over and  OUT.\n"),
    ("includes", BOTH, "A RIVER, a stone-cold one"),
    ("avoids", RIVER, "Riverside and rivers"),
    ("no_commas", {}, "None; not one."),
    ("quoted", {}, ' "Tea is good." '),
    ("json", TITLED, '{"reason": 1, "title": null}'),
    ("json", TITLED, '```json\n{"reason": {}, "title": []}\n```\n'),
    ("repeats_request", REQUEST, "Why do we care\nabout tea? Because."),
    ("says_times", TWICE, "By the way, tea; by  the\nway."),
    ("title", {}, "<<On tea>>\nIt is good."),
    ("highlights", {"n": 2}, "*Tea* is **very** good"),
]

NOT_MET: list[tuple[str, dict[str, Any], str]] = [
    ("max_words", {"n": 2}, "one two three"),
    ("min_words", {"n": 3}, "one - two ..."),
    ("exact_words", {"n": 2}, "one"),
    ("exact_words", {"n": 2}, "one two three"),
    ("sentences", {"n": 1}, "One. Two"),
    ("sentences", {"n": 2}, "Only one. ..."),
    ("bullets", {"n": 2}, "- one\n-two"),
    ("bullets", {"n": 1}, "- one\n- two"),
    ("paragraphs", {"n": 2}, "one\ntwo"),
    ("paragraphs", {"n": 2}, "one\n\n***\n\ntwo\n\nthree"),
    ("lowercase", {}, "almost All"),
    ("uppercase", {}, "ALMOST ALl"),
    ("starts_with", OPENING, "And here we go: tea"),
    ("starts_with", {"phrase": "In short"}, "In shorter words"),
    ("ends_with", CLOSING, "Over and out. Bye"),
    ("ends_with", {"phrase": "see you"}, "Foresee you"),
    ("includes", BOTH, "a river and stones"),
    ("avoids", BOTH, "no stone"),
    ("no_commas", {}, "one, two"),
    ("quoted", {}, '"Tea" is good'),
    ("quoted", {}, "'Tea'"),
    ("json", TITLED, '{"reason": 1}'),
    ("json", TITLED, '{"reason": 1, "title": 2, "more": 3}'),
    ("json", TITLED, '["reason", "title"]'),
    ("json", TITLED, 'Here: {"reason": 1, "title": 2}'),
    ("json", TITLED, '{"reason": ' + "[" * 100_000),
    ("json", TITLED, "{'reason': 1, 'title': 2}"),
    ("repeats_request", REQUEST, "Why do we care about tea?"),
    ("repeats_request", REQUEST, "why do we care about tea? Because."),
    ("says_times", TWICE, "by the way"),
    ("says_times", TWICE, "by the way, by the way, by the way"),
    ("says_times", TWICE, "by the way and by the ways"),
    ("title", {}, "<On tea>"),
    ("title", {}, "<< >> tea"),
    ("highlights", {"n": 1}, "* tea\n* coffee"),
    ("highlights", {"n": 2}, "*tea* and coffee*"),
]


@pytest.mark.parametrize(("kind", "arguments", "text"), MET)
def test_it_is_met(kind: str, arguments: dict[str, Any], text: str) -> None:
    assert meets(kind, text, arguments)


@pytest.mark.parametrize(("kind", "arguments", "text"), NOT_MET)
def test_it_is_not_met(kind: str, arguments: dict[str, Any], text: str) -> None:
    assert not meets(kind, text, arguments)


def test_the_texts_above_know_every_kind_and_the_schema_does_too() -> None:
    assert {kind for kind, _, _ in MET} == {kind for kind, _, _ in NOT_MET} == set(KINDS)
    assert get_args(ConstraintKind) == tuple(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_without_a_word_meets_nothing(kind: str) -> None:
    for text in ("", " \n", "...", "- - -", '""', "{}"):
        assert not meets(kind, text, drawn(kind, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_json_and_every_wording_names_them(kind: str) -> None:
    for seed in range(20):
        arguments = drawn(kind, seed)
        assert json.loads(json.dumps(arguments)) == arguments
        for wording in KINDS[kind].asks:
            named = {name for name in arguments if name != "request"}
            assert all(f"{{{name}}}" in wording for name in named), wording
        assert "{" not in KINDS[kind].ask(arguments, random.Random(seed))


def test_no_list_asks_for_what_another_forbids() -> None:
    lists = (constraints.OPENINGS, constraints.CLOSINGS, constraints.PHRASES, constraints.WANTED, constraints.KEYS)
    for phrases in lists:
        for phrase in phrases:
            assert "," not in phrase
            assert not any(constraints.count(phrase, word) for word in constraints.UNWANTED), phrase
    for one, other in itertools.permutations((*lists, constraints.UNWANTED), 2):
        assert not any(constraints.count(phrase, part) for phrase in one for part in other if phrase != part)
    assert not set(constraints.WANTED) & set(constraints.KEYS)


TEXT = st.text(st.sampled_from('aB 1.,!?"*-<>{}:\n\u00e9\u0130\u00df'), max_size=60)


def drawn(kind: str, seed: int) -> dict[str, Any]:
    return KINDS[kind].draw(random.Random(seed), "Tell me about tea.")


@given(TEXT, st.integers(0, 99))
def test_any_text_gets_a_verdict_and_margins_do_not_change_it(text: str, seed: int) -> None:
    for kind in KINDS:
        arguments = drawn(kind, seed)
        verdict = meets(kind, text, arguments)
        assert verdict == meets(kind, f"\n\n{text}\n", arguments), kind


@given(TEXT)
def test_counts_go_together(text: str) -> None:
    number = len(constraints.words(text))
    assert len(constraints.sentences(text)) <= number
    assert len(constraints.paragraphs(text)) <= number
    for n in range(1, 8):
        at_most, at_least, exactly = (meets(k, text, {"n": n}) for k in ("max_words", "min_words", "exact_words"))
        assert exactly == (at_most and at_least)
        assert at_most or at_least or not number
        assert sum(meets("sentences", text, {"n": k}) for k in range(1, 61)) <= 1


@given(TEXT, st.sampled_from(constraints.PHRASES), st.integers(0, 4))
def test_a_phrase_said_n_times_is_counted_n_times(text: str, phrase: str, n: int) -> None:
    said = f" {text} ".join(["|", *[phrase.upper()] * n, "|"])
    assert constraints.count(said, phrase) == n


@given(TEXT, st.sampled_from([*constraints.OPENINGS, *constraints.CLOSINGS]))
def test_a_phrase_put_before_begins_and_put_after_ends(text: str, phrase: str) -> None:
    assert meets("starts_with", f"{phrase} {text}", {"phrase": phrase})
    assert meets("ends_with", f"{text} {phrase}", {"phrase": phrase})
    assert meets("quoted", f'"{phrase}{text}"', {})


@given(TEXT)
def test_case_and_commas(text: str) -> None:
    if constraints.words(text):
        assert meets("lowercase", text.lower(), {})
        assert meets("uppercase", text.upper(), {})
        assert meets("no_commas", text.replace(",", ""), {})
        assert not meets("lowercase", f"{text}A", {})


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5), min_size=1))
def test_any_object_is_one_of_its_own_keys(value: dict[str, str]) -> None:
    text = json.dumps(value)
    assert constraints.is_object(text, list(value))
    assert not constraints.is_object(text, [*value, "another key"])
    assert not constraints.is_object(f"{text} done", list(value))
