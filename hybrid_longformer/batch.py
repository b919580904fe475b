"""Batch: what one batch says about its tokens, as tensors: which are real, which are global, which document is whose.

Letters: B batch, N tokens, G global tokens, R random blocks, S block size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .pattern import (
    AttentionPattern,
    Predicate,
    both,
    causal,
    either,
    global_tokens,
    random_blocks,
    real_tokens,
    same_document,
)

# Global slots of a compiled or exported graph, whose shapes may not depend on how many tokens a batch marks global.
COMPILED_GLOBAL_SLOTS = 64
BEYOND_ANY_LENGTH = 2**40


@dataclass(kw_only=True)
class Batch:
    """Facts about the tokens of one batch, shared by the plans of all layers.

    Args:
        shape: (B, N).
        device: of all tensors.
        real: (B, N) bool, or None when there is no padding.
        is_global: (B, N) bool, or None when no token is global.
        document: (B, N) number of the token's document within its row, or None when each row is one document.
        places: `position` and `document_length`, or None when each row is one document without padding.
        global_index: (B, G) the global tokens of each row in order, then other distinct tokens to fill up.
        flat_global_index: (B * G) the same tokens, counted over all rows.
        is_global_slot: (B, G) which of those slots hold a global token, or None when all do.
    """

    shape: tuple[int, int]
    device: torch.device
    real: Tensor | None
    is_global: Tensor | None
    document: Tensor | None
    places: tuple[Tensor, Tensor] | None
    global_index: Tensor | None
    flat_global_index: Tensor | None
    is_global_slot: Tensor | None

    @property
    def rows_are_documents(self) -> bool:
        """Whether each row is one document without padding."""
        return self.places is None

    @property
    def position(self) -> Tensor:
        """(B, N) the token's place among the real tokens of its own document."""
        if self.places is None:
            return torch.arange(self.shape[1], device=self.device).expand(self.shape)
        return self.places[0]

    @property
    def document_length(self) -> Tensor:
        """(B, N) the number of real tokens of the token's document."""
        if self.places is None:
            return torch.full((1, 1), self.shape[1], device=self.device).expand(self.shape)
        return self.places[1]

    @property
    def num_global_slots(self) -> int:
        return 0 if self.global_index is None else self.global_index.shape[1]

    @property
    def used_global_slots(self) -> Tensor:
        """(B, G) which global slots hold a global token."""
        assert self.global_index is not None
        return (
            torch.ones_like(self.global_index, dtype=torch.bool) if self.is_global_slot is None else self.is_global_slot
        )

    @property
    def ordinary_keys(self) -> Tensor:
        """(B, N) keys that windows and random blocks may read: real, and not already read as global tokens."""
        keys = torch.ones(self.shape, dtype=torch.bool, device=self.device) if self.real is None else self.real
        return keys if self.is_global is None else keys & ~self.is_global

    def edges(self, pattern: AttentionPattern) -> Predicate:
        """The whole graph of one layer for this batch: the union of its rules, within documents and real tokens."""
        rules = [pattern.window_predicate(self.device)]
        if self.is_global is not None:
            rules.append(global_tokens(self.is_global))
        if pattern.num_random_blocks:
            block = self.position // pattern.block_size
            rules.append(random_blocks(block, pattern.draw(block, self.num_blocks(pattern.block_size))))
        limits = [either(*rules)]
        if self.real is not None:
            limits.append(real_tokens(self.real))
        if self.document is not None:
            limits.append(same_document(self.document))
        if pattern.is_causal:
            limits.append(causal())
        return both(*limits)

    def num_blocks(self, block_size: int) -> Tensor:
        """(B, N) the number of blocks of each token's document."""
        return (self.document_length + block_size - 1) // block_size


def describe_batch(
    *,
    batch_size: int,
    length: int,
    device: torch.device,
    padding_mask: Tensor | None = None,
    global_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    max_global_tokens: int | None = None,
    num_extra_global_tokens: int = 0,
) -> Batch:
    """Works out a batch's facts from its masks, with tensor operations only.

    Args:
        padding_mask: (B, N), nonzero for real tokens.
        global_mask: (B, N), nonzero for global tokens.
        document_ids: (B, N); each run of equal values is one document.
        max_global_tokens: a promise that no row marks more tokens global (then nothing is read back from the device),
            or None to count them.
        num_extra_global_tokens: how many tokens at the start of every row are global whatever the caller marked; the
            promise leaves them out.
    """
    real = None if padding_mask is None else padding_mask.bool()
    document = None if document_ids is None else number_runs(document_ids)
    shape, places = (batch_size, length), None
    if real is not None or document is not None:
        counted = torch.ones(shape, dtype=torch.long, device=device) if real is None else real.long()
        places = place_in_document(counted, document)
    is_global = global_index = is_global_slot = None
    if global_mask is not None:
        is_global = global_mask.bool() if real is None else global_mask.bool() & real
        global_index, is_global_slot = _find_globals(is_global, max_global_tokens, num_extra_global_tokens)
    return Batch(
        shape=shape,
        device=device,
        real=real,
        is_global=None if global_index is None else is_global,
        document=document,
        places=places,
        global_index=global_index,
        flat_global_index=None if global_index is None else flat_index(global_index, length).flatten(),
        is_global_slot=is_global_slot,
    )


