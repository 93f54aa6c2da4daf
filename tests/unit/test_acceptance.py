"""The ragged acceptance function against a loop in plain Python."""

import logging
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import ConfigError
from specdec.verify.acceptance import accept_chains, acceptance


def accepted_by_loop(rows: list[list[int]], sampled: list[list[int]]) -> tuple[list[int], list[bool]]:
    counts, mask = [], []
    for drafts, samples in zip(rows, sampled, strict=True):
        count = 0
        while count < min(len(drafts), len(samples)) and drafts[count] == samples[count] and samples[count] >= 0:
            count += 1
        counts.append(count)
        mask += [i < count for i in range(len(drafts))]
    return counts, mask


def flat(rows: list[list[int]]) -> tuple[torch.Tensor, list[int]]:
    return torch.tensor([token for row in rows for token in row], dtype=torch.long), [len(row) for row in rows]


@st.composite
def ragged_batches(draw):
    """Up to 64 rows × 64 drafts over few tokens, so that matches, late matches and mismatches all happen."""
    num_rows = draw(st.integers(1, 64))
    seed = draw(st.integers(0, 2**31))
    longest, num_columns = draw(st.integers(0, 64)), draw(st.integers(0, 66))
    agreement = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (num_rows,), generator=random).tolist()
    sampled = torch.randint(-1, 4, (num_rows, num_columns), generator=random)
    other = torch.randint(-1, 4, (num_rows, 64), generator=random)
    agrees = torch.rand(num_rows, 64, generator=random) < agreement
    padded = torch.nn.functional.pad(sampled, (0, 66))[:, :64]
    drafts = torch.where(agrees, padded, other)
    return [row[:n] for row, n in zip(drafts.tolist(), lengths, strict=True)], sampled.tolist()


@given(ragged_batches())
@settings(max_examples=60, deadline=None)
def test_equals_the_loop(batch):
    rows, sampled = batch
    tokens, lengths = flat(rows)
    samples = torch.tensor(sampled, dtype=torch.long).reshape(len(rows), -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts, mask = acceptance(tokens, lengths, samples, return_mask=True)
    assert (counts.tolist(), mask.tolist()) == accepted_by_loop(rows, sampled)


CASES = {
    "all accepted": ([[1, 2, 3], [4, 5]], [[1, 2, 3, 9], [4, 5, 7, 9]], [3, 2]),
    "none accepted": ([[1, 2, 3], [4, 5]], [[0, 0, 0, 0], [0, 0, 0, 0]], [0, 0]),
    "rows without drafts": ([[], [4], []], [[1, 1], [4, 1], [1, 1]], [0, 1, 0]),
    "nobody drafted": ([[], []], [[1], [2]], [0, 0]),
    "first draft of each row wrong": ([[1, 2], [4, 5]], [[0, 2, 0], [0, 5, 0]], [0, 0]),
    "a match behind a mismatch does not count": ([[1, 2, 3]], [[1, 0, 3, 0]], [1]),
    "a row's first draft is not its neighbour's": ([[7], [8]], [[8, 0], [8, 0]], [0, 1]),
    "a placeholder is no sample, even for an equal draft": ([[-1, 2]], [[-1, 2, 0]], [0]),
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    rows, sampled, expected = CASES[name]
    tokens, lengths = flat(rows)
    counts, mask = acceptance(tokens, torch.tensor(lengths), torch.tensor(sampled), return_mask=True)
    assert counts.tolist() == expected
    assert mask.tolist() == [i < count for row, count in zip(rows, expected, strict=True) for i in range(len(row))]
    assert acceptance(tokens, lengths, torch.tensor(sampled))[1] is None


def test_more_drafts_than_sampled_columns_are_clamped_with_one_warning():
    tokens, lengths = flat([[1, 2, 3], [4, 5, 6], [7]])
    with pytest.warns(UserWarning, match="drafts without a sample") as caught:
        counts, mask = acceptance(tokens, lengths, torch.tensor([[1, 2], [4, 0], [7, 0]]), return_mask=True)
    assert len(caught) == 1
    assert counts.tolist() == [2, 1, 1]
    assert mask.tolist() == [True, True, False, True, False, False, True]


TWO = torch.tensor([1, 2])
SAMPLES = torch.tensor([[1, 5], [2, 5]])
CONTRADICTIONS = {
    "counts do not add up": (TWO, [1, 2], SAMPLES, "adds up to 3"),
    "negative count": (TWO, [3, -1], SAMPLES, "holds -1"),
    "another number of rows": (TWO, [2], SAMPLES, "names 1 requests"),
    "flat drafts of rank 2": (TWO[None], [1, 1], SAMPLES, "draft_tokens is \\(1, 2\\)"),
    "samples of rank 1": (TWO, [1, 1], SAMPLES[0], "sampled_token_ids is \\(2,\\)"),
    "float drafts": (TWO.float(), [1, 1], SAMPLES, "draft_tokens is .*float32"),
    "float samples": (TWO, [1, 1], SAMPLES.double(), "sampled_token_ids is .*float64"),
    "bool counts": (TWO, [True, 1], SAMPLES, "holds True"),
    "float counts": (TWO, torch.tensor([1.0, 1.0]), SAMPLES, "num_draft_tokens is .*float32"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_raise_in_the_typed_function_and_accept_nothing_in_the_serving_one(name, caplog):
    tokens, lengths, sampled, message = CONTRADICTIONS[name]
    with pytest.raises(ConfigError, match=message):
        accept_chains(tokens, lengths, sampled)
    with caplog.at_level(logging.ERROR):
        counts, mask = acceptance(tokens, lengths, sampled, return_mask=True)
    assert counts.tolist() == [0] * len(lengths) and mask.tolist() == [False] * tokens.numel()
    assert "no draft is accepted" in caplog.text
