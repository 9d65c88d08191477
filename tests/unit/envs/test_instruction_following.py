from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.errors import ConfigError
from prl.testing.scripted import play
from prl.types import Episode, StopReason, Task
from prl_envs.config import InstructionFollowingConfig
from prl_envs.constraints import KINDS, meets
from prl_envs.instruction_following import InstructionFollowing, draw_kinds


def env(**settings: Any) -> InstructionFollowing:
    return InstructionFollowing(InstructionFollowingConfig(**settings))


def task(**constraints: dict[str, Any]) -> Task:
    return Task("t", "p", {"constraints": [{"kind": kind, "arguments": a} for kind, a in constraints.items()]})


def episode(text: str, stop: StopReason = "stop", **settings: Any) -> Episode:
    """What an answer is worth where lowercase letters and at most two words were asked for."""
    asked = task(lowercase={}, max_words={"n": 2})
    return asyncio.run(play(env(**settings), asked, lambda request, turn: text, stop_reason=stop))


def test_the_reward_is_the_share_of_what_is_met_or_all_or_nothing() -> None:
    half = episode("two Words")
    assert half.rollouts[0].reward == 0.5
    assert half.metrics == {"share": 0.5, "strict": 0, "finished": 1, "met/lowercase": 0, "met/max_words": 1}
    assert episode("two words").rollouts[0].reward == 1.0
    assert episode("two Words", reward="strict").rollouts[0].reward == 0.0
    assert episode("two words", reward="strict").rollouts[0].reward == 1.0
    assert episode("").rollouts[0].reward == 0.0


def test_an_answer_that_was_cut_off_meets_nothing_unless_it_counts() -> None:
    cut = episode("two words", "length")
    assert cut.rollouts[0].reward == 0.0
    assert cut.metrics == {"share": 0, "strict": 0, "finished": 0, "met/lowercase": 0, "met/max_words": 0}
    counted = episode("two words", "length", cut_off="counts")
    assert (counted.rollouts[0].reward, counted.metrics["finished"]) == (1.0, 0.0)


def test_an_answer_that_is_too_short_meets_nothing() -> None:
    assert episode("two words", least_words=3).rollouts[0].reward == 0.0
    assert episode("two words", least_words=2).rollouts[0].reward == 1.0


def test_the_splits_share_no_request() -> None:
    it = env()
    asked = {split: {t.data["request"] for t in it.tasks(split)[:1000]} for split in ("train", "eval")}  # type: ignore[arg-type]
    assert not asked["train"] & asked["eval"]
    assert len(asked["train"]) > 400 and len(asked["eval"]) > 40
    assert all("," not in request and not request.isupper() for request in asked["train"] | asked["eval"])


def test_tasks_depend_on_the_seed_alone() -> None:
    one, two, other = env(seed=1), env(seed=1), env(seed=2)
    assert list(one.tasks("train")[:50]) == list(two.tasks("train")[:50])
    assert [t.prompt for t in one.tasks("train")[:50]] != [t.prompt for t in other.tasks("train")[:50]]
    assert one.tasks("train")[999_999].id == "train-999999"


def test_a_task_has_as_many_kinds_as_asked_for_and_only_those() -> None:
    kinds = ("lowercase", "no_commas", "max_words", "quoted")
    it = env(kinds=kinds, min_constraints=2, max_constraints=4)
    drawn = [[c["kind"] for c in t.data["constraints"]] for t in it.tasks("train")[:200]]
    assert {len(names) for names in drawn} == {2, 3, 4}
    assert {name for names in drawn for name in names} == set(kinds)
    everything = env(max_constraints=19)
    assert {c["kind"] for t in everything.tasks("train")[:300] for c in t.data["constraints"]} == set(KINDS)


@given(st.permutations(tuple(KINDS)), st.integers(1, 19), st.integers(0, 2**32))
def test_kinds_that_speak_of_one_aspect_are_not_drawn_together(kinds: list[str], number: int, seed: int) -> None:
    drawn = draw_kinds(tuple(kinds), number, random.Random(seed))
    assert 1 <= len(drawn) <= number
    aspects = [aspect for kind in drawn for aspect in KINDS[kind].takes]
    assert len(aspects) == len(set(aspects))


@given(st.integers(0, 999_999))
def test_every_task_has_an_answer(index: int) -> None:
    """Whatever is asked for together, one text meets all of it."""
    asked = {c["kind"]: c["arguments"] for c in HARD.tasks("train")[index].data["constraints"]}
    text = answer(asked)
    missed = [kind for kind, arguments in asked.items() if not meets(kind, text, arguments)]
    assert not missed, (asked, text)


HARD = env(min_constraints=1, max_constraints=19)


def answer(asked: dict[str, dict[str, Any]]) -> str:
    """A text that meets constraints that were drawn together."""
    if "exact_words" in asked:
        pieces = ["so"] * asked["exact_words"]["n"]
        for i in range(asked.get("highlights", {"n": 0})["n"]):
            pieces[i] = "*so*"
        return cased(" ".join(pieces), asked)
    pieces = ["so", *["*so*"] * asked.get("highlights", {"n": 0})["n"]]
    pieces += asked.get("includes", {"words": []})["words"]
    pieces += [asked["says_times"]["phrase"]] * asked["says_times"]["n"] if "says_times" in asked else []
    if "title" in asked:
        pieces.append("<<so>>")
    pieces += ["so"] * asked.get("min_words", {"n": 0})["n"]
    text = " ".join(pieces)
    if "json" in asked:
        return json.dumps(dict.fromkeys(asked["json"]["keys"], ""))[:-3] + f'"{text}"' + "}"
    if "sentences" in asked:
        text = "so. " * (asked["sentences"]["n"] - 1) + text
    if "bullets" in asked:
        text = "so" + "\n- so" * (asked["bullets"]["n"] - 1) + "\n- " + text
    if "paragraphs" in asked:
        text = "so\n\n" * (asked["paragraphs"]["n"] - 1) + text
    if "starts_with" in asked:
        text = f"{asked['starts_with']['phrase']} {text}"
    if "repeats_request" in asked:
        text = f"{asked['repeats_request']['request']} {text}"
    if "ends_with" in asked:
        text = f"{text} {asked['ends_with']['phrase']}"
    return cased(f'"{text}"' if "quoted" in asked else text, asked)


def cased(text: str, asked: dict[str, dict[str, Any]]) -> str:
    return text.lower() if "lowercase" in asked else text.upper() if "uppercase" in asked else text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kinds": ()}, "is empty; name one kind"),
        ({"kinds": ("json", "json")}, "json occurs twice"),
        ({"kinds": ("haiku",)}, "Input should be"),
        ({"min_constraints": 4}, "max_constraints is 3, less than min_constraints 4"),
        ({"kinds": ("json",), "max_constraints": 2}, "max_constraints is 2, and there are 1 kinds"),
        ({"least_words": 4}, "is 4, and exact_words asks for 3 to 10"),
        ({"held_out": 1.0}, "less than 1"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InstructionFollowingConfig(**settings)


def test_a_share_that_leaves_a_split_empty_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves no request of .* to the eval split"):
        env(held_out=1e-6)
