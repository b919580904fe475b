"""Tiny models of every class, documents to feed them, and what each of them says about one document."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybrid_longformer import (
    HybridLongformerConfig,
    HybridLongformerForConditionalGeneration,
    HybridLongformerForMaskedLM,
    HybridLongformerForMultipleChoice,
    HybridLongformerForQuestionAnswering,
    HybridLongformerForSequenceClassification,
    HybridLongformerForTokenClassification,
    HybridLongformerModel,
)

AUTO_CLASSES = {
    HybridLongformerModel: "AutoModel",
    HybridLongformerForMaskedLM: "AutoModelForMaskedLM",
    HybridLongformerForQuestionAnswering: "AutoModelForQuestionAnswering",
    HybridLongformerForSequenceClassification: "AutoModelForSequenceClassification",
    HybridLongformerForTokenClassification: "AutoModelForTokenClassification",
    HybridLongformerForMultipleChoice: "AutoModelForMultipleChoice",
    HybridLongformerForConditionalGeneration: "AutoModelForSeq2SeqLM",
}
CLASSES = list(AUTO_CLASSES)
# Those whose rows may pack several documents.
TOKEN_CLASSES = [HybridLongformerModel, HybridLongformerForMaskedLM, HybridLongformerForTokenClassification]
TIED_CLASSES = [HybridLongformerForMaskedLM, HybridLongformerForConditionalGeneration]

START, PAD, SEPARATOR = 0, 1, 2
FIRST_WORD, VOCABULARY = 3, 100
NUM_LABELS, NUM_CHOICES, TARGET_LENGTH = 3, 2, 6
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 302,
    "decoder_max_position_embeddings": 42,
    "type_vocab_size": 2,
    "attention_window": [8, 12],
    "num_random_blocks": 2,
    "block_size": 4,
    "num_labels": NUM_LABELS,
}


def name_of(value: Any) -> str:
    """A short test id."""
    return value.__name__.removeprefix("HybridLongformer") if isinstance(value, type) else str(value)


def tiny_config(**changes) -> HybridLongformerConfig:
    return HybridLongformerConfig(**(TINY | changes))


def build(model_class: type, *, seed: int = 0, **changes) -> Any:
    """A model in evaluation mode with weights, biases and norms large enough that each one matters."""
    torch.manual_seed(seed)
    return scramble(model_class(tiny_config(**changes)), seed=seed).eval()


def scramble(model: nn.Module, *, seed: int = 0) -> Any:
    """Moves every parameter, so that no bias is 0 and no norm is 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


@dataclass
class Document:
    """One unpadded document: (N) token ids and (N) marks of its global tokens."""

    ids: Tensor
    global_marks: Tensor

    def __len__(self) -> int:
        return len(self.ids)


