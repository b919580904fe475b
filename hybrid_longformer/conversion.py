"""Conversion: turns RoBERTa, Longformer and their relatives into Hybrid Longformers, exactly, and back into Longformer.

Both ways read as their phases: open the source, plan the config, decide what becomes of every tensor, write, verify,
and only then let the folder appear. The families' names are in conversion_maps.py, the copying in
conversion_engine.py, the folder's appearance in conversion_output.py.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers import GenerationConfig, LongformerConfig
from transformers.dynamic_module_utils import custom_object_save

from . import modeling_hybrid_longformer as modeling
from .configuration_hybrid_longformer import HybridLongformerConfig
from .conversion_engine import Job, Resize, tile_positions, write_weights
from .conversion_maps import EXPORT, EXPORT_HEADS, POSITIONS
from .conversion_output import check_output, clear_leftovers, whole_or_nothing
from .conversion_plan import SEQ2SEQ, Options, Plan
from .conversion_report import ConversionReport, Verification, conversion_card, export_card, find_licence
from .conversion_source import ConversionError, SourceCheckpoint, open_source
from .conversion_verify import compare, load_model, make_inputs, refuse_difference, run, verification_length

__all__ = ["ConversionError", "ConversionReport", "convert_checkpoint", "export_to_longformer", "tile_positions"]

REPORT_FILE = "conversion_report.json"


def convert_checkpoint(
    source: str | os.PathLike | nn.Module,
    output: str | os.PathLike,
    *,
    max_length: int | None = None,
    attention_window: int | Sequence[int] | None = None,
    num_random_blocks: int | None = None,
    block_size: int | None = None,
    head: Literal["keep", "drop"] = "keep",
    decoder: Literal["warm-start"] | None = None,
    tie_encoder_decoder: bool = False,
    decoder_max_length: int | None = None,
    tokenizer: Any = None,
    verify: bool = True,
    overwrite: bool = False,
) -> ConversionReport:
    """Turns a checkpoint into a Hybrid Longformer with the same outputs.

    Args:
        source: a folder, a Hub id or a loaded transformers model: RoBERTa, XLM-RoBERTa, CamemBERT, BERT, Longformer,
            BigBird (the class with the same head), or BART and LED (HybridLongformerForConditionalGeneration).
        output: the folder to write. It appears whole or not at all.
        max_length: tokens the result can read. None for 4096, or the source's own length where that is more.
        attention_window: one value or one per layer. None for the source's own, or 512 if it has none.
        num_random_blocks: random blocks per query block. None for none if the source is a Longformer or LED, BigBird's
            own, and 3 otherwise.
        block_size: tokens per random block. None for BigBird's own, and 64 otherwise.
        head: "drop" leaves the source's head out.
        decoder: "warm-start" makes a seq2seq model of an encoder: the decoder starts from the same weights, its
            cross-attention from random ones (Rothe et al. 2020).
        tie_encoder_decoder: with a warm start, let encoder and decoder share their weights.
        decoder_max_length: tokens the decoder can write. None for the source's own, and 1024 with a warm start.
        tokenizer: saved along; None for the one in the source's folder.
        verify: compare the result with the source and refuse to write if they differ by more than 1e-4.
        overwrite: replace an output folder that has files in it, all of them.

    Returns:
        What became of every tensor, and the largest difference found.

    Raises:
        ConversionError: the source can't be converted exactly, or the output would overwrite something.
    """
    output = Path(output)
    clear_leftovers(output)
    check_output(output, overwrite=overwrite, source=source)
    options = Options(
        max_length=max_length,
        attention_window=attention_window,
        num_random_blocks=num_random_blocks,
        block_size=block_size,
        head=head,
        decoder=decoder,
        tie_encoder_decoder=tie_encoder_decoder,
        decoder_max_length=decoder_max_length,
    )
    with open_source(source, tokenizer=tokenizer) as checkpoint:
        plan = Plan(checkpoint, options)
        report = ConversionReport(
            source=checkpoint.label,
            source_class=plan.source_class,
            target_class=plan.model_class.__name__,
            notes=plan.notes,
        )

        def check(folder: Path) -> Verification:
            return plan.verify(folder, skip={"pooler_output"} if report.has_new("pooler") else set())

        _produce(
            plan.job(),
            report,
            output,
            generation=_generation_config(plan),
            max_tokens=plan.config.max_tokens,
            check=check if verify else None,
            card=conversion_card,
        )
    return report


def export_to_longformer(
    source: str | os.PathLike | nn.Module,
    output: str | os.PathLike,
    *,
    tokenizer: Any = None,
    verify: bool = True,
    overwrite: bool = False,
) -> ConversionReport:
    """Turns a Hybrid Longformer back into a Longformer with the same outputs and head.

    Args:
        source: a folder, a Hub id or a loaded model, without what Longformer lacks: random blocks, dilation, extra
            global tokens, a global context, causal attention, a decoder.
        output, tokenizer, verify, overwrite: as in `convert_checkpoint`.

    Raises:
        ConversionError: Longformer can't do what this model does, or the output would overwrite something.
    """
    output = Path(output)
    clear_leftovers(output)
    check_output(output, overwrite=overwrite, source=source)
    with open_source(source, tokenizer=tokenizer) as checkpoint:
        config, source_class = checkpoint.config, checkpoint.architecture or "HybridLongformerModel"
        refuse_export(config, source_class)
        job = _export_job(checkpoint, source_class)
        report = ConversionReport(
            source=checkpoint.label, source_class=source_class, target_class=EXPORT_HEADS[source_class]
        )

        def check(folder: Path) -> Verification:
            length = verification_length(config.max_tokens, config.window_per_layer, has_own_window=True)
            kind = source_class.removeprefix("HybridLongformer")
            inputs = make_inputs(config, checkpoint.tokenizer, length, kind=kind)
            expected = run(load_model(getattr(modeling, source_class), checkpoint.folder), inputs)
            found = run(load_model(type(job.model), folder), inputs)
            return compare(expected, found, inputs["attention_mask"], skip=set())

        _produce(
            job,
            report,
            output,
            generation=None,
            max_tokens=config.max_tokens,
            check=check if verify else None,
            card=export_card,
        )
    return report


def refuse_export(config: Any, source_class: str) -> None:
    """Says what of this model Longformer can't do."""
    if config.model_type != HybridLongformerConfig.model_type:
        raise ConversionError(f"model_type={config.model_type!r} is no Hybrid Longformer: only those can be exported")
    if source_class not in EXPORT_HEADS:
        raise ConversionError(
            f"{source_class} has no counterpart among the Longformer classes; these have: {', '.join(EXPORT_HEADS)}"
        )
    obstacles = {
        "num_random_blocks": 0,
        "num_extra_global_tokens": 0,
        "global_context": None,
        "causal_attention": False,
        "scale_embedding": False,
        "lm_head_act": "gelu",
        "classifier_act": "tanh",
    }
    found = [f"{name}={getattr(config, name)!r}" for name, plain in obstacles.items() if getattr(config, name) != plain]
    if any(dilation != 1 for own in config.dilation_per_layer_and_head for dilation in own):
        found.append(f"attention_dilation={config.attention_dilation!r}")
    if any(max(config.window_per_layer) % window for window in config.window_per_layer):
        # Longformer fills its input up to the widest window and then needs whole windows in every layer.
        found.append(f"attention_window={config.attention_window!r}, whose widest is no multiple of the others")
    if config.pad_token_id is None:
        found.append("pad_token_id=None")
    if found:
        raise ConversionError(f"Longformer has no equal of {', '.join(found)}: the outputs would differ")


