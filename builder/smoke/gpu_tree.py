"""Checks of EAGLE-3's tree operations in sgl_kernel, on two drafted trees that were worked out by hand.

A draft of two branches a step (`topk` 2), three steps, five tokens kept beside the verified one. Candidates are numbered by
step: 0 and 1 are the first step's; 2, 3 come after the first of these that was followed, 4, 5 after the second; 6, 7 and 8,
9 after the two of the second step that were followed, which the row `FOLLOWED` names behind its first three.

    request 1, kept 0 1 2 4 6         request 2, kept 0 2 3 6 8
        0 ─┬─ 1 ── 3 ── 5                 0 ── 1 ─┬─ 2 ── 4
           └─ 2 ── 4                              └─ 3 ── 5
"""

from __future__ import annotations

from typing import Any

from builder.smoke.gpu_case import Look
from builder.smoke.gpu_sglang import has, normal, start

TOPK, DEPTH, TOKENS, STEPS = 2, 3, 6, 4
FOLLOWED = [[-1, 0, 1, 2, 4], [-1, 0, 1, 2, 3]]
KEPT = [[0, 1, 2, 4, 6], [0, 2, 3, 6, 8]]
LENGTHS = [7, 3]
"""Tokens that each request has already."""
NEXT = [[1, 3, 4, 5, -1, -1], [1, 2, 4, 5, -1, -1]]
"""The first child of each token of a tree."""
SIBLING = [[-1, 2, -1, -1, -1, -1], [-1, -1, 3, -1, -1, -1]]
PLACES = [[7, 8, 8, 9, 9, 10], [3, 4, 5, 5, 6, 6]]
SEES = [
    [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 2, 4}, {0, 1, 3, 5}],
    [{0}, {0, 1}, {0, 1, 2}, {0, 1, 3}, {0, 1, 2, 4}, {0, 1, 3, 5}],
]
"""The tokens of its tree that each one attends to."""
INDEX = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
FULL, TREE_ALONE = 0, 1
"""Modes of the mask: with all that came before, or without."""


def build(look: Look) -> None:
    """The tree from what was kept: places, links, and the mask in two modes."""
    torch, package, _ = start(look)
    has(package, "build_tree_kernel_efficient")

    def there(rows: Any, dtype: Any = torch.int64) -> Any:
        return torch.tensor(rows, dtype=dtype, device="cuda")

    for mode, name in ((FULL, "full"), (TREE_ALONE, "the tree alone")):
        before = [length if mode == FULL else 0 for length in LENGTHS]
        mask = torch.ones(sum(before) * TOKENS + 2 * TOKENS * TOKENS, dtype=torch.bool, device="cuda")
        places = torch.full((2 * TOKENS,), -9, dtype=torch.int64, device="cuda")
        index, following, sibling = (torch.full((2, TOKENS), -1, dtype=torch.int64, device="cuda") for _ in range(3))
        package.build_tree_kernel_efficient(
            there(FOLLOWED),
            there(KEPT),
            there(LENGTHS),
            mask,
            places,
            index,
            following,
            sibling,
            TOPK,
            DEPTH,
            TOKENS,
            mode,
        )
        look.equal(f"{name}: places", places.view(2, TOKENS), PLACES)
        look.equal(f"{name}: index", index, INDEX)
        look.equal(f"{name}: first children", following, NEXT)
        look.equal(f"{name}: siblings", sibling, SIBLING)
        known = [
            [True] * before[request] + [other in sees for other in range(TOKENS)]
            for request in range(2)
            for sees in SEES[request]
        ]
        look.equal(f"{name}: mask", mask, [cell for row in known for cell in row])


