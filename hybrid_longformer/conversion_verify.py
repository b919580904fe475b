"""Verification: runs a source and its conversion on the same tokens and says where they first differ.

For windows smaller than the text, a source with full attention runs with the very mask of the conversion's graph, so
the comparison is exact at every length. One model is in memory at a time, and of a vocabulary's logits only those of
some tokens, as all of them can be larger than the model. Letters: B batch, N tokens.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils import logging

from .backend import plan_edges
from .batch import describe_batch
from .configuration_hybrid_longformer import HybridLongformerConfig
from .conversion_report import Stage, Verification
from .conversion_source import ConversionError
from .plan import as_bias, build_plans

TOLERANCE = 1e-4
TARGET_TOKENS = 12
# Long enough to leave the usual windows, short enough for a few seconds on a CPU.
_USUAL_TOKENS = 1024
# Tokens of each row whose vocabulary logits are compared.
_LOGIT_TOKENS = 32
_TEXT = (
    "Long documents are read by windows that slide over the tokens, by a few tokens that see everything, and by blocks "
    "drawn at random; what matters here is only that two models read the same text and say the same about it. "
)

States = list[tuple[str, Tensor]]


def verification_length(limit: int, windows: list[int], *, has_own_window: bool) -> int:
    """Tokens to compare on: more than the widest window sees, within the source's limit.

    Longformer and LED fill their input up to the widest window, and each layer needs whole windows of its own; a length
    that is a multiple of all of them suits them as it is.
    """
    length, step = min(limit, max(_USUAL_TOKENS, 2 * max(windows))), math.lcm(*windows)
    return length - length % step if has_own_window and length >= step else length


def make_inputs(config: HybridLongformerConfig, tokenizer: Any, length: int, *, kind: str) -> dict[str, Tensor]:
    """Two rows, the second padded; global tokens in both, token types if there are several."""
    ids = _token_ids(config, tokenizer, 2 * length + TARGET_TOKENS)
    inputs = {"input_ids": ids[: 2 * length].view(2, length), "attention_mask": torch.ones(2, length).long()}
    kept = max(length * 2 // 3, 1)
    if config.pad_token_id is not None:
        inputs["input_ids"][1, kept:] = config.pad_token_id
        inputs["attention_mask"][1, kept:] = 0
    inputs["global_attention_mask"] = torch.zeros(2, length).long()
    inputs["global_attention_mask"][:, 0] = 1
    inputs["global_attention_mask"][0, length // 2] = 1
    if config.type_vocab_size > 1:
        inputs["token_type_ids"] = (torch.arange(length) >= length // 3).long().expand(2, length)
    if kind == "ForMultipleChoice":
        inputs = {name: tensor[None] for name, tensor in inputs.items()}
    if kind == "ForConditionalGeneration":
        inputs["decoder_input_ids"] = ids[2 * length :].expand(2, TARGET_TOKENS)
    return inputs


def _token_ids(config: HybridLongformerConfig, tokenizer: Any, count: int) -> Tensor:
    """Real text where there is a tokenizer, any tokens where there is none; no padding in either."""
    ids: list[int] = []
    if tokenizer is not None:
        sentence = tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
        usable = [token for token in sentence if token != config.pad_token_id]
        ids = usable * -(-count // len(usable)) if usable else []
    if not ids:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(0, config.vocab_size, (count,), generator=generator)
        is_padding = drawn.eq(-1 if config.pad_token_id is None else config.pad_token_id)
        return torch.where(is_padding, (drawn + 1) % config.vocab_size, drawn)
    return torch.tensor(ids[:count])


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides what transformers says about unused and new weights; the report says it better."""
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


def load_model(model_class: Any, folder: Path, **options: Any) -> Any:
    """A model of a folder in float32, ready to be compared."""
    with _quiet():
        return model_class.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, **options).eval()


