"""Plans of a conversion: which family and class a source is, what its config becomes, and how the two are compared."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from . import modeling_hybrid_longformer as modeling
from .configuration_hybrid_longformer import HybridLongformerConfig
from .conversion_engine import Job, Resize
from .conversion_maps import (
    DECODER_POSITIONS,
    FAMILIES,
    POSITIONS,
    REFUSED_TYPES,
    SAME_FIELDS,
    TOKEN_TYPES,
    WARM_START,
    Family,
    Head,
)
from .conversion_report import Verification
from .conversion_source import ConversionError, SourceCheckpoint
from .conversion_verify import States, compare, load_model, make_inputs, run, run_masked, verification_length

USUAL_LENGTH, USUAL_WINDOW, USUAL_TARGET_LENGTH = 4096, 512, 1024
USUAL_RANDOM_BLOCKS, USUAL_BLOCK_SIZE = 3, 64
SEQ2SEQ = "ForConditionalGeneration"
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the caller asked for; None for the usual. See `convert_checkpoint`."""

    max_length: int | None
    attention_window: int | Sequence[int] | None
    num_random_blocks: int | None
    block_size: int | None
    head: str
    decoder: str | None
    tie_encoder_decoder: bool
    decoder_max_length: int | None


class Plan:
    """One conversion: the source's family and class, and the config and class that they become."""

    def __init__(self, source: SourceCheckpoint, options: Options):
        self.source = source
        self.options = options
        self.family = _find_family(source)
        self.source_class, self.head = _find_head(source, self.family)
        self.is_warm_start = options.decoder is not None
        self.drops_head = options.head == "drop"
        self.notes: list[str] = []
        self._refuse_unsuitable()
        self.tokens = self._special_tokens()
        self.config = self._build_config()
        self._note_what_only_training_sees()

    @property
    def kind(self) -> str:
        """The result's class, without "HybridLongformer"."""
        if self.is_warm_start or self.head.target == SEQ2SEQ:
            return SEQ2SEQ
        return "Model" if self.drops_head else self.head.target

    @property
    def model_class(self) -> Any:
        return getattr(modeling, f"HybridLongformer{self.kind}")

    @property
    def has_own_head(self) -> bool:
        """Whether the result has the source's head, so that the two can be compared to the end."""
        return not (self.is_warm_start or self.drops_head)

    @property
    def position_offset(self) -> int:
        if self.family.counts_after_padding:
            return int(self.source.config.pad_token_id) + 1
        return self.family.position_offset

    @property
    def source_length(self) -> int:
        positions = getattr(self.source.config, self.family.position_field)
        return positions - self.position_offset if self.family.reserved_rows_counted else positions

    @property
    def source_target_length(self) -> int:
        """Tokens that the source's decoder can write."""
        theirs = self.source.config
        return getattr(theirs, "max_decoder_position_embeddings", None) or theirs.max_position_embeddings

    def _refuse_unsuitable(self) -> None:
        theirs, options = self.source.config, self.options
        if getattr(theirs, "is_decoder", False) or getattr(theirs, "add_cross_attention", False):
            raise ConversionError("the source is a decoder (is_decoder or add_cross_attention is set): give an encoder")
        positions = getattr(theirs, "position_embedding_type", None) or "absolute"
        if positions != "absolute":
            raise ConversionError(f"position_embedding_type={positions!r} has no counterpart here: only 'absolute' has")
        if self.family.counts_after_padding and theirs.pad_token_id is None:
            raise ConversionError(
                "pad_token_id is not in the source's config, but its positions start behind it: add it"
            )
        if options.head not in ("keep", "drop"):
            raise ConversionError(f'head={options.head!r} must be "keep" or "drop"')
        if options.decoder not in (None, "warm-start"):
            raise ConversionError(f'decoder={options.decoder!r} must be None or "warm-start"')
        if options.tie_encoder_decoder and not self.is_warm_start:
            raise ConversionError('tie_encoder_decoder=True needs a decoder to tie: give decoder="warm-start"')
        if options.decoder_max_length is not None and self.kind != SEQ2SEQ:
            raise ConversionError(
                f"decoder_max_length={options.decoder_max_length} needs a decoder, which {self.source_class} lacks: "
                'leave it out, or give decoder="warm-start"'
            )
        if self.is_warm_start and not self.family.can_start_decoder:
            able = ", ".join(name for name, family in FAMILIES.items() if family.can_start_decoder)
            raise ConversionError(
                f'decoder="warm-start" does not work for model_type={theirs.model_type!r}: it is for {able}'
            )
        if self.head.refusal and self.has_own_head:
            raise ConversionError(
                f"the head of {self.source_class} can't be carried over exactly: {self.head.refusal}. "
                'Give head="drop" to convert the model without it'
            )

    def _special_tokens(self) -> dict[str, Any]:
        """The source's special tokens, checked against its tokenizer; what the config leaves out is the tokenizer's."""
        theirs, tokenizer = self.source.config, self.source.tokenizer
        found: dict[str, Any] = {}
        for name in SPECIAL_TOKENS:
            own, other = getattr(theirs, name, None), getattr(tokenizer, name, None)
            allowed = own if isinstance(own, list) else [own]
            if own is not None and other is not None and other not in allowed:
                raise ConversionError(
                    f"{name} is {own} in the config but {other} in the tokenizer: they don't belong together; "
                    "correct the config, or give the right tokenizer"
                )
            found[name] = other if own is None else own
        if tokenizer is not None and len(tokenizer) > theirs.vocab_size:
            raise ConversionError(
                f"the tokenizer has {len(tokenizer)} tokens but the config's vocab_size is {theirs.vocab_size}: "
                "resize the source's embeddings first, or give the right tokenizer"
            )
        if found["sep_token_id"] is None and self.family.separates_by_end:
            found["sep_token_id"] = found["eos_token_id"]
        if found["sep_token_id"] is None:
            self.notes.append(
                "The separator is not known: give global_attention_mask yourself, or set sep_token_id in the config."
            )
        return found

    def _note_what_only_training_sees(self) -> None:
        names = ("activation_dropout", "encoder_layerdrop", "decoder_layerdrop")
        lost = [f"{name}={value}" for name in names if (value := getattr(self.source.config, name, 0))]
        if lost:
            self.notes.append(f"No counterpart, which only training notices: {', '.join(lost)}.")

    def _build_config(self) -> HybridLongformerConfig:
        theirs, options = self.source.config, self.options
        fields = {name: getattr(theirs, name, None) for name in SAME_FIELDS}
        fields |= {ours: getattr(theirs, name, None) for name, ours in self.family.fields}
        if self.head.activation_field and self.has_own_head:
            fields[self.head.activation_field] = theirs.hidden_act
        fields = {name: value for name, value in fields.items() if value is not None}
        fields |= {
            "position_offset": self.position_offset,
            "max_position_embeddings": self._max_length() + self.position_offset,
            "attention_window": self._window(),
            "block_size": _first_given(options.block_size, getattr(theirs, "block_size", USUAL_BLOCK_SIZE)),
            "id2label": theirs.id2label,
            "label2id": theirs.label2id,
            **self.tokens,
            **self.family.settings,
        }
        if self.kind == SEQ2SEQ:
            fields |= self._decoder_fields()
        return self._with_random_blocks(fields)

    def _max_length(self) -> int:
        asked, own = self.options.max_length, self.source_length
        if asked is not None and asked < own:
            raise ConversionError(
                f"max_length={asked} is below the source's {own}: positions would be lost; use {own} or more"
            )
        return max(USUAL_LENGTH, own) if asked is None else asked

    def _window(self) -> int | list[int]:
        asked, theirs = self.options.attention_window, self.source.config
        if asked is not None:
            return asked if isinstance(asked, int) else list(asked)
        if self.family.has_own_window:
            return theirs.attention_window
        # BigBird's three blocks: a token in the middle of its block sees a block to either side.
        return 2 * theirs.block_size if theirs.model_type == "big_bird" else USUAL_WINDOW

    def _with_random_blocks(self, fields: dict[str, Any]) -> HybridLongformerConfig:
        """The config; random blocks that nobody asked for are left out where they don't fit."""
        asked = self.options.num_random_blocks
        usual = getattr(self.source.config, "num_random_blocks", USUAL_RANDOM_BLOCKS)
        blocks = 0 if self.family.has_own_window else usual
        blocks = blocks if asked is None else asked
        try:
            return HybridLongformerConfig(**fields, num_random_blocks=blocks)
        except ValueError as error:
            if asked is not None or not blocks or "does not fit" not in str(error):
                raise ConversionError(str(error)) from error
        self.notes.append("No random blocks: with this window and length none would lie beyond the window.")
        return HybridLongformerConfig(**fields, num_random_blocks=0)

    def _decoder_fields(self) -> dict[str, Any]:
        asked = self.options.decoder_max_length
        fields: dict[str, Any] = {"is_encoder_decoder": True}
        if self.is_warm_start:
            length = _first_given(asked, USUAL_TARGET_LENGTH)
            fields |= self._start_and_end() | {"tie_encoder_decoder": self.options.tie_encoder_decoder}
        else:
            own = self.source_target_length
            length = _first_given(asked, own)
            if length < own:
                raise ConversionError(
                    f"decoder_max_length={asked} is below the source's {own}: positions would be lost; "
                    f"use {own} or more"
                )
        return fields | {"decoder_max_position_embeddings": length + self.position_offset}

    def _start_and_end(self) -> dict[str, Any]:
        """What a warm-started decoder begins and ends with: BERT has no other marks than those of its input."""
        start, end = self.tokens["bos_token_id"], self.tokens["eos_token_id"]
        start = getattr(self.source.tokenizer, "cls_token_id", None) if start is None else start
        end = self.tokens["sep_token_id"] if end is None else end
        if start is None or end is None:
            self.notes.append("Set decoder_start_token_id and eos_token_id before generating: the source has none.")
        return {"bos_token_id": start, "decoder_start_token_id": start, "eos_token_id": end}

    def job(self) -> Job:
        """What becomes of every tensor."""
        with torch.device("meta"):
            model = self.model_class(self.config)
        names = self.family.map
        if self.is_warm_start:
            names = names | WARM_START
        elif not self.drops_head:
            names = names | self.head.map
        offset = self.position_offset
        rows, decoder_rows = self.config.max_position_embeddings, self.config.decoder_max_position_embeddings
        table = Resize(source_rows=self.source_length + offset, reserved=offset, target_reserved=offset, rows=rows)
        resizes = {POSITIONS: table}
        if self.is_warm_start:
            # The decoder here has no token types; the source's tokens always had the first.
            resizes[DECODER_POSITIONS] = replace(table, rows=decoder_rows, added=TOKEN_TYPES)
        elif self.kind == SEQ2SEQ:
            source_rows = self.source_target_length + offset
            resizes[DECODER_POSITIONS] = replace(table, rows=decoder_rows, source_rows=source_rows)
        return Job(
            source=self.source,
            model=model,
            map=names,
            prefix=self.family.prefix,
            base_prefix="" if self.kind == "Model" else model.base_model_prefix,
            resizes=resizes,
            drop_heads=self.drops_head,
        )

    def verify(self, folder: Path, *, skip: set[str]) -> Verification:
        """Compares the written folder with the source, at every stage but those in `skip`."""
        windows = self.config.window_per_layer
        length = verification_length(self.source_length, windows, has_own_window=self.family.has_own_window)
        if self.family.pads_to_window and length % max(windows):
            raise ConversionError(
                f"the source fills its input up to whole windows of {max(windows)}, more than the "
                f"{self.source_length} tokens it has positions for, so it can't be compared: use smaller windows, or "
                "verify=False"
            )
        kind = "Model" if self.is_warm_start else self.kind
        inputs = make_inputs(self.config, self.source.tokenizer, length, kind=kind)
        expected = self._run_source(inputs)
        # Models hold reference cycles; without this the source would stay beside the result.
        gc.collect()
        result = load_model(self.model_class, folder)
        found = run(result.get_encoder() if self.is_warm_start else result, inputs)
        return compare(expected, found, inputs["attention_mask"], skip=skip)

    def _run_source(self, inputs: dict[str, torch.Tensor]) -> States:
        base_class, *_ = self.family.heads
        options: dict[str, Any] = {"attn_implementation": "eager", **self.family.check_options}
        if self.family.has_own_window:
            options["attention_window"] = self.config.window_per_layer
        name = self.source_class if self.has_own_head else base_class
        model = load_model(getattr(transformers, name), self.source.folder, **options)
        if self.family.has_own_window:
            return run(model, inputs)
        return run_masked(model, inputs, self.config, mask_module=self.family.mask_module)


