"""What this distribution contributes."""

from __future__ import annotations

from prl.contribution import Contribution
from prl_envs.config import AlphabetSortConfig, InstructionFollowingConfig, JsonlConfig, ReverseTextConfig

REVERSE_TEXT = Contribution(
    factory="prl_envs.reverse_text:ReverseText",
    config=ReverseTextConfig,
    summary="Write a string backwards; procedural, one turn",
)
ALPHABET_SORT = Contribution(
    factory="prl_envs.alphabet_sort:AlphabetSort",
    config=AlphabetSortConfig,
    summary="Sort names, then merge more names in; procedural, several turns",
)
INSTRUCTION_FOLLOWING = Contribution(
    factory="prl_envs.instruction_following:InstructionFollowing",
    config=InstructionFollowingConfig,
    summary="Answer a request under constraints that rules check; procedural, one turn",
)
JSONL = Contribution(
    factory="prl_envs.jsonl:build",
    config=JsonlConfig,
    summary="Your own prompts from a JSONL file, scored by a function of yours",
)