def verify(look: Look) -> None:
    """The longest branch that the target would have chosen itself: three deep, none, and by way of a sibling."""
    torch, package, _ = start(look)
    has(package, "verify_tree_greedy")
    drafted = [[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]]
    for name, chosen, accepted, count, predicted in (
        (
            "a branch by way of a sibling; nothing",
            [[12, 0, 14, 0, 8, 0], [99, 0, 0, 0, 0, 0]],
            [[0, 2, 4, -1], [6, -1, -1, -1]],
            [2, 0],
            [12, -1, 14, -1, 8, -1, 99, -1, -1, -1, -1, -1],
        ),
        (
            "one token; the whole depth",
            [[11, 77, 0, 0, 0, 0], [21, 23, 0, 25, 0, 5]],
            [[0, 1, -1, -1], [6, 7, 9, 11]],
            [1, 3],
            [11, 77, -1, -1, -1, -1, 21, 23, -1, 25, -1, 5],
        ),
    ):

        def there(rows: Any, dtype: Any = torch.int64) -> Any:
            return torch.tensor(rows, dtype=dtype, device="cuda")

        predicts = torch.full((2 * TOKENS,), -1, dtype=torch.int32, device="cuda")
        taken = torch.full((2, STEPS), -1, dtype=torch.int32, device="cuda")
        number = torch.full((2,), -1, dtype=torch.int32, device="cuda")
        package.verify_tree_greedy(
            predicts, taken, number, there(drafted), there(INDEX), there(NEXT), there(SIBLING), there(chosen)
        )
        look.equal(f"{name}: accepted", taken, accepted)
        look.equal(f"{name}: how many", number, count)
        look.equal(f"{name}: predicted", predicts, predicted)


def sampling(look: Look) -> None:
    """Acceptance by probability: coins that fall on the known side of each bound, and a rest of which one token is left."""
    torch, package, _ = start(look)
    has(package, "tree_speculative_sampling_target_only")
    words = 32
    target = torch.zeros(2, TOKENS, words)
    # The verified token: 11 with 1/4 is refused by a coin of 0.6, 12 brings it to 3/4.
    target[0, 0, [11, 12, 7]] = torch.tensor([0.25, 0.5, 0.25])
    # Then 14 with 1/2 is refused by a coin of 0.9, and all that is left of the target is 3.
    target[0, 2, [14, 3]] = 0.5
    target[1, 0, 21] = 1.0
    target[1, 1, [22, 23]] = torch.tensor([0.125, 0.875])
    target[1, 3, 25] = 1.0
    target[1, 5, 9] = 1.0
    for row in (target[0, 1], target[0, 3], target[0, 4], target[0, 5], target[1, 2], target[1, 4]):
        row[31] = 1.0
    coins = torch.tensor([[0.6, 0.5, 0.9, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.3, 0.5, 0.5]])
    for last in (0.01, 0.5, 0.99):
        predicts = torch.full((2 * TOKENS,), -1, dtype=torch.int32, device="cuda")
        taken = torch.full((2, STEPS), -1, dtype=torch.int32, device="cuda")
        number = torch.full((2,), -1, dtype=torch.int32, device="cuda")
        lists = [[[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]], INDEX, NEXT, SIBLING]
        package.tree_speculative_sampling_target_only(
            predicts,
            taken,
            number,
            *(torch.tensor(rows, dtype=torch.int64, device="cuda") for rows in lists),
            coins.cuda(),
            torch.full((2,), last, device="cuda"),
            target.cuda(),
            torch.zeros(2, TOKENS, words, device="cuda"),
            1.0,
            1.0,
            True,
        )
        look.equal(f"last coin {last}: accepted", taken, [[0, 2, -1, -1], [6, 7, 9, 11]])
        look.equal(f"last coin {last}: how many", number, [1, 3])
        look.equal(f"last coin {last}: predicted", predicts, [12, -1, 3, -1, -1, -1, 21, 23, -1, 25, -1, 9])


def renorm(look: Look) -> None:
    """Probabilities cut to the best k, and to those that make up p, as sgl_kernel's own kernels do it."""
    torch, _, operators = start(look)
    probabilities = normal(torch, (9, 1000), 1).mul(2).softmax(-1)
    ordered = probabilities.double().sort(-1, descending=True).values
    with look.each("top_k_renorm_probs"):
        for best in (1, 10, 500):
            out = torch.empty(9, 1000, device="cuda")
            operators.top_k_renorm_probs.default(probabilities.cuda(), out, None, best)
            kept = probabilities.double() * (probabilities.double() >= ordered[:, best - 1 : best])
            look.near(f"best {best}", out, kept / kept.sum(-1, keepdim=True), rel=1e-3, abs=1e-7)
    with look.each("top_p_renorm_probs"):
        out = torch.empty(9, 1000, device="cuda")
        operators.top_p_renorm_probs.default(probabilities.cuda(), out, None, 0.9)
        number = (ordered.cumsum(-1) < 0.9).sum(-1) + 1
        got = out.cpu()
        look.near("sums", got.sum(-1), torch.ones(9), rel=1e-3)
        # Where the sum meets p, one token more or less is a matter of rounding.
        off = ((got > 0).sum(-1) - number).abs().max()
        look.true("how many are kept", int(off) <= 1, f"off by {int(off)}")
