"""Proposers of drafts for the demo's speculative steps, and which drafts greedy decoding accepts."""

import random
from collections.abc import Sequence


def ngram_drafts(tokens: Sequence[int], count: int, longest: int = 3) -> list[int]:
    """Up to `count` tokens that followed the last earlier occurrence of the longest suffix of at most `longest` tokens.

    Empty where not even the last token occurred before.
    """
    for length in range(min(longest, len(tokens) - 1), 0, -1):
        suffix = list(tokens[-length:])
        for start in range(len(tokens) - length - 1, -1, -1):
            if list(tokens[start : start + length]) == suffix:
                return list(tokens[start + length : start + length + count])
    return []


def random_drafts(draw: random.Random, vocab_size: int, count: int) -> list[int]:
    """`count` random tokens."""
    return [draw.randrange(vocab_size) for _ in range(count)]


def with_wrong(drafts: Sequence[int], place: int, vocab_size: int) -> list[int]:
    """The drafts with another token at one place, where they reach so far."""
    return [(token + 1) % vocab_size if at == place else token for at, token in enumerate(drafts)]


def accept_greedily(drafts: Sequence[int], best: Sequence[int]) -> list[int]:
    """Tokens that a speculative step yields: the drafts that equal the model's choices, then the model's own next token.

    best: the model's most likely token after the step's first token and after each draft.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1
    return [*drafts[:accepted], best[accepted]]