@torch.no_grad()
def run_masked(
    model: nn.Module, inputs: dict[str, Tensor], config: HybridLongformerConfig, *, mask_module: str
) -> States:
    """What a model with full attention says when each layer may only see what the graph of `config` allows.

    Args:
        mask_module: the name of layer `*`'s attention inside the base model.
    """
    given = dict(inputs)
    global_mask = given.pop("global_attention_mask").flatten(0, -2)
    masks = graph_masks(config, inputs["attention_mask"].flatten(0, -2), global_mask)
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    hooks = [
        base.get_submodule(mask_module.replace("*", str(layer))).register_forward_pre_hook(
            _MaskInstead(mask), with_kwargs=True
        )
        for layer, mask in enumerate(masks)
    ]
    try:
        return run(model, given)
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def run(model: nn.Module, inputs: dict[str, Tensor]) -> States:
    """What a model says at every stage: embeddings, layers, outputs; a vocabulary's logits of `some_tokens` only."""
    with _quiet(), _few_logits(model):
        outputs = model(**inputs, output_hidden_states=True, return_dict=True)
    states: States = []
    for field, prefix in (("hidden_states", ""), ("encoder_hidden_states", ""), ("decoder_hidden_states", "decoder ")):
        for index, state in enumerate(getattr(outputs, field, None) or ()):
            states.append((f"{prefix}layer {index - 1}" if index else f"{prefix}embeddings", state))
    for field in ("pooler_output", "logits", "start_logits", "end_logits"):
        if getattr(outputs, field, None) is not None:
            states.append((field, getattr(outputs, field)))
    return states


def some_tokens(tensor: Tensor) -> Tensor:
    """(B, about 32, …) of (B, N, …), spread evenly; all of them if N is small."""
    return tensor[:, :: max(tensor.shape[1] // _LOGIT_TOKENS, 1)]


@contextmanager
def _few_logits(model: nn.Module) -> Iterator[None]:
    """Lets a model with a vocabulary head apply it to some tokens only."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    projection = find()
    if projection is None:
        yield
        return
    hook = projection.register_forward_pre_hook(lambda module, args: (some_tokens(args[0]), *args[1:]))
    try:
        yield
    finally:
        hook.remove()


def graph_masks(config: HybridLongformerConfig, padding_mask: Tensor, global_mask: Tensor) -> list[Tensor]:
    """(B, H or 1, N, N) additive mask of every layer."""
    batch = describe_batch(
        batch_size=padding_mask.shape[0],
        length=padding_mask.shape[1],
        device=padding_mask.device,
        padding_mask=padding_mask,
        global_mask=global_mask,
    )
    plans = build_plans(config.attention_patterns(), batch, dtype=torch.float32, with_pieces=False)
    return [as_bias(plan_edges(plan), torch.float32) for plan in plans]


class _MaskInstead:
    """A hook that replaces the mask an attention module is called with."""

    def __init__(self, mask: Tensor):
        self.mask = mask

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if "attention_mask" not in kwargs:
            raise ConversionError(
                f"{type(module).__name__} of transformers {transformers.__version__} takes its mask in another way "
                "than known here, so it can't be compared: convert with verify=False, and please report this"
            )
        return args, kwargs | {"attention_mask": self.mask}


def compare(expected: States, found: States, attention_mask: Tensor, *, skip: set[str]) -> Verification:
    """The largest difference of every stage that both have, over real tokens only. Uses up `expected`."""
    real = attention_mask.flatten(0, -2).bool()
    ours = dict(found)
    stages = []
    for name, state in expected:
        if name in skip or name not in ours:
            continue
        difference = state.sub_(ours.pop(name)).abs_()
        largest = float(_of_real_tokens(difference, real).max())
        stages.append(Stage(name=name, difference=math.inf if math.isnan(largest) else largest))
    return Verification(num_tokens=real.shape[1], stages=tuple(stages))


def _of_real_tokens(difference: Tensor, real: Tensor) -> Tensor:
    """Without what belongs to padding, if it belongs to tokens at all."""
    if difference.shape[:2] == real.shape:
        return difference[real]
    some = some_tokens(real)
    return difference[some] if difference.dim() == 3 and difference.shape[:2] == some.shape else difference


def refuse_difference(verification: Verification, tolerance: float = TOLERANCE) -> None:
    """Raises if any stage is too far off, naming the first."""
    first = next((stage for stage in verification.stages if stage.difference > tolerance), None)
    if first is not None:
        raise ConversionError(
            f"the result differs from the source by {verification.largest_difference:.1e}, more than {tolerance:.0e}; "
            f"the first stage to depart is {first.name} ({first.difference:.1e}). Nothing was written"
        )