def _export_job(source: SourceCheckpoint, source_class: str) -> Job:
    ours = source.config
    # Longformer counts positions from behind the padding token's id.
    reserved = ours.pad_token_id + 1
    rows = ours.max_tokens + reserved
    names = set(LongformerConfig().to_dict()) - {"model_type", "architectures", "auto_map", "transformers_version"}
    fields = {name: value for name, value in ours.to_dict().items() if name in names}
    fields |= {"max_position_embeddings": rows, "attention_window": ours.window_per_layer}
    if source_class.endswith("QuestionAnswering"):
        # Longformer's head has an output per label, ours always a start and an end.
        fields |= {"num_labels": 2, "id2label": None, "label2id": None}
    model_class = getattr(transformers, EXPORT_HEADS[source_class])
    with torch.device("meta"):
        model = model_class(LongformerConfig(**fields))
    return Job(
        source=source,
        model=model,
        map=EXPORT,
        prefix="hybrid_longformer",
        base_prefix="" if source_class == "HybridLongformerModel" else model.base_model_prefix,
        resizes={
            POSITIONS: Resize(
                source_rows=ours.max_position_embeddings,
                reserved=ours.position_offset,
                target_reserved=reserved,
                rows=rows,
            )
        },
    )


def _produce(
    job: Job,
    report: ConversionReport,
    output: Path,
    *,
    generation: GenerationConfig | None,
    max_tokens: int,
    check: Callable[[Path], Verification] | None,
    card: Callable[..., str],
) -> None:
    """Writes everything beside the output, checks it, and lets it appear."""
    source = job.source
    recipes, dropped = job.recipes()
    report.fates = [recipe.fate for recipe in recipes] + dropped
    dtype = _weights_dtype(source)
    with whole_or_nothing(output) as folder:
        write_weights(source, recipes, folder, dtype)
        _write_config_and_code(job.model, folder, dtype, generation)
        _write_tokenizer(source.tokenizer, folder, max_tokens)
        if check is not None:
            report.verification = check(folder)
            refuse_difference(report.verification)
        text = card(job.model, output.resolve().name, report, find_licence(source.folder))
        (folder / "README.md").write_text(text, encoding="utf-8")
        (folder / REPORT_FILE).write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")


def _weights_dtype(source: SourceCheckpoint) -> torch.dtype:
    name = next((name for name in source.tensors if name.endswith(("word_embeddings.weight", "shared.weight"))), None)
    return source.dtype(name or next(iter(source.tensors)))


def _write_config_and_code(model: Any, folder: Path, dtype: torch.dtype, generation: GenerationConfig | None) -> None:
    """What save_pretrained writes beside the weights, by the library's own means."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(dtype).removeprefix("torch.")
    if getattr(model, "_auto_class", None) is not None:
        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if generation is not None:
        generation.save_pretrained(folder)


def _generation_config(plan: Plan) -> GenerationConfig | None:
    if plan.kind != SEQ2SEQ:
        return None
    if not plan.is_warm_start and (plan.source.folder / "generation_config.json").exists():
        return GenerationConfig.from_pretrained(plan.source.folder)
    return GenerationConfig.from_model_config(plan.config)


def _write_tokenizer(tokenizer: Any, folder: Path, max_length: int) -> None:
    if tokenizer is None:
        return
    own_length = tokenizer.model_max_length
    tokenizer.model_max_length = max_length
    try:
        tokenizer.save_pretrained(folder)
    finally:
        tokenizer.model_max_length = own_length
