"""The constraints of `instruction_following`: how each is drawn, how it is asked for, and whether a text meets it.

`KINDS` names them all. Everything is decided by a rule over the text, so the same text always gets the same verdict;
no model judges, and no language is guessed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

OPENINGS = ("Here we go:", "Good question:", "Well then:", "Let me see:", "Dear reader:", "In short:", "To begin:")
CLOSINGS = ("Hope that helps!", "Over and out.", "Thanks for asking!", "See you soon.", "Nothing more to add.")
PHRASES = ("by the way", "step by step", "day after day", "more or less", "now and then")
WANTED = (
    "river", "window", "garden", "music", "bridge", "winter", "paper", "coffee", "forest", "market", "silver",
    "morning", "teacher", "island", "engine", "mountain", "kitchen", "story", "village", "planet", "ticket",
    "doctor", "camera", "stone",
)  # fmt: skip
UNWANTED = (
    "very",
    "really",
    "many",
    "also",
    "often",
    "important",
    "great",
    "always",
    "people",
    "world",
    "most",
    "used",
)
KEYS = ("answer", "reason", "title", "summary", "example", "topic", "advice", "source")
"""Word lists that do not overlap: one constraint never asks for what another forbids. A test holds it."""

_CLOSES = "\"')*]"
_SENTENCE_END = re.compile(rf"[.!?]+[{re.escape(_CLOSES)}]*(?:\s+|$)")
_BULLET = re.compile(r"[ \t]*[-*\u2022][ \t]+\S")
_TITLE = re.compile(r"<<[^<>\n]*\w[^<>\n]*>>")
_HIGHLIGHT = re.compile(r"\*[^*\n]*\w[^*\n]*\*")
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n?```", re.DOTALL)


@dataclass(frozen=True)
class Kind:
    """One kind of constraint.

    `draw(rng, request)` gives the arguments, JSON values by name. `asks` are wordings with these names in braces.
    `met(text, arguments)` is never asked about a text without a word in it. Kinds that share a word of `takes` are
    never asked for together: both speak of one aspect, such as the case of letters, and might contradict each other.
    """

    takes: frozenset[str]
    asks: tuple[str, ...]
    draw: Callable[[random.Random, str], dict[str, Any]]
    met: Callable[[str, Mapping[str, Any]], bool]

    def ask(self, arguments: Mapping[str, Any], rng: random.Random) -> str:
        """The sentence that asks for it, one of the wordings."""
        return rng.choice(self.asks).format(**{name: shown(value) for name, value in arguments.items()})


def shown(value: Any) -> Any:
    """A list as `"a" and "b"`; anything else as it is."""
    return " and ".join(f'"{item}"' for item in value) if isinstance(value, list) else value


# --- reading a text -------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """Pieces between white space that hold a letter or a digit."""
    return [piece for piece in text.split() if any(map(str.isalnum, piece))]


def sentences(text: str) -> list[str]:
    """Pieces with a word, ended by `.`, `!` or `?` before white space or the end; the last may lack its mark.
    An abbreviation such as "e.g. " ends one too."""
    return [piece for piece in _SENTENCE_END.split(text) if words(piece)]


def paragraphs(text: str) -> list[str]:
    return [piece for piece in re.split(r"\n[ \t]*\n", text) if words(piece)]


def bullets(text: str) -> list[str]:
    """Lines that begin with `-`, `*` or a bullet sign, and a space."""
    return [line for line in text.split("\n") if _BULLET.match(line)]


def count(text: str, phrase: str) -> int:
    """How often a word or phrase occurs as whole words, ignoring case and how white space is made."""
    pattern = r"\s+".join(map(re.escape, phrase.split()))
    return len(re.findall(rf"(?<!\w){pattern}(?!\w)", text, re.IGNORECASE))


def plain(text: str) -> str:
    """Without case, margins and differences of white space."""
    return " ".join(text.casefold().split())


def begins_with(text: str, phrase: str) -> bool:
    text, phrase = plain(text), plain(phrase)
    rest = text.removeprefix(phrase)
    return text.startswith(phrase) and not (phrase[-1].isalnum() and rest[:1].isalnum())


def ends_with(text: str, phrase: str) -> bool:
    text, phrase = plain(text), plain(phrase)
    before = text.removesuffix(phrase)
    return text.endswith(phrase) and not (phrase[0].isalnum() and before[-1:].isalnum())


def is_object(text: str, keys: list[str]) -> bool:
    """Whether the text, or the inside of a code fence that is all of it, is a JSON object with exactly these keys."""
    fenced = _FENCE.fullmatch(text.strip())
    try:
        value = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and set(value) == set(keys)


def is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 2 and text.startswith('"') and text.endswith('"')


def repeats(text: str, request: str) -> bool:
    """Whether the text begins with the request, word for word, and goes on after it."""
    text = " ".join(text.split())
    return text.startswith(request) and bool(words(text.removeprefix(request)))


# --- drawing arguments ----------------------------------------------------------------------------------------


def _nothing(rng: random.Random, request: str) -> dict[str, Any]:
    return {}


def _number(*choices: int) -> Callable[[random.Random, str], dict[str, Any]]:
    return lambda rng, request: {"n": rng.choice(choices)}


def _one_of(name: str, choices: tuple[str, ...]) -> Callable[[random.Random, str], dict[str, Any]]:
    return lambda rng, request: {name: rng.choice(choices)}


def _some_of(choices: tuple[str, ...], *sizes: int) -> Callable[[random.Random, str], dict[str, Any]]:
    return lambda rng, request: {"words": rng.sample(choices, rng.choice(sizes))}


def _aspects(*names: str) -> frozenset[str]:
    return frozenset(names)


KINDS: Mapping[str, Kind] = {
    "max_words": Kind(
        _aspects("length", "phrase"),  # a phrase said three times is half of the twenty words
        ("Use at most {n} words.", "Answer in {n} words or fewer."),
        _number(20, 25, 30, 35, 40),
        lambda text, a: len(words(text)) <= a["n"],
    ),
    "min_words": Kind(
        _aspects("length"),
        ("Use at least {n} words.", "Answer in {n} words or more."),
        _number(20, 25, 30, 35),
        lambda text, a: len(words(text)) >= a["n"],
    ),
    "exact_words": Kind(
        _aspects("length", "start", "end", "words", "phrase", "title", "shape"),
        ("Answer with exactly {n} words.", "Your answer must have exactly {n} words."),
        _number(3, 4, 5, 6, 8, 10),
        lambda text, a: len(words(text)) == a["n"],
    ),
    "sentences": Kind(
        _aspects("shape"),
        ("Number of sentences: {n}.", "The number of sentences in your answer must be {n}."),
        _number(1, 2, 3, 4),
        lambda text, a: len(sentences(text)) == a["n"],
    ),
    "bullets": Kind(
        _aspects("shape"),
        (
            'Number of bullet points: {n}, each on a line that begins with "- ".',
            'List {n} points as lines starting with "- ".',
        ),
        _number(2, 3, 4),
        lambda text, a: len(bullets(text)) == a["n"],
    ),
    "paragraphs": Kind(
        _aspects("shape"),
        ("Write {n} paragraphs with a blank line between them.", "Separate {n} paragraphs by blank lines."),
        _number(2, 3),
        lambda text, a: len(paragraphs(text)) == a["n"],
    ),
    "lowercase": Kind(
        _aspects("case"),
        ("Use lowercase letters only.", "Write without any capital letter."),
        _nothing,
        lambda text, a: text == text.lower(),
    ),
    "uppercase": Kind(
        _aspects("case"),
        ("Use capital letters only.", "WRITE EVERYTHING IN CAPITAL LETTERS."),
        _nothing,
        lambda text, a: text == text.upper(),
    ),
    "starts_with": Kind(
        _aspects("start"),
        ('Begin with "{phrase}"', 'The first words of your answer must be "{phrase}"'),
        _one_of("phrase", OPENINGS),
        lambda text, a: begins_with(text, a["phrase"]),
    ),
    "ends_with": Kind(
        _aspects("end"),
        ('End with "{phrase}"', 'The last words of your answer must be "{phrase}"'),
        _one_of("phrase", CLOSINGS),
        lambda text, a: ends_with(text, a["phrase"]),
    ),
    "includes": Kind(
        _aspects("words"),
        ("Include the word {words}.", "Your answer must contain {words}."),
        _some_of(WANTED, 1, 2),
        lambda text, a: all(count(text, word) for word in a["words"]),
    ),
    "avoids": Kind(
        _aspects("unwanted"),
        ("Do not use the word {words}.", "Avoid the word {words}."),
        _some_of(UNWANTED, 1, 2),
        lambda text, a: not any(count(text, word) for word in a["words"]),
    ),
    "no_commas": Kind(
        _aspects("commas"),
        ("Do not use any comma.", "Write without commas."),
        _nothing,
        lambda text, a: "," not in text,
    ),
    "quoted": Kind(
        _aspects("start", "end"),
        ("Put your whole answer in double quotation marks.", "Wrap the whole answer in double quotation marks."),
        _nothing,
        lambda text, a: is_quoted(text),
    ),
    "json": Kind(
        _aspects("start", "end", "shape", "case", "commas", "title"),
        (
            "Answer with a JSON object that has these keys: {keys}.",
            "Format the answer as a JSON object. Its keys: {keys}.",
        ),
        lambda rng, request: {"keys": rng.sample(KEYS, rng.choice((1, 2)))},
        lambda text, a: is_object(text, a["keys"]),
    ),
    "repeats_request": Kind(
        _aspects("start", "case", "commas", "length", "shape", "unwanted", "words"),
        (
            "First repeat this request word for word, then answer it.",
            "Before you answer, repeat this request as it is.",
        ),
        lambda rng, request: {"request": request},
        lambda text, a: repeats(text, a["request"]),
    ),
    "says_times": Kind(
        _aspects("phrase"),
        ('Say "{phrase}" exactly {n} times.', 'Use the phrase "{phrase}" exactly {n} times.'),
        lambda rng, request: {"phrase": rng.choice(PHRASES), "n": rng.choice((2, 3))},
        lambda text, a: count(text, a["phrase"]) == a["n"],
    ),
    "title": Kind(
        _aspects("title"),
        ("Give it a title in double angle brackets, such as <<title>>.", "Include a title, written as <<title>>."),
        _nothing,
        lambda text, a: bool(_TITLE.search(text)),
    ),
    "highlights": Kind(
        _aspects("highlights"),
        ("Highlight {n} or more words with asterisks, as in *this*.", "Mark at least {n} words *like this*."),
        _number(1, 2, 3),
        lambda text, a: len(_HIGHLIGHT.findall(text)) >= a["n"],
    ),
}


def meets(kind: str, text: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a text meets a constraint. One without a single word meets none."""
    return bool(words(text)) and KINDS[kind].met(text, arguments)
