"""The trees of the EAGLE-3 checks were worked out by hand: derived here once more, from how candidates are numbered."""

from __future__ import annotations

from itertools import pairwise

import pytest

from builder.smoke.gpu_tree import (
    DEPTH,
    FOLLOWED,
    INDEX,
    KEPT,
    LENGTHS,
    NEXT,
    PLACES,
    SEES,
    SIBLING,
    STEPS,
    TOKENS,
    TOPK,
)


def parents(request: int) -> list[int]:
    """The parent of each token: the verified one is 0, which has none."""
    kept, followed = KEPT[request], FOLLOWED[request]
    found = [-1]
    for candidate in kept:
        # Candidates come in groups of TOPK: the first step's, then one group for each that was followed.
        group = candidate // TOPK
        found.append(0 if group == 0 else kept.index(followed[group]) + 1)
    return found


def ancestors(tree: list[int], token: int) -> list[int]:
    """A token and those above it, down from itself."""
    found = [token]
    while (token := tree[token]) >= 0:
        found.append(token)
    return found


@pytest.mark.parametrize("request_number", [0, 1])
def test_the_trees(request_number: int) -> None:
    tree = parents(request_number)
    assert len(tree) == TOKENS
    above = [ancestors(tree, token) for token in range(TOKENS)]
    assert [set(each) for each in above] == SEES[request_number]
    assert [LENGTHS[request_number] + len(each) - 1 for each in above] == PLACES[request_number]
    children = [[token for token in range(TOKENS) if tree[token] == parent] for parent in range(TOKENS)]
    assert [each[0] if each else -1 for each in children] == NEXT[request_number]
    siblings = dict(pair for each in children for pair in pairwise(each))
    assert [siblings.get(token, -1) for token in range(TOKENS)] == SIBLING[request_number]
    assert max(len(each) for each in above) == DEPTH + 1 == STEPS
    assert len(FOLLOWED[request_number]) == TOPK * (DEPTH - 1) + 1


def test_places_in_the_batch() -> None:
    assert [cell for row in INDEX for cell in row] == list(range(2 * TOKENS))
