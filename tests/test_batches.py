"""Batches: every row in its turn, the same whatever the number of processes, and from any number on."""

from itertools import islice

import numpy as np
import pytest
import torch

from finetune.batches import GlobalBatches, StreamedBatches, eval_batches, global_mask, pad_rows

LENGTHS = np.random.default_rng(0).integers(5, 500, 103).tolist()


def first_batches(count: int, **settings) -> list[list[tuple[int, int]]]:
    return list(islice(GlobalBatches(LENGTHS, seed=3, **settings), count))


def test_an_epoch_has_every_row_and_batches_hold_similar_lengths():
    batches = first_batches(26, batch_size=4)
    rows = [row for batch in batches for row, _ in batch]
    assert GlobalBatches(LENGTHS, seed=3, batch_size=4).per_epoch == 26
    # One row stands twice, to fill the last batch.
    assert sorted(set(rows)) == list(range(103))
    assert len(rows) == 104
    wasted = sum(max(LENGTHS[row] for row, _ in batch) * 4 - sum(LENGTHS[row] for row, _ in batch) for batch in batches)
    assert wasted < 0.05 * sum(LENGTHS)


def test_processes_share_what_one_process_would_see():
    alone = first_batches(40, batch_size=4)
    shared = [first_batches(40, batch_size=2, rank=rank, world_size=2) for rank in range(2)]
    for whole, *parts in zip(alone, *shared, strict=True):
        assert sorted(whole) == sorted(parts[0] + parts[1])


@pytest.mark.parametrize("first", [1, 25, 26, 40])
def test_going_on_from_any_batch(first):
    assert first_batches(60, batch_size=4)[first:] == first_batches(60 - first, batch_size=4, first=first)


def test_epochs_and_seeds_differ():
    batches = first_batches(52, batch_size=4)
    rows = [[row for row, _ in batch] for batch in batches]
    assert rows[:26] != rows[26:]
    assert [number for batch in batches for _, number in batch[:1]] == list(range(52))
    other = next(iter(GlobalBatches(LENGTHS, seed=4, batch_size=4)))
    longest = max(range(103), key=LENGTHS.__getitem__)
    assert longest in rows[0], "the longest row comes first"
    assert longest in [row for row, _ in other]


def test_no_row_at_all_is_refused():
    with pytest.raises(ValueError, match="no row to train on"):
        GlobalBatches([], seed=0, batch_size=2)


def test_a_stream_is_shared_repeated_and_skipped():
    rows = [{"input_ids": [number] * (number % 7 + 1)} for number in range(50)]
    alone = list(islice(iter(StreamedBatches(rows, batch_size=2, window=4)), 40))
    assert list(islice(iter(StreamedBatches(rows, batch_size=2, window=4, first=15)), 25)) == alone[15:]
    seen = {row["input_ids"][0] for batch in alone for row in batch}
    assert seen == set(range(50))
    shares = [islice(iter(StreamedBatches(rows, batch_size=2, rank=rank, world_size=2)), 12) for rank in range(2)]
    numbers = [{row["row_id"] for batch in share for row in batch} for share in shares]
    assert not numbers[0] & numbers[1]
    with pytest.raises(ValueError, match="the stream is empty"):
        next(iter(StreamedBatches([], batch_size=2)))


def test_evaluation_sees_every_row_once():
    parts = [eval_batches(LENGTHS, batch_size=8, rank=rank, world_size=3) for rank in range(3)]
    rows = [row for part in parts for batch in part for row in batch]
    assert sorted(rows) == list(range(103))


def test_padding():
    rows = [
        {"input_ids": [5, 6, 7], "labels": [1, 2], "global_attention_mask": [1, 0, 0], "start_positions": 2, "draw": 0},
        {"input_ids": [8], "labels": [3], "global_attention_mask": [1], "start_positions": 0, "draw": 0},
    ]
    batch = pad_rows(rows, pad_token_id=9)
    expected = {
        "input_ids": [[5, 6, 7], [8, 9, 9]],
        "labels": [[1, 2], [3, -100]],
        "global_attention_mask": [[1, 0, 0], [1, 0, 0]],
        "start_positions": [2, 0],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }
    assert batch.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(batch[key], torch.tensor(value)), key


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("none", [0, 0, 0, 0, 0, 0]),
        ("first", [1, 0, 0, 0, 0, 0]),
        ("question", [1, 1, 1, 0, 0, 0]),
        ("every:2", [1, 0, 1, 0, 1, 0]),
    ],
)
def test_placements_of_global_tokens(placement, expected):
    assert global_mask(6, placement, question=(0, 3)) == expected