def flat_index(index: Tensor, length: int) -> Tensor:
    """(B, ...) indices within a row to indices among all B * N tokens."""
    if index.shape[0] == 1:
        return index
    rows = torch.arange(index.shape[0], device=index.device) * length
    return index + rows.view(-1, *[1] * (index.dim() - 1))


def number_runs(document_ids: Tensor) -> Tensor:
    """(B, N) 0 for the first run of equal ids, 1 for the next, and so on."""
    starts = document_ids[:, 1:] != document_ids[:, :-1]
    return torch.nn.functional.pad(starts.long().cumsum(1), (1, 0))


def place_in_document(counted: Tensor, document: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rank of every counted token in its document, and the document's number of counted tokens, each (B, N)."""
    seen = counted.cumsum(1)
    if document is None:
        return (seen - 1).clamp(min=0), seen[:, -1:].expand_as(seen)
    per_document = torch.zeros_like(counted).scatter_add(1, document, counted)
    before = (per_document.cumsum(1) - per_document).gather(1, document)
    return (seen - before - 1).clamp(min=0), per_document.gather(1, document)


def _find_globals(is_global: Tensor, limit: int | None, num_extra: int) -> tuple[Tensor | None, Tensor | None]:
    """`global_index` and `is_global_slot` of a batch.

    How many slots there are must be known before shapes are. A graph that is being compiled or exported can't count:
    without a limit it keeps `COMPILED_GLOBAL_SLOTS`.
    """
    if limit is None and not torch.compiler.is_compiling():
        places = is_global.nonzero()
        counts = [len(places)] if len(is_global) == 1 else is_global.sum(1).tolist()
        slots = max(counts)
        if 0 < slots == min(counts):
            return places[:, 1].view(-1, slots), None
    else:
        slots = _promised_slots(is_global, limit, num_extra)
    if slots == 0:
        return None, None
    # Globals first and in order, then the row's other tokens: all are distinct, so they can be written back.
    rank = is_global * BEYOND_ANY_LENGTH - torch.arange(is_global.shape[1], device=is_global.device)
    global_index = rank.topk(slots, dim=1).indices
    return global_index, is_global.gather(1, global_index)


def _promised_slots(is_global: Tensor, limit: int | None, num_extra: int) -> int:
    slots = (COMPILED_GLOBAL_SLOTS if limit is None else limit) + num_extra
    if torch.compiler.is_exporting():
        # An exported graph keeps its number of slots, and takes inputs of at least as many tokens.
        return slots
    torch._assert_async(
        (is_global.sum(1) <= slots).all(),
        f"a row marks more than {slots - num_extra} tokens global; set max_global_tokens to the most you use",
    )
    return min(slots, is_global.shape[1])


def check_shape(name: str, tensor: Tensor | None, shape: tuple[int, int]) -> None:
    """Refuses a tensor of another shape than (B, N), and inputs without a token."""
    if 0 in shape:
        raise ValueError(f"the input has {shape} (batch, tokens): give at least one token")
    if tensor is not None and tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} but the input has {tuple(shape)} (batch, tokens): "
            "give one value per token"
        )


def check_mask(name: str, mask: Tensor | None, shape: tuple[int, int]) -> None:
    """Refuses a mask of another shape than (B, N) or with values other than 0 and 1."""
    check_shape(name, mask, shape)
    # Reading values back would break a compiled graph, so those check shapes only.
    if mask is None or mask.dtype == torch.bool or torch.compiler.is_compiling():
        return
    wrong = (mask != 0) & (mask != 1)
    if bool(wrong.any()):
        value = mask[wrong][0].item()
        remedy = "global tokens have a mask of their own" if value == 2 else "an additive mask has to be turned into it"
        raise ValueError(f"{name} contains {value!r}, but is 1 or 0 for each token: {remedy}")
