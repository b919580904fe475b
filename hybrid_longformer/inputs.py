"""Inputs: checks at the model's door, and the global tokens each task has by default.

Letters: B batch, N tokens, E hidden size.
"""

import difflib
from collections.abc import Iterable

import torch
from torch import Tensor

from .batch import check_mask, check_shape
from .configuration_hybrid_longformer import HybridLongformerConfig

# What the models of this family take, and what transformers and its Trainer may pass to any model.
_ARGUMENTS = (
    "attention_mask",
    "document_ids",
    "end_positions",
    "global_attention_mask",
    "input_ids",
    "inputs_embeds",
    "labels",
    "logits_at_labels",
    "output_attentions",
    "output_hidden_states",
    "position_ids",
    "return_dict",
    "start_positions",
    "token_type_ids",
)
_LIBRARY_ARGUMENTS = {"num_items_in_batch", "output_attentions", "output_hidden_states", "return_dict"}
# The attention module's names of what a model calls otherwise.
_OTHER_NAMES = {"global_mask": "global_attention_mask", "padding_mask": "attention_mask"}


def check_inputs(
    config: HybridLongformerConfig,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None = None,
    global_attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> None:
    """Refuses what would otherwise end in a wrong result, a NaN or a device-side assert."""
    shape = input_shape(input_ids, inputs_embeds)
    if inputs_embeds is not None and inputs_embeds.shape[-1] != config.hidden_size:
        raise ValueError(
            f"inputs_embeds has shape {tuple(inputs_embeds.shape)} but must be (batch, tokens, {config.hidden_size})"
        )
    check_mask("attention_mask", attention_mask, shape)
    check_mask("global_attention_mask", global_attention_mask, shape)
    check_shape("document_ids", document_ids, shape)
    check_shape("token_type_ids", token_type_ids, shape)
    check_whole("document_ids", document_ids)
    check_token_ids(config, "input_ids", input_ids)
    _check_ids("token_type_ids", token_type_ids, "type_vocab_size", config.type_vocab_size, "leave them out")


def check_token_ids(config: HybridLongformerConfig, name: str, ids: Tensor | None) -> None:
    """Refuses what is not in the vocabulary."""
    remedy = "use the checkpoint's own tokenizer, or resize the embeddings"
    _check_ids(name, ids, "vocab_size", config.vocab_size, remedy)


def check_whole(name: str, numbers: Tensor | None) -> None:
    """Refuses numbers of a type that is not whole."""
    if numbers is not None and (numbers.is_floating_point() or numbers.dtype == torch.bool):
        raise ValueError(f"{name} is of {numbers.dtype}, but has to hold whole numbers: give it as torch.long")


def refuse_misspelled(names: Iterable[str]) -> None:
    """Refuses arguments that nobody takes and that look like one of ours: a mask that is ignored changes the answer."""
    for name in names:
        if name in _LIBRARY_ARGUMENTS or torch.compiler.is_compiling():
            continue
        close = difflib.get_close_matches(name, _ARGUMENTS, n=1, cutoff=0.8)
        meant = _OTHER_NAMES.get(name, close[0] if close else None)
        if meant is not None:
            raise TypeError(f"{name} is no argument of this model: did you mean {meant!r}?")


def input_shape(input_ids: Tensor | None, inputs_embeds: Tensor | None, *, rows: str = "batch") -> tuple[int, int]:
    """The first two sizes of the one input there has to be: (B, N), or (B, choices) where rows are given so."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    name, source, wanted = "input_ids", input_ids, f"({rows}, tokens)"
    if source is None:
        name, source, wanted = "inputs_embeds", inputs_embeds, f"({rows}, tokens, hidden)"
    assert source is not None
    if source.dim() != wanted.count(",") + 1:
        raise ValueError(f"{name} has shape {tuple(source.shape)} but must be {wanted}")
    return source.shape[0], source.shape[1]


def _check_ids(name: str, ids: Tensor | None, field: str, limit: int, remedy: str) -> None:
    check_whole(name, ids)
    # A compiled graph can't look at values; there the embedding's own check has to do.
    if ids is None or ids.numel() == 0 or torch.compiler.is_compiling():
        return
    lowest, highest = (int(value) for value in torch.stack(torch.aminmax(ids)))
    if lowest < 0 or highest >= limit:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"{name} contains {wrong}, but {field}={limit} allows {f'0 to {limit - 1}' if limit > 1 else '0 only'}: "
            f"{remedy}"
        )


def check_positions(config: HybridLongformerConfig, position_ids: Tensor) -> None:
    """Refuses positions outside the table."""
    check_whole("position_ids", position_ids)
    if torch.compiler.is_compiling() or position_ids.numel() == 0:
        return
    lowest, highest = (int(value) for value in torch.stack(torch.aminmax(position_ids)))
    if lowest < 0:
        raise ValueError(f"position_ids contains {lowest}, but the position table's first row is 0")
    if highest >= config.max_position_embeddings:
        raise ValueError(
            f"the input has {highest + 1 - config.position_offset} tokens in a document, but the position table holds "
            f"{config.max_tokens} (max_position_embeddings={config.max_position_embeddings}): truncate it, cut it into "
            "overlapping windows, or convert the checkpoint with a larger max_length"
        )


def spread_positions(position_ids: Tensor, shape: tuple[int, int]) -> Tensor:
    """(B, N) positions: one row of them serves the whole batch."""
    if position_ids.dim() == 2 and position_ids.shape[0] == 1:
        position_ids = position_ids.expand(shape[0], -1)
    check_shape("position_ids", position_ids, shape)
    return position_ids


def has_restart(position_ids: Tensor, attention_mask: Tensor | None) -> bool:
    """Whether a row packs several documents: positions of real tokens decrease. A compiled graph can't tell."""
    if torch.compiler.is_compiling():
        return False
    decreases = position_ids[:, 1:] < position_ids[:, :-1]
    return bool(decreases.any() if attention_mask is None else (decreases & attention_mask[:, 1:].bool()).any())


def refuse_packed_rows(
    reason: str,
    shape: tuple[int, int],
    document_ids: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
) -> None:
    """Refuses rows of several documents, as said by ids or by positions that start anew."""
    told_by = None if document_ids is None else "document_ids"
    if told_by is None and position_ids is not None:
        check_shape("attention_mask", attention_mask, shape)
        told_by = "position_ids" if has_restart(spread_positions(position_ids, shape), attention_mask) else None
    if told_by is not None:
        raise ValueError(f"{reason}, but {told_by} pack several documents into one row: give each document its own row")


def document_starts(position_ids: Tensor) -> Tensor:
    """(B, N) document numbers: where position ids decrease, a new document starts."""
    decreases = position_ids[:, 1:] < position_ids[:, :-1]
    return torch.nn.functional.pad(decreases.long().cumsum(1), (1, 0))


def first_real_token(hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """(B, E) state of each row's first real token, which left padding moves."""
    if attention_mask is None:
        return hidden_states[:, 0]
    index = attention_mask.long().argmax(1)
    return hidden_states[torch.arange(hidden_states.shape[0], device=hidden_states.device), index]


def first_token_mask(input_ids: Tensor | None, inputs_embeds: Tensor | None, attention_mask: Tensor | None) -> Tensor:
    """(B, N) 1 at each row's first real token."""
    shape = input_shape(input_ids, inputs_embeds)
    check_shape("attention_mask", attention_mask, shape)
    source = input_ids if input_ids is not None else inputs_embeds
    assert source is not None
    real = torch.ones(shape, dtype=torch.long, device=source.device)
    real = real if attention_mask is None else attention_mask.long()
    return ((real.cumsum(1) == 1) & (real == 1)).long()


def question_mask(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, attention_mask: Tensor | None, sep_token_id: int | None
) -> Tensor:
    """(B, N) 1 at the question: every token before the first separator, wherever that is and however many follow.

    A row without a second segment (no separator, or only one that ends it) has no question to find: its first token.
    """
    first = first_token_mask(input_ids, inputs_embeds, attention_mask)
    if input_ids is None or sep_token_id is None:
        return first
    before, behind = _segments(input_ids, attention_mask, sep_token_id)
    return torch.where(behind.any(1, keepdim=True), before.long(), first)


def second_segment_mask(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, attention_mask: Tensor | None, sep_token_id: int | None
) -> Tensor:
    """(B, N) 1 at everything behind the separators that end the first segment; without any, at the first token."""
    first = first_token_mask(input_ids, inputs_embeds, attention_mask)
    if input_ids is None or sep_token_id is None:
        return first
    _, behind = _segments(input_ids, attention_mask, sep_token_id)
    return torch.where(behind.any(1, keepdim=True), behind.long(), first)


def _segments(input_ids: Tensor, attention_mask: Tensor | None, sep_token_id: int) -> tuple[Tensor, Tensor]:
    """(B, N) bool: real tokens before the first separator, and those from the first other token behind it on."""
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    is_separator = (input_ids == sep_token_id) & real
    has_separator_before = is_separator.long().cumsum(1) > 0
    starts_behind = (has_separator_before & ~is_separator & real).long().cumsum(1) > 0
    return ~has_separator_before & real, starts_behind & real
