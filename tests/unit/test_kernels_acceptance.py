"""Picks over vocabulary tiles, and the walk as one mask test per node, against their twins."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_cases import DEVICE, random_window

pytest.importorskip("triton")

from specdec.kernels.acceptance import NoiseRing, PickTiles, pick_tiles, picks_naive, walk, walk_naive

NO_STOPS = torch.zeros(0, dtype=torch.long, device=DEVICE)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("vocab", [17, 8193, 10000, 151936])
def test_greedy_picks(vocab):
    scores = draw(2, 2, vocab)
    scores[0, 1, -1] = 100.0
    picks = pick_tiles(scores).picks.view(2, 2)
    assert torch.equal(picks, scores.argmax(-1))
    assert torch.equal(picks, picks_naive(scores))


@pytest.mark.parametrize("vocab", [17, 8193, 10000])
def test_the_tail_of_the_last_tile_never_wins(vocab):
    scores = torch.full((1, 3, vocab), float("-inf"), device=DEVICE)
    scores[0, 1, 3] = -1e30
    scores[0, 2, vocab - 1] = -5.0
    assert pick_tiles(scores).picks.tolist() == [0, 3, vocab - 1]
    probs = torch.zeros(1, 1, vocab, device=DEVICE)
    probs[0, 0, vocab - 2] = 1e-30
    noise = NoiseRing(torch.full((1, 1, vocab), 30.0, device=DEVICE), torch.zeros(1, dtype=torch.long, device=DEVICE))
    assert pick_tiles(probs, noise, torch.zeros(1, 1, dtype=torch.long, device=DEVICE)).picks.tolist() == [vocab - 2]


def test_the_first_of_equals_wins_across_tiles():
    scores = torch.zeros(1, 1, 10000, device=DEVICE)
    scores[0, 0, 9000] = scores[0, 0, 5000] = 1.0
    assert pick_tiles(scores).picks.tolist() == [5000]


def test_nan_is_never_a_token():
    scores = draw(1, 3, 9000)
    scores[0, 1, 8999] = float("nan")
    scores[0, 2, 0] = float("nan")
    picks = pick_tiles(scores).picks
    assert picks[0] == scores[0, 0].argmax() and picks[1:].tolist() == [-1, -1]


def test_sampled_picks_use_the_noise_of_their_index():
    probs = draw(2, 3, 8193).softmax(-1)
    variates = torch.empty(5, 2, 8193).exponential_(generator=torch.Generator().manual_seed(3)).to(DEVICE)
    noise = NoiseRing(variates, torch.tensor([3, 14], device=DEVICE))
    depths = torch.tensor([[0, 1, 1], [0, 1, 2]], device=DEVICE)
    picks = pick_tiles(probs, noise, depths).picks.view(2, 3)
    assert torch.equal(picks, picks_naive(probs, noise, depths))
    expected = (probs[1, 2] / variates[(14 + 2) % 5, 1]).argmax()
    assert picks[1, 2] == expected
    assert len(set(picks.flatten().tolist())) > 1


def walked(picks, window, limits, stops=NO_STOPS):
    # Two tiles, of which the second is empty, stand for a vocabulary search that is not finished.
    flat = picks.flatten()[:, None].int()
    tiles = PickTiles(
        torch.tensor([[1.0, 0.0]], device=DEVICE).repeat(len(flat), 1), torch.cat([flat, torch.zeros_like(flat)], 1)
    )
    found = walk(tiles, window.tokens, window.parents, window.ancestor_bits, window.num_nodes, limits, stops)
    expected = walk_naive(picks, window.tokens, window.parents, window.num_nodes, limits, stops)
    for name in ("picks", "path", "num_kept", "next_tokens", "stopped"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    return found


def follow(window, share, seed):
    """Picks that follow a random child with probability `share`, so that paths of all lengths occur."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(60, 99, window.tokens.shape, generator=generator)
    for row in range(picks.shape[0]):
        for node in range(picks.shape[1]):
            children = [j for j in range(1, picks.shape[1]) if window.parents[row, j] == node]
            if children and torch.rand((), generator=generator) < share:
                picks[row, node] = window.tokens[
                    row, children[int(torch.randint(len(children), (), generator=generator))]
                ]
    return picks.to(DEVICE)


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("width", [1, 2, 8, 33, 64])
def test_walks_of_random_trees(width, chain):
    rows = 6
    longest = 0
    for seed in range(3):
        window = random_window(
            [5] * rows, width, seed, chain, num_nodes=[width, width, max(1, width // 2), 1, width, width], vocab=90
        )
        limits = torch.tensor([100, 3, 100, 100, 1, 0], device=DEVICE)
        found = walked(follow(window, 0.95, seed), window, limits)
        longest = max(longest, int(found.num_kept.max()))
        assert found.num_kept[5] == 0 and found.stopped[5] == 1
    assert longest > 1 or width == 1


def test_a_stop_ends_the_walk_and_is_the_next_token():
    window = random_window([5], 6, chain=True)
    picks = torch.cat([window.tokens[:, 1:], torch.tensor([[77]], device=DEVICE)], 1)
    assert walked(picks, window, torch.tensor([9], device=DEVICE)).num_kept.tolist() == [6]
    stops = torch.tensor([98, int(window.tokens[0, 3])], device=DEVICE)
    found = walked(picks, window, torch.tensor([9], device=DEVICE), stops)
    assert (
        found.num_kept.tolist() == [3]
        and found.next_tokens.tolist() == [int(stops[1])]
        and found.stopped.tolist() == [1]
    )


def test_the_limit_cuts_the_walk():
    window = random_window([5], 6, chain=True)
    picks = torch.cat([window.tokens[:, 1:], torch.tensor([[77]], device=DEVICE)], 1)
    found = walked(picks, window, torch.tensor([4], device=DEVICE))
    assert found.num_kept.tolist() == [4] and found.next_tokens.tolist() == [int(window.tokens[0, 4])]
    assert found.stopped.tolist() == [1]