def make_documents(
    lengths: Sequence[int] = (37, 23, 30, 9),
    globals_per_document: Sequence[Sequence[int]] = ((0, 7), (), (5,), (0, 1, 2, 8)),
    *,
    seed: int = 0,
) -> list[Document]:
    """Documents of question, two separators, context and separator; by default some have no global token at all."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for length, chosen in zip(lengths, globals_per_document, strict=True):
        ids = torch.randint(FIRST_WORD, VOCABULARY, (length,), generator=generator)
        if length >= 8:
            ids[[0, 4, 5, -1]] = torch.tensor([START, SEPARATOR, SEPARATOR, SEPARATOR])
        marks = torch.zeros(length, dtype=torch.long)
        marks[list(chosen)] = 1
        documents.append(Document(ids, marks))
    return documents


def pad_rows(rows: Sequence[Tensor], value: int, side: str = "right", length: int | None = None) -> Tensor:
    """(B, N) rows filled up on one side to a common length."""
    length = length or max(len(row) for row in rows)
    padded = torch.full((len(rows), length), value)
    for row, tokens in zip(padded, rows, strict=True):
        row[slice(length - len(tokens), None) if side == "left" else slice(len(tokens))] = tokens
    return padded


def collate(
    model_class: type, documents: Sequence[Document], *, side: str = "right", with_globals: bool = True
) -> dict[str, Tensor]:
    """A batch for this class; multiple choice takes its documents in groups of `NUM_CHOICES`."""
    inputs = {
        "input_ids": pad_rows([document.ids for document in documents], PAD, side),
        "attention_mask": pad_rows([torch.ones_like(document.ids) for document in documents], 0, side),
    }
    if with_globals:
        inputs["global_attention_mask"] = pad_rows([document.global_marks for document in documents], 0, side)
    if model_class is HybridLongformerForMultipleChoice:
        inputs = {name: tensor.unflatten(0, (-1, NUM_CHOICES)) for name, tensor in inputs.items()}
    if model_class is HybridLongformerForConditionalGeneration:
        inputs["decoder_input_ids"] = targets(len(documents))
    return inputs


def targets(count: int) -> Tensor:
    """(B, T) the same few tokens for every document, so that only the document makes a difference."""
    words = torch.arange(FIRST_WORD, FIRST_WORD + TARGET_LENGTH) * 7
    words[0] = SEPARATOR
    return words.expand(count, -1).clone()


def make_inputs(model_class: type, *, side: str = "right", with_globals: bool = True) -> dict[str, Tensor]:
    return collate(model_class, make_documents(), side=side, with_globals=with_globals)


def make_labels(model_class: type, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The labels this class trains on; the base model has none."""
    generator = torch.Generator().manual_seed(1)
    rows, shape = len(inputs["input_ids"]), inputs["input_ids"].shape

    def draw(limit: int, *size: int) -> Tensor:
        return torch.randint(limit, size, generator=generator)

    if model_class is HybridLongformerModel:
        return {}
    if model_class is HybridLongformerForQuestionAnswering:
        return {"start_positions": draw(9, rows), "end_positions": draw(9, rows)}
    if model_class is HybridLongformerForSequenceClassification:
        return {"labels": draw(NUM_LABELS, rows)}
    if model_class is HybridLongformerForMultipleChoice:
        return {"labels": draw(NUM_CHOICES, rows)}
    if model_class is HybridLongformerForConditionalGeneration:
        return {"labels": draw(VOCABULARY, rows, TARGET_LENGTH)}
    limit = VOCABULARY if model_class is HybridLongformerForMaskedLM else NUM_LABELS
    return {"labels": draw(limit, *shape).masked_fill(inputs["attention_mask"] == 0, -100)}


def loss_of(model: nn.Module, inputs: dict[str, Tensor], **options) -> Tensor:
    """The class's own loss; for the base model a fixed projection of all it returns."""
    labels = make_labels(type(model), inputs)
    outputs = model(**inputs, **labels, **options)
    if labels:
        return outputs.loss
    generator = torch.Generator().manual_seed(2)
    parts = (outputs.last_hidden_state, outputs.pooler_output)
    return sum((part * torch.randn(part.shape, generator=generator)).mean() for part in parts)


def encoder_of(model: nn.Module) -> HybridLongformerModel:
    return model if isinstance(model, HybridLongformerModel) else model.hybrid_longformer


def main_output(outputs: Any) -> Tensor:
    """What the class is for: logits, or hidden states for the base model."""
    if "start_logits" in outputs:
        return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
    return outputs.logits if "logits" in outputs else outputs.last_hidden_state


def results_per_document(outputs: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What the model says of each document, without anything about padding; (choices) for a group of choices."""
    values = main_output(outputs)
    mask = inputs["attention_mask"]
    is_per_token = values.dim() == 3 and values.shape[:2] == mask.shape
    results = [value[keep] for value, keep in zip(values, mask.bool(), strict=True)] if is_per_token else list(values)
    pooled = outputs.get("pooler_output")
    return results if pooled is None else [torch.cat([a, b[None]]) for a, b in zip(results, pooled, strict=True)]


def largest(difference: Tensor) -> float:
    return difference.abs().max().item() if difference.numel() else 0.0


def largest_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    return max(largest(a - b) for a, b in zip(first, second, strict=True))


def run_model(model, inputs: dict, **options):
    with torch.no_grad():
        return model(**inputs, **options)


def results(model, inputs: dict, **options) -> list[torch.Tensor]:
    return results_per_document(run_model(model, inputs, **options), inputs)


def gradients_of(model, inputs: dict) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    loss_of(model, inputs).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def rows_of_positions(inputs: dict) -> torch.Tensor:
    """RoBERTa's positions: 2 for the first real token, 1 for padding."""
    real = inputs["attention_mask"]
    return torch.where(real == 1, real.cumsum(1) + 1, 1)


every_class = pytest.mark.parametrize("model_class", CLASSES, ids=name_of)
token_classes = pytest.mark.parametrize("model_class", TOKEN_CLASSES, ids=name_of)
tied_classes = pytest.mark.parametrize("model_class", TIED_CLASSES, ids=name_of)
both_backends = pytest.mark.parametrize("implementation", ["sdpa", "eager"])
