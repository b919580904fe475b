"""Packing: several documents in one row, each seeing itself only, so that batches of mixed lengths waste nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# What fills a row's end, by key; other per-token keys are filled with 0.
_FILL_LABEL = -100
_PER_DOCUMENT_LABELS = ("start_positions", "end_positions")


@dataclass(kw_only=True)
class PackingCollator:
    """Packs tokenised documents into as few rows as first-fit-decreasing finds, and says which token is whose.

    For heads that say something of every token (masked LM, token classification) and for the bare encoder. Each
    feature is a dict of lists or tensors, one value per token: input_ids and, optionally, labels, token_type_ids,
    global_attention_mask. The batch has document_ids beside them; `unpack` takes per-token results apart again.

    Args:
        max_length: the longest row, padding included; a longer document is refused.
        pad_token_id: fills the ends of rows.
        pad_to_multiple_of: rows are padded to a multiple of this; divides max_length.

    Example:
        >>> collator = PackingCollator(max_length=4096, pad_token_id=tokenizer.pad_token_id)
        >>> batch = collator([{"input_ids": [0, 5, 2]}, {"input_ids": [0, 6, 7, 2]}])
        >>> hidden_states = model(**batch).last_hidden_state
        >>> per_document = unpack(hidden_states, batch["document_ids"], batch["attention_mask"])
    """

    max_length: int
    pad_token_id: int
    pad_to_multiple_of: int = 1

    def __post_init__(self) -> None:
        if self.max_length < 1 or self.pad_to_multiple_of < 1 or self.max_length % self.pad_to_multiple_of:
            raise ValueError(
                f"max_length={self.max_length} must be a multiple of pad_to_multiple_of={self.pad_to_multiple_of}, "
                "both at least 1: a full row would be padded beyond it"
            )

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        _check_keys(features)
        lengths = [len(feature["input_ids"]) for feature in features]
        self._check(features, lengths)
        rows = first_fit_decreasing(lengths, self.max_length)
        width = max(sum(lengths[index] for index in row) for row in rows)
        width += -width % self.pad_to_multiple_of
        batch = {
            key: torch.stack([self._join([features[index][key] for index in row], key, width) for row in rows])
            for key in features[0]
            if key != "attention_mask"
        }
        batch["document_ids"] = torch.stack([_number([lengths[index] for index in row], width) for row in rows])
        used = torch.tensor([sum(lengths[index] for index in row) for row in rows])
        batch["attention_mask"] = (torch.arange(width) < used[:, None]).long()
        return batch

    def _check(self, features: Sequence[dict[str, Any]], lengths: Sequence[int]) -> None:
        if max(lengths) > self.max_length:
            raise ValueError(
                f"a document of {max(lengths)} tokens does not fit into rows of max_length={self.max_length}: "
                "truncate it or raise max_length"
            )
        for key in _PER_DOCUMENT_LABELS:
            if key in features[0]:
                raise ValueError(f"{key} is one number per document, but packed rows hold several: don't pack for this")
        for index, feature in enumerate(features):
            for key, values in feature.items():
                if not hasattr(values, "__len__") or len(values) != lengths[index]:
                    raise ValueError(
                        f"document {index} has {lengths[index]} tokens but its {key!r} is {values!r}: "
                        "packing needs one value per token"
                    )

    def _join(self, parts: Sequence[Any], key: str, width: int) -> Tensor:
        fill = {"input_ids": self.pad_token_id, "labels": _FILL_LABEL}.get(key, 0)
        joined = torch.cat([torch.as_tensor(part) for part in parts])
        return torch.nn.functional.pad(joined, (0, width - joined.shape[0]), value=fill)


def _check_keys(features: Sequence[dict[str, Any]]) -> None:
    """Refuses an empty batch, and documents that don't all say the same things."""
    if not features:
        raise ValueError("there are no documents to pack: give at least one")
    expected = set(features[0]) | {"input_ids"}
    for index, feature in enumerate(features):
        if set(feature) != expected:
            raise ValueError(
                f"document {index} has the keys {sorted(feature)}, but {sorted(expected)} are expected: "
                "give all documents the same"
            )


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of document indices, none longer than the capacity: the longest first, each into the first row with room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = next((row for row, left in enumerate(room) if left >= lengths[index]), None)
        if fitting is None:
            rows.append([])
            room.append(capacity)
            fitting = len(rows) - 1
        rows[fitting].append(index)
        room[fitting] -= lengths[index]
    # In the order in which the documents came, so that one can find them again.
    return sorted(sorted(row) for row in rows)


def _number(lengths: Sequence[int], width: int) -> Tensor:
    """0 for the tokens of the first document, 1 for the next, ...; the padding has a number of its own."""
    ends = [len(lengths)] * (width - sum(lengths))
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor(numbers + ends)


def unpack(values: Tensor, document_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
    """Takes (B, N, ...) per-token values of packed rows apart: one (tokens, ...) tensor per document, row by row."""
    documents = []
    for row, ids, real in zip(values, document_ids, attention_mask.bool(), strict=True):
        sizes = ids[real].unique_consecutive(return_counts=True)[1].tolist()
        documents += row[real].split(sizes)
    return documents