def _first_given(asked: int | None, usual: int) -> int:
    return usual if asked is None else asked


def _find_family(source: SourceCheckpoint) -> Family:
    model_type = source.config.model_type
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    known = ", ".join(FAMILIES)
    if model_type in REFUSED_TYPES:
        raise ConversionError(
            f"model_type={model_type!r} can't be converted: {REFUSED_TYPES[model_type]}. Known: {known}"
        )
    raise ConversionError(f"model_type={model_type!r} of {source.label} is not known here. Known: {known}")


def _find_head(source: SourceCheckpoint, family: Family) -> tuple[str, Head]:
    name = source.architecture
    if name is None:
        name = _infer_class(source, family)
    if name not in family.heads:
        raise ConversionError(
            f"architecture {name} of {source.label} is not known here. Known for this model type: "
            f"{', '.join(family.heads)}"
        )
    return name, family.heads[name]


def _infer_class(source: SourceCheckpoint, family: Family) -> str:
    """Old configs don't name a class: the language-model head shows in the tensors, other heads must be named."""
    has_lm_head = any(name.startswith(("lm_head", "cls.predictions")) for name in source.tensors)
    wanted = ("MaskedLM", "ConditionalGeneration") if has_lm_head else ("Model",)
    return next(name for name in family.heads if name.endswith(wanted))
