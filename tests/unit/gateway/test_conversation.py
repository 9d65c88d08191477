"""Tokens of a conversation: what was sampled is what is kept, context is what the template adds, breaks are forks."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from prl.errors import EpisodeFailed
from prl.messages import Generation
from prl.types import Message, SampleBody, Sampling, Segment
from prl_gateway.conversation import Conversation
from prl_gateway.render import TemplateRenderer
from prl_gateway.template import ChatTokenizer

SAMPLING = Sampling(max_tokens=16)


class Dialogue:
    """Drives one conversation the way the service does."""

    def __init__(self, kit: Any, tokenizer: ChatTokenizer) -> None:
        self.kit = kit
        self.tokenizer = tokenizer
        self.renderer = TemplateRenderer(tokenizer)
        self.end = self.renderer.end_of_turn
        self.conversation = Conversation()

    def turn(
        self, text: str, tokens: list[int], stop: str = "stop", *, keep: int | None = None, version: int = 0,
        sampling: Sampling = SAMPLING,
    ) -> Any:  # fmt: skip
        keep = len(self.conversation.messages) if keep is None else keep
        pending = self.conversation.prepare(keep, [Message("user", text)], sampling, self.renderer)
        return self.conversation.commit(pending, self.kit.says(tokens, stop, version), self.renderer)

    def segment(self, index: int = -1) -> Segment:
        body = self.conversation.segments[index].body()
        return msgspec.msgpack.decode(body, type=SampleBody).segment()

    def text(self, index: int = -1) -> str:
        return self.tokenizer.decode(self.segment(index).token_ids.tolist())


@pytest.fixture
def talk(kit: Any, any_tokenizer: ChatTokenizer) -> Dialogue:
    return Dialogue(kit, any_tokenizer)


def test_one_turn(talk: Dialogue) -> None:
    words = [*talk.tokenizer.encode("hi"), talk.end]
    turn = talk.turn("hello", words, version=3)
    assert (turn.text, turn.stop_reason, turn.num_tokens) == ("hi", "stop", len(words))
    segment = talk.segment()
    prompt = len(segment.token_ids) - len(words)
    assert turn.num_prompt_tokens == prompt
    assert segment.sampled.tolist() == [False] * prompt + [True] * len(words)
    assert segment.versions.tolist() == [-1] * prompt + [3] * len(words)
    np.testing.assert_array_equal(segment.logprobs, np.float32([0] * prompt + [-0.5] * len(words)))
    header = talk.conversation.segments[0].header()
    assert (header.num_tokens, header.runs, header.min_version, header.max_version) == (
        len(segment.token_ids), ((prompt, len(words)),), 3, 3,
    )  # fmt: skip


def test_turns_extend_to_the_text_the_template_renders(talk: Dialogue) -> None:
    for index in range(3):
        talk.turn(f"question {index}", [*talk.tokenizer.encode(f"answer {index}"), talk.end], version=index)
    assert len(talk.conversation.segments) == 1
    expected = talk.tokenizer.render(talk.conversation.messages, prompt=False)
    assert expected.startswith(talk.text())
    assert not expected[len(talk.text()) :].strip()
    header = talk.conversation.segments[0].header()
    assert (len(header.runs), header.min_version, header.max_version) == (3, 0, 2)


def test_sampled_tokens_are_never_tokenised_again(talk: Dialogue) -> None:
    """T16: "abc" sampled as three letters, where the tokenizer would make one token of it."""
    letters = [talk.tokenizer.encode(letter)[0] for letter in "abc"]
    assert talk.tokenizer.encode("abc") != letters
    assert talk.turn("spell it", [*letters, talk.end]).text == "abc"
    talk.turn("again", [*letters, talk.end])
    segment = talk.segment()
    assert segment.token_ids[segment.sampled].tolist() == [*letters, talk.end] * 2
    assert len(talk.conversation.segments) == 1


def test_truncated_turn_is_ended_by_an_unsampled_token(talk: Dialogue) -> None:
    words = talk.tokenizer.encode("cut of")
    assert talk.turn("hello", words, "length").stop_reason == "length"
    talk.turn("go on", [*words, talk.end])
    segment = talk.segment()
    after = int(np.flatnonzero(segment.sampled)[len(words) - 1]) + 1
    assert segment.token_ids[after] == talk.end
    assert not segment.sampled[after]
    assert (segment.token_ids == talk.end).sum() == talk.text().count("<|end|>")


def test_another_end_token_is_kept_and_the_turn_still_ended(talk: Dialogue) -> None:
    eos = talk.tokenizer.added["<|eos|>"]
    assert talk.turn("hello", [*talk.tokenizer.encode("hi"), eos]).text == "hi"
    talk.turn("go on", [talk.end])
    assert "hi<|eos|><|end|>" in talk.text()


def test_empty_answer(talk: Dialogue) -> None:
    assert talk.turn("hello", [talk.end]).text == ""
    talk.turn("more", [talk.end])
    assert len(talk.conversation.segments) == 1


def test_template_that_rewrites_history_forks(kit: Any) -> None:
    """T15: reasoning vanishes from earlier turns, so every turn is a sample of its own and none is rendered into it."""
    talk = Dialogue(kit, kit.tokenizer(kit.STRIPS_THINKING))
    for index in range(3):
        talk.turn(f"q{index}", [*talk.tokenizer.encode(f"<think>t{index}</think>\na{index}"), talk.end])
    assert (len(talk.conversation.segments), talk.conversation.forks) == (3, 2)
    for index in range(3):
        segment = talk.segment(index)
        sampled = talk.tokenizer.decode(segment.token_ids[segment.sampled].tolist())
        assert sampled == f"<think>t{index}</think>\na{index}<|end|>"
    assert "t0" not in talk.text(1)
    assert "a0" in talk.text(1)


def test_edited_history_reuses_exact_tokens_as_context(talk: Dialogue) -> None:
    letters = [talk.tokenizer.encode(letter)[0] for letter in "abc"]
    talk.turn("one", [*letters, talk.end])
    talk.turn("two", [*talk.tokenizer.encode("first try"), talk.end])
    talk.turn("two", [*talk.tokenizer.encode("second try"), talk.end], keep=2)
    assert talk.conversation.forks == 1
    assert [message.content for message in talk.conversation.messages] == ["one", "abc", "two", "second try"]
    first, second = talk.segment(0), talk.segment(1)
    shared = int(np.flatnonzero(first.sampled)[len(letters)]) + 1
    assert second.token_ids[:shared].tolist() == first.token_ids[:shared].tolist()
    assert not second.sampled[:shared].any()
    talk.turn("three", [talk.end])  # goes on where the second try ended
    assert len(talk.conversation.segments) == 2
    talk.turn("start over", [talk.end], keep=0)
    assert (len(talk.conversation.segments), talk.conversation.forks) == (3, 2)


def test_another_temperature_starts_another_segment(talk: Dialogue) -> None:
    talk.turn("one", [talk.end])
    talk.turn("two", [talk.end], sampling=Sampling(temperature=0.0))
    assert len(talk.conversation.segments) == 1  # greedy log-probabilities are at temperature 1
    talk.turn("three", [talk.end], sampling=Sampling(temperature=0.5))
    headers = [segment.header() for segment in talk.conversation.segments]
    assert [header.temperature for header in headers] == [1.0, 0.5]
    assert headers[1].num_sampled == 1


def test_a_failed_turn_changes_nothing(talk: Dialogue) -> None:
    talk.turn("one", [talk.end])
    before = talk.conversation.segments[0].body()
    talk.conversation.prepare(2, [Message("user", "never answered")], SAMPLING, talk.renderer)
    assert talk.conversation.segments[0].body() == before
    assert len(talk.conversation.messages) == 2


def test_messages_that_are_not_held(talk: Dialogue) -> None:
    with pytest.raises(EpisodeFailed) as caught:
        talk.turn("hello", [talk.end], keep=4)
    assert caught.value.reason == "lost_conversation"
    assert caught.value.retryable


def test_every_token_keeps_the_version_and_the_log_probability_that_it_was_sampled_with(talk: Dialogue) -> None:
    """Weights were swapped in the middle of both turns: the header spans the versions, the body has each in place."""
    conversation, tokens = talk.conversation, [*talk.tokenizer.encode("abc"), talk.end]
    count = len(tokens)
    given: list[tuple[list[float], list[int]]] = []
    for turn in range(2):
        logprobs = [-(turn + (index + 1) / 8) for index in range(count)]
        versions = [3 + turn] * (count - 1) + [4 + turn]
        given.append((logprobs, versions))
        keep = len(conversation.messages)
        pending = conversation.prepare(keep, [Message("user", "more")], SAMPLING, talk.renderer)
        conversation.commit(pending, Generation(tokens, logprobs, versions, "stop"), talk.renderer)
    (kept,) = conversation.segments
    header, segment = kept.header(), talk.segment()
    assert (header.min_version, header.max_version, header.num_sampled) == (3, 5, 2 * count)
    assert segment.versions[segment.sampled].tolist() == given[0][1] + given[1][1]
    np.testing.assert_array_equal(segment.logprobs[segment.sampled], np.float32(given[0][0] + given[1][0]))
    assert set(segment.versions[~segment.sampled].tolist()) == {-1} and not segment.logprobs[~segment.sampled].any()


def test_an_answer_that_the_environment_replaced_is_not_what_the_model_continues(talk: Dialogue) -> None:
    talk.turn("one", [*talk.tokenizer.encode("sampled"), talk.end])
    new = [Message("assistant", "replaced"), Message("user", "two")]
    pending = talk.conversation.prepare(1, new, SAMPLING, talk.renderer)
    prompt = talk.tokenizer.decode(pending.prompt_ids)
    assert "replaced" in prompt and "sampled" not in prompt
    talk.conversation.commit(pending, talk.kit.says([talk.end]), talk.renderer)
    assert talk.conversation.forks == 1 and talk.segment().sampled.sum() == 1
