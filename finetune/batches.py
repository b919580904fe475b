"""Batches: rows of similar length together, in an order that depends on the seed alone, padded as little as possible.

Every process makes the same global batches and takes its own share of each, so that two processes see what one process
with twice the batch size sees. A batch is known by its number, so that a run can go on from any of them.
"""

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

# Rows are sorted by length inside groups of so many batches: little padding, and still a random order.
BATCHES_PER_GROUP = 32
IGNORED_LABEL = -100
# What fills a row's end; padding ids come from the tokenizer, other keys get 0.
FILLS = {"labels": IGNORED_LABEL}
# Facts about a row that are no input of the model.
ROW_FACTS = ("row_id", "draw")


class GlobalBatches:
    """An endless batch sampler: this process's share of every global batch, from batch number `first` on.

    Args:
        lengths: of all rows.
        batch_size: rows per process.
        seed: of the order.
        rank, world_size: which process this is, of how many.
        first: number of the batch to begin with.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        first: int = 0,
    ):
        if len(lengths) == 0:
            raise ValueError("there is no row to train on: is the training file empty, or everything filtered out?")
        self.lengths = np.asarray(lengths)
        self.batch_size, self.seed = batch_size, seed
        self.rank, self.world_size, self.first = rank, world_size, first
        self.global_size = batch_size * world_size

    @property
    def per_epoch(self) -> int:
        return -(-len(self.lengths) // self.global_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Lists of (row, number of the batch); the number lets random masking differ from epoch to epoch."""
        epoch, skipped = divmod(self.first, self.per_epoch)
        number = self.first
        for current in count(epoch):
            for rows in islice(self.epoch_batches(current), skipped, None):
                yield [(int(row), number) for row in rows[self.rank :: self.world_size]]
                number += 1
            skipped = 0

    def epoch_batches(self, epoch: int) -> Iterator[np.ndarray]:
        """The global batches of one epoch; the last is filled up with rows from the start of the order."""
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(len(self.lengths))
        order = np.resize(order, self.per_epoch * self.global_size)
        group = self.global_size * BATCHES_PER_GROUP
        for start in range(0, len(order), group):
            rows = order[start : start + group]
            rows = rows[np.argsort(-self.lengths[rows], kind="stable")]
            batches = rows.reshape(-1, self.global_size)
            # The longest batch of an epoch comes first: a row that doesn't fit into memory shows at once.
            places = random.permutation(len(batches))
            if start == 0:
                places = np.concatenate([[0], places[places != 0]])
            yield from batches[places]


class Drawn(Dataset):
    """Rows asked for by (row, number of the batch), each told its number."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: tuple[int, int]) -> dict[str, Any]:
        row, draw = place
        return {**self.rows[row], "row_id": row, "draw": draw}


class StreamedBatches(IterableDataset):
    """Endless batches of a stream: each process reads every so-manieth row; going on skips what was read before."""

    def __init__(
        self, rows: Any, *, batch_size: int, rank: int = 0, world_size: int = 1, first: int = 0, window: int = 16
    ):
        self.rows, self.batch_size, self.rank, self.world_size = rows, batch_size, rank, world_size
        self.first, self.window = first, window

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        numbered = enumerate(self._endless())
        own = ({**row, "row_id": number} for number, row in numbered if number % self.world_size == self.rank)
        number = 0
        while group := list(islice(own, self.batch_size * self.window)):
            group.sort(key=lambda row: -len(row["input_ids"]))
            for start in range(0, len(group), self.batch_size):
                if number >= self.first:
                    yield [{**row, "draw": number} for row in group[start : start + self.batch_size]]
                number += 1

    def _endless(self) -> Iterator[dict[str, Any]]:
        while True:
            found = False
            for row in self.rows:
                found = True
                yield row
            if not found:
                raise ValueError("there is no row to train on: the stream is empty")


def eval_batches(lengths: Sequence[int], *, batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """Every row exactly once over all processes, longest first."""
    order = np.argsort(-np.asarray(lengths), kind="stable")[rank::world_size]
    return [order[start : start + batch_size].tolist() for start in range(0, len(order), batch_size)]


def pad_rows(rows: Sequence[dict[str, Any]], *, pad_token_id: int) -> dict[str, Tensor]:
    """Rows of lists and numbers as tensors: lists padded on the right, with an attention mask; numbers stacked."""
    batch: dict[str, Tensor] = {}
    for key, value in rows[0].items():
        if key in ROW_FACTS:
            continue
        values = [torch.as_tensor(np.asarray(row[key])) for row in rows]
        if np.ndim(value) == 0:
            batch[key] = torch.stack(values).long()
            continue
        fill = pad_token_id if key == "input_ids" else FILLS.get(key, 0)
        batch[key] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill).long()
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
    return batch


def global_mask(length: int, placement: str, *, question: tuple[int, int] | None = None) -> list[int]:
    """0/1 per token for a placement as in `Task.global_placement`."""
    mask = np.zeros(length, dtype=np.int64)
    if placement == "none":
        return mask.tolist()
    mask[0] = 1
    if placement == "question":
        first, last = question or (0, 1)
        mask[first:last] = 1
    elif placement.startswith("every:"):
        mask[:: int(placement.partition(":")[2])] = 1
    return mask.tolist()
