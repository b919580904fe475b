"""Sources of every family for the tests of conversion, and what is compared of them."""

import json
from collections import Counter
from pathlib import Path

import torch
import transformers
from safetensors import safe_open

import hybrid_longformer
from hybrid_longformer.conversion_report import ConversionReport

from .models import scramble

TOKENS, WINDOW = 64, 16
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
SEQ2SEQ_SHAPE = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
}
ROBERTA = {**SHAPE, "max_position_embeddings": TOKENS + 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
# Class prefix and config of every source family.
SOURCES = {
    "Roberta": ROBERTA,
    "XLMRoberta": ROBERTA,
    "Camembert": ROBERTA,
    "Bert": {**SHAPE, "max_position_embeddings": TOKENS, "pad_token_id": 0, "hidden_act": "gelu_new"},
    "Longformer": {**ROBERTA, "attention_window": [8, WINDOW], "sep_token_id": 2},
    "BigBird": {
        **SHAPE,
        "max_position_embeddings": TOKENS,
        "block_size": 8,
        "num_random_blocks": 2,
        "rescale_embeddings": True,
        "use_bias": False,
    },
    "Bart": {**SEQ2SEQ_SHAPE, "max_position_embeddings": TOKENS, "scale_embedding": True},
    "LED": {
        **SEQ2SEQ_SHAPE,
        "max_encoder_position_embeddings": TOKENS,
        "max_decoder_position_embeddings": 32,
        "attention_window": [8, WINDOW],
    },
}
HEADS = ["Model", "ForMaskedLM", "ForQuestionAnswering", "ForSequenceClassification", "ForTokenClassification"]
HEADS += ["ForMultipleChoice"]
CASES = [
    (family, head)
    for family in SOURCES
    for head in (["Model", "ForConditionalGeneration"] if family in ("Bart", "LED") else HEADS)
    if (family, head) != ("BigBird", "ForQuestionAnswering")
] + [("Bert", "ForPreTraining"), ("BigBird", "ForPreTraining")]
OPTIONS = {"max_length": 150, "attention_window": WINDOW, "block_size": 4}


def options_for(family: str) -> dict:
    """Sources with a window of their own keep it."""
    return {"max_length": 150} if family in ("Longformer", "LED", "BigBird") else OPTIONS


def make_source(family: str, head: str, **changes):
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(**(SOURCES[family] | {"vocab_size": 99, "type_vocab_size": 2, "num_labels": 3} | changes))
    if head == "ForQuestionAnswering":
        config.num_labels = 2
    torch.manual_seed(0)
    return scramble(getattr(transformers, f"{family}{head}")(config)).eval()


def save(model, folder: Path, **options) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def load(folder: Path):
    """The model of a converted folder, by the class its config names."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(hybrid_longformer, name).from_pretrained(folder).eval()


@torch.no_grad()
def outputs_of(model, inputs: dict) -> dict[str, torch.Tensor]:
    outputs = model(**inputs, output_hidden_states=True)
    found = {}
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif name.endswith("hidden_states"):
            found |= {f"{name}.{layer}": state for layer, state in enumerate(value)}
    return found


def make_inputs(head: str, length: int, *, with_globals: bool, types: int = 1) -> dict:
    ids = torch.randint(3, 99, (2, length), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if with_globals:
        marks = torch.zeros_like(ids)
        marks[0, [0, 5]] = marks[1, 2] = 1
        inputs["global_attention_mask"] = marks
    if types > 1:
        inputs["token_type_ids"] = (torch.arange(length) > length // 2).long().expand(2, -1)
    if head == "ForMultipleChoice":
        inputs = {name: tensor[None] for name, tensor in inputs.items()}
    if head in ("ForConditionalGeneration", "Seq2SeqModel"):
        inputs["decoder_input_ids"] = ids[:, :5]
    return inputs


def assert_equal_outputs(expected: dict, found: dict, *, ignore: tuple[str, ...] = ()) -> None:
    # BERT's pre-training class has other names for its two outputs.
    expected = {"logits" if name == "prediction_logits" else name: value for name, value in expected.items()}
    seq2seq_base = {"last_hidden_state"} if "encoder_last_hidden_state" in expected else set()
    skipped = {"past_key_values", "seq_relationship_logits", *seq2seq_base, *ignore}
    wanted = {name for name in expected if name not in skipped}
    assert any("hidden_states.2" in name for name in wanted)
    for name in wanted:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def assert_complete(report: ConversionReport, source: Path, output: Path) -> None:
    """Every tensor of the result is reported once; every tensor of the source has exactly one fate of its own."""
    stored = {name: file for file in source.glob("*.safetensors") for name in tensor_names(file)}
    written = {name: file for file in output.glob("*.safetensors") for name in tensor_names(file)}
    targets = Counter(fate.target for fate in report.fates if fate.target)
    assert dict(targets) == dict.fromkeys(written, 1)
    used = {name for fate in report.fates if fate.target for name in fate.sources}
    dropped = Counter(fate.sources[0] for fate in report.fates if fate.action == "dropped")
    assert all(count == 1 for count in dropped.values())
    assert not used & set(dropped)
    assert used | set(dropped) == set(stored)
    assert all(fate.note for fate in report.fates if fate.action in ("new", "dropped"))


def tensor_names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as weights:
        return list(weights.keys())
