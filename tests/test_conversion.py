"""Conversion: every source class becomes a model with the same outputs, nothing is lost in silence, and back again."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import hybrid_longformer
from hybrid_longformer import conversion, conversion_engine, conversion_plan
from hybrid_longformer.conversion import convert_checkpoint, export_to_longformer, tile_positions
from hybrid_longformer.conversion_source import ConversionError

from .conversion_cases import (
    CASES,
    OPTIONS,
    SEQ2SEQ_SHAPE,
    TOKENS,
    WINDOW,
    assert_complete,
    assert_equal_outputs,
    load,
    make_inputs,
    make_source,
    options_for,
    outputs_of,
    save,
    tensor_names,
)
from .models import build


@pytest.mark.parametrize(("family", "head"), CASES, ids=lambda value: value)
def test_every_source_class_keeps_its_outputs(family, head, tmp_path):
    model = make_source(family, head)
    source, output = save(model, tmp_path / "source"), tmp_path / "output"
    report = convert_checkpoint(source, output, **options_for(family))
    assert report.verification.largest_difference < 1e-5
    assert report.verification.num_tokens == TOKENS
    assert_complete(report, source, output)
    # Without the mask that verification lends the source: where the window is full attention, or the source's own.
    has_window = family in ("Longformer", "LED")
    is_seq2seq = family in ("Bart", "LED")
    inputs = make_inputs(
        "Seq2SeqModel" if is_seq2seq else head,
        50 if has_window else WINDOW // 2 + 1,
        with_globals=has_window,
        types=1 if is_seq2seq else 2,
    )
    result = load(output)
    expected = outputs_of(model, inputs)
    found = outputs_of(result, inputs)
    assert result.config.max_tokens == 150
    assert_equal_outputs(expected, found)


@pytest.mark.parametrize("family", ["Roberta", "Bert", "Bart"])
def test_untied_embeddings_stay_apart(family, tmp_path):
    head = "ForConditionalGeneration" if family == "Bart" else "ForMaskedLM"
    source = save(make_source(family, head, tie_word_embeddings=False), tmp_path / "source")
    report = convert_checkpoint(source, tmp_path / "output", **OPTIONS)
    assert report.verification.largest_difference < 1e-5
    assert not load(tmp_path / "output").config.tie_word_embeddings
    assert_complete(report, source, tmp_path / "output")


def test_positions_are_tiled_behind_the_reserved_rows(tmp_path):
    model = make_source("Roberta", "Model")
    report = convert_checkpoint(save(model, tmp_path / "source"), tmp_path / "output", **OPTIONS)
    theirs = model.embeddings.position_embeddings.weight
    ours = load(tmp_path / "output").embeddings.position_embeddings.weight
    assert ours.shape[0] == 152
    assert torch.equal(ours[:2], theirs[:2])
    assert torch.equal(ours[2:], theirs[2:].repeat(3, 1)[:150])
    assert [fate.target for fate in report.fates if fate.action == "tiled"] == ["embeddings.position_embeddings.weight"]


class TestTilePositions:
    table = torch.arange(5.0)[:, None].expand(5, 2)

    @pytest.mark.parametrize(
        ("rows", "options", "expected"),
        [
            (9, {}, [0, 1, 2, 3, 4, 2, 3, 4, 2]),
            (4, {}, [0, 1, 2, 3]),
            (7, {"reserved": 0}, [0, 1, 2, 3, 4, 0, 1]),
            (6, {"reserved": 2, "target_reserved": 1}, [0, 2, 3, 4, 2, 3]),
            (6, {"reserved": 1, "target_reserved": 3}, [0, 0, 0, 1, 2, 3]),
        ],
    )
    def test_repeats_behind_the_reserved_rows(self, rows, options, expected):
        tiled = tile_positions(self.table, rows, **options)
        assert tiled[:, 0].tolist() == tiled[:, 1].tolist() == expected

    @pytest.mark.parametrize("options", [{"reserved": 5}, {"reserved": -1}, {"target_reserved": 10}])
    def test_refuses_what_leaves_no_position(self, options):
        with pytest.raises(ValueError, match="reserved"):
            tile_positions(self.table, 9, **options)

    def test_result_is_a_table_of_its_own(self):
        table = torch.ones(4, 2)
        tile_positions(table, 4).zero_()
        assert table.eq(1).all()


def test_windows_smaller_than_the_text_are_compared_under_the_same_mask(tmp_path):
    source = save(make_source("Roberta", "ForMaskedLM"), tmp_path / "source")
    windows = {"attention_window": [4, 8], "num_random_blocks": 1, "block_size": 4}
    report = convert_checkpoint(source, tmp_path / "output", max_length=TOKENS, **windows)
    assert report.verification.largest_difference < 1e-5
    assert not [fate for fate in report.fates if fate.action == "tiled"]


def test_longformer_keeps_window_and_global_projections(tmp_path):
    model = make_source("Longformer", "ForMaskedLM")
    report = convert_checkpoint(save(model, tmp_path / "source"), tmp_path / "output", max_length=TOKENS)
    config = load(tmp_path / "output").config
    assert (config.attention_window, config.num_random_blocks) == ([8, WINDOW], 0)
    assert not [fate for fate in report.fates if fate.action in ("copied into *_global", "new", "tiled")]


def test_big_bird_gives_block_size_and_random_blocks(tmp_path):
    convert_checkpoint(save(make_source("BigBird", "Model"), tmp_path / "source"), tmp_path / "output")
    config = load(tmp_path / "output").config
    assert (config.block_size, config.num_random_blocks, config.attention_window) == (8, 2, 16)
    assert (config.separate_global_projections, config.max_tokens) == (False, 4096)


def test_usual_settings(tmp_path):
    convert_checkpoint(save(make_source("Roberta", "Model"), tmp_path / "source"), tmp_path / "output")
    config = load(tmp_path / "output").config
    assert (config.max_tokens, config.attention_window, config.num_random_blocks) == (4096, 512, 3)


def test_labels_and_dtype_travel(tmp_path):
    labels = {0: "no", 1: "yes", 2: "maybe"}
    model = make_source(
        "Roberta", "ForSequenceClassification", id2label=labels, label2id={"no": 0, "yes": 1, "maybe": 2}
    )
    convert_checkpoint(save(model.half(), tmp_path / "source"), tmp_path / "output", **OPTIONS)
    result = load(tmp_path / "output")
    assert result.config.id2label == labels
    assert {tensor.dtype for tensor in load_file(tmp_path / "output" / "model.safetensors").values()} == {torch.float16}


def test_loaded_model_as_source(tmp_path):
    model = make_source("Roberta", "ForTokenClassification").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = convert_checkpoint(model, tmp_path / "output", **OPTIONS)
    assert report.verification.largest_difference < 1e-5
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_shards_stay_shards(tmp_path):
    source = save(make_source("Bart", "ForConditionalGeneration"), tmp_path / "source", max_shard_size="40KB")
    report = convert_checkpoint(source, tmp_path / "output", **OPTIONS)
    shards = sorted(path.name for path in (tmp_path / "output").glob("*.safetensors"))
    assert len(shards) == len(list(source.glob("*.safetensors"))) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert report.verification.largest_difference < 1e-5
    assert_complete(report, source, tmp_path / "output")


def test_old_names_and_leftovers(tmp_path):
    source = save(make_source("Bert", "ForPreTraining"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(TOKENS)[None]
    save_file(old, source / "model.safetensors", metadata={"format": "pt"})
    report = convert_checkpoint(source, tmp_path / "output", **OPTIONS)
    assert report.verification.largest_difference < 1e-5
    dropped = {fate.sources[0] for fate in report.fates if fate.action == "dropped"}
    assert {"bert.embeddings.position_ids", "cls.seq_relationship.weight", "bert.pooler.dense.bias"} <= dropped


def test_shared_weights_stored_under_the_other_name(tmp_path):
    source = save(make_source("Roberta", "ForMaskedLM"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.decoder.weight"] = tensors.pop("roberta.embeddings.word_embeddings.weight")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = convert_checkpoint(source, tmp_path / "output", **OPTIONS)
    assert report.verification.largest_difference < 1e-5


def test_config_without_architecture(tmp_path):
    source = save(make_source("Longformer", "ForMaskedLM"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["architectures"]
    (source / "config.json").write_text(json.dumps(config))
    assert convert_checkpoint(source, tmp_path / "output").target_class == "HybridLongformerForMaskedLM"


def test_head_can_be_left_out(tmp_path):
    model = make_source("BigBird", "ForQuestionAnswering")
    source = save(model, tmp_path / "source")
    with pytest.raises(ConversionError, match="feed-forward block"):
        convert_checkpoint(source, tmp_path / "output")
    report = convert_checkpoint(source, tmp_path / "output", head="drop", max_length=150)
    assert report.target_class == "HybridLongformerModel"
    assert report.verification.largest_difference < 1e-5
    assert_complete(report, source, tmp_path / "output")


class TestWarmStart:
    @pytest.mark.parametrize(
        ("family", "head"), [("Roberta", "ForMaskedLM"), ("Bert", "ForMaskedLM"), ("Bert", "Model")]
    )
    def test_decoder_is_the_source_as_a_decoder(self, family, head, tmp_path):
        """The source's own class, run as a decoder with our cross-attention, gives our decoder's hidden states."""
        source = save(make_source(family, head), tmp_path / "source")
        report = convert_checkpoint(source, tmp_path / "output", decoder="warm-start", **OPTIONS)
        assert report.verification.largest_difference < 1e-5
        assert_complete(report, source, tmp_path / "output")
        result = load(tmp_path / "output")
        base = getattr(transformers, f"{family}Model")
        decoder = base.from_pretrained(
            source, is_decoder=True, add_cross_attention=True, add_pooling_layer=False
        ).eval()
        for theirs, ours in zip(decoder.encoder.layer, result.decoder.layer, strict=True):
            theirs.crossattention.load_state_dict(ours.crossattention.state_dict())
        document = torch.randn(2, 20, 32)
        ids = make_inputs("", 12, with_globals=False)["input_ids"]
        with torch.no_grad():
            expected = decoder(ids, encoder_hidden_states=document).last_hidden_state
            found = result.decoder(ids, encoder_hidden_states=document).last_hidden_state
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        if head == "ForMaskedLM":
            bias = make_source(family, head).get_output_embeddings().bias
            assert torch.equal(result.lm_head.bias, bias)

    def test_longformer_and_report(self, tmp_path):
        source = save(make_source("Longformer", "Model"), tmp_path / "source")
        report = convert_checkpoint(source, tmp_path / "output", decoder="warm-start", decoder_max_length=100)
        assert report.verification.largest_difference < 1e-5
        new = {fate.group for fate in report.fates if fate.action == "new"}
        assert {group for group in new if "crossattention" not in group} == {"lm_head"}
        assert load(tmp_path / "output").config.decoder_max_position_embeddings == 102

    def test_tied_encoder_and_decoder_share_weights(self, tmp_path):
        source = save(make_source("Roberta", "Model"), tmp_path / "source")
        convert_checkpoint(source, tmp_path / "output", decoder="warm-start", tie_encoder_decoder=True, **OPTIONS)
        names = tensor_names(tmp_path / "output" / "model.safetensors")
        assert not [name for name in names if name.startswith("decoder.layer.") and "crossattention" not in name]
        result = load(tmp_path / "output")
        encoder, decoder = result.hybrid_longformer.encoder.layer[1], result.decoder.layer[1]
        assert decoder.attention.self.query.weight is encoder.attention.self.query.weight
        assert decoder.output.LayerNorm.bias is encoder.output.LayerNorm.bias
        assert result.generate(torch.tensor([[0, 5, 6, 2]]), max_new_tokens=3, do_sample=False).shape[0] == 1
        result.save_pretrained(tmp_path / "again")
        assert tensor_names(tmp_path / "again" / "model.safetensors") == sorted(names)

    def test_what_cannot_start_a_decoder(self, tmp_path):
        source = save(make_source("Bart", "Model"), tmp_path / "source")
        with pytest.raises(ConversionError, match="it is for roberta"):
            convert_checkpoint(source, tmp_path / "output", decoder="warm-start")


def test_what_only_training_notices_is_said(tmp_path):
    model = make_source("Bart", "Model", activation_dropout=0.1)
    report = convert_checkpoint(model, tmp_path / "output", verify=False, **OPTIONS)
    assert "activation_dropout=0.1" in str(report)


def test_generation_settings_travel(tmp_path):
    model = make_source("Bart", "ForConditionalGeneration")
    model.generation_config.num_beams = 3
    convert_checkpoint(save(model, tmp_path / "source"), tmp_path / "output", **OPTIONS)
    result = load(tmp_path / "output")
    assert result.generation_config.num_beams == 3
    ids = make_inputs("", 8, with_globals=False)["input_ids"]
    options = {"max_new_tokens": 6, "num_beams": 2, "do_sample": False}
    assert torch.equal(result.generate(ids, **options), model.generate(ids, **options))


def make_tokenizer(**changes) -> PreTrainedTokenizerFast:
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4, "long": 5, "documents": 6, "are": 7, "read": 8}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "pad_token": "<pad>"}
    tokens |= {"unk_token": "<unk>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=TOKENS, **(tokens | changes))


class TestTokenizer:
    def test_round_trip(self, tmp_path):
        source = save(make_source("Roberta", "ForMaskedLM"), tmp_path / "source")
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(source)
        convert_checkpoint(source, tmp_path / "output", **OPTIONS)
        again = AutoTokenizer.from_pretrained(tmp_path / "output")
        assert again.model_max_length == 150
        assert again("long documents are read")["input_ids"] == tokenizer("long documents are read")["input_ids"]
        assert again.all_special_ids == tokenizer.all_special_ids
        assert AutoTokenizer.from_pretrained(source).model_max_length == TOKENS

    def test_given_tokenizer_keeps_its_own_length(self, tmp_path):
        tokenizer = make_tokenizer()
        convert_checkpoint(make_source("Roberta", "Model"), tmp_path / "output", tokenizer=tokenizer, **OPTIONS)
        assert tokenizer.model_max_length == TOKENS
        assert AutoTokenizer.from_pretrained(tmp_path / "output").model_max_length == 150

    def test_ids_are_checked(self, tmp_path):
        with pytest.raises(ConversionError, match="pad_token_id is 1 in the config but 3 in the tokenizer"):
            convert_checkpoint(
                make_source("Roberta", "Model"), tmp_path / "output", tokenizer=make_tokenizer(pad_token="<unk>")
            )
        with pytest.raises(ConversionError, match="tokenizer has 9 tokens"):
            convert_checkpoint(
                make_source("Roberta", "Model", vocab_size=8), tmp_path / "output", tokenizer=make_tokenizer()
            )

    def test_missing_separator_is_the_tokenizers(self, tmp_path):
        model = make_source("Bert", "ForQuestionAnswering", pad_token_id=1)
        convert_checkpoint(model, tmp_path / "output", tokenizer=make_tokenizer(), **OPTIONS)
        assert load(tmp_path / "output").config.sep_token_id == 2


def spoil(name: str):
    """Writes the weights, and then one of them wrong."""

    def write(source, recipes, folder, dtype):
        conversion_engine.write_weights(source, recipes, folder, dtype)
        tensors = load_file(folder / "model.safetensors")
        tensors[name][-1] += 0.01
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return write


class TestVerification:
    def test_a_difference_is_refused_and_the_layer_named(self, tmp_path, monkeypatch):
        monkeypatch.setattr(conversion, "write_weights", spoil("encoder.layer.1.attention.output.dense.bias"))
        with pytest.raises(ConversionError, match="first stage to depart is layer 1"):
            convert_checkpoint(make_source("Roberta", "Model"), tmp_path / "output", **OPTIONS)
        assert not list(tmp_path.iterdir())

    def test_vocabulary_logits_are_compared_though_only_some_are_made(self, tmp_path, monkeypatch):
        shapes = []

        def watch(expected, found, attention_mask, **options):
            shapes.extend(tuple(states[-1][1].shape) for states in (expected, found))
            return compare(expected, found, attention_mask, **options)

        compare = conversion_plan.compare
        monkeypatch.setattr(conversion_plan, "compare", watch)
        monkeypatch.setattr(conversion, "write_weights", spoil("lm_head.decoder.bias"))
        with pytest.raises(ConversionError, match=r"first stage to depart is logits \(1.0e-02\)"):
            convert_checkpoint(make_source("Roberta", "ForMaskedLM"), tmp_path / "output", **OPTIONS)
        # Of the 64 tokens every second one.
        assert shapes == [(2, 32, 99)] * 2

    @pytest.mark.parametrize(
        ("options", "compared"),
        [({}, "embeddings, layers 0 to 1, logits"), ({"decoder": "warm-start"}, "embeddings, layers 0 to 1")],
    )
    def test_report_says_what_was_compared(self, tmp_path, options, compared):
        report = convert_checkpoint(make_source("Roberta", "ForMaskedLM"), tmp_path / "output", **OPTIONS, **options)
        assert report.verification_text().endswith(f"{report.verification.largest_difference:.1e} ({compared})")

    def test_can_be_switched_off(self, tmp_path):
        report = convert_checkpoint(make_source("Roberta", "Model"), tmp_path / "output", verify=False, **OPTIONS)
        assert report.verification is None
        assert "not verified" in str(report)


class TestErrors:
    def refused(self, source, tmp_path, match, **options):
        with pytest.raises(ConversionError, match=match):
            convert_checkpoint(source, tmp_path / "output", **options)
        assert not (tmp_path / "output").exists()

    def edit_config(self, folder: Path, **changes) -> Path:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    @pytest.fixture
    def source(self, tmp_path) -> Path:
        return save(make_source("Roberta", "ForMaskedLM"), tmp_path / "source")

    def test_max_length_below_the_source(self, source, tmp_path):
        self.refused(source, tmp_path, "max_length=32 is below the source's 64", max_length=32)

    def test_odd_window(self, source, tmp_path):
        self.refused(source, tmp_path, "attention_window=7 is odd", attention_window=7)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"block_size": 0}, "block_size=0 must be a whole number of at least 1"),
            ({"decoder": "warm-start", "decoder_max_length": 0}, "decoder_max_position_embeddings=2 must be"),
            ({"decoder_max_length": 77}, "decoder_max_length=77 needs a decoder, which RobertaForMaskedLM lacks"),
        ],
    )
    def test_options_that_cannot_be(self, source, tmp_path, options, match):
        self.refused(source, tmp_path, match, **options)

    def test_config_that_is_none(self, source, tmp_path):
        (source / "config.json").write_text("[1]")
        self.refused(source, tmp_path, "holds a list, not the fields of a config")

    def test_what_is_converted_already(self, source, tmp_path):
        convert_checkpoint(source, tmp_path / "once", verify=False, **OPTIONS)
        self.refused(tmp_path / "once", tmp_path, "it is a Hybrid Longformer already")

    def test_unknown_model_type(self, tmp_path):
        model = transformers.DistilBertModel(transformers.DistilBertConfig(dim=8, n_layers=1, n_heads=1, hidden_dim=8))
        self.refused(
            save(model, tmp_path / "source"), tmp_path, "'distilbert'.* Known: roberta, xlm-roberta, camembert"
        )

    @pytest.mark.parametrize(("family", "reason"), [("MBart", "pre-LN"), ("Pegasus", "sinusoid")])
    def test_what_does_not_map_exactly(self, family, reason, tmp_path):
        config = getattr(transformers, f"{family}Config")(**SEQ2SEQ_SHAPE, vocab_size=99)
        model = getattr(transformers, f"{family}Model")(config)
        self.refused(save(model, tmp_path / "source"), tmp_path, reason)

    def test_unheard_of_model_type(self, source, tmp_path):
        self.refused(self.edit_config(source, model_type="unheard-of"), tmp_path, "'unheard-of'.* Known: roberta")

    def test_no_padding_token(self, source, tmp_path):
        self.refused(self.edit_config(source, pad_token_id=None), tmp_path, "pad_token_id is not in")

    def test_broken_tokenizer(self, source, tmp_path):
        (source / "tokenizer.json").write_text("{}")
        self.refused(source, tmp_path, "tokenizer in .* can't be loaded")

    def test_unknown_architecture(self, source, tmp_path):
        self.edit_config(source, architectures=["RobertaForCausalLM"])
        self.refused(
            source, tmp_path, "RobertaForCausalLM .* Known for this model type: RobertaModel, RobertaForMaskedLM"
        )

    def test_decoders_and_seq2seq_heads(self, tmp_path):
        model = make_source("Bart", "ForQuestionAnswering")
        self.refused(save(model, tmp_path / "source"), tmp_path, "generation head alone")

    def test_missing_and_extra_tensors_are_named(self, source, tmp_path):
        tensors = load_file(source / "model.safetensors")
        del tensors["roberta.encoder.layer.1.output.dense.bias"]
        tensors["adapter.weight"] = torch.zeros(2)
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        self.refused(
            source, tmp_path, r"missing for hybrid_longformer.encoder.layer.1.output.dense.bias; not known: adapter"
        )

    def test_wrong_shape(self, source, tmp_path):
        self.edit_config(source, intermediate_size=50)
        self.refused(
            source, tmp_path, r"intermediate.dense.weight has shape \(48, 32\), but the config asks for \(50, 32\)"
        )

    def test_wrong_number_of_positions(self, source, tmp_path):
        self.edit_config(source, max_position_embeddings=80)
        self.refused(source, tmp_path, "has 66 rows, but the config asks for 80", verify=False)

    def test_pickle_only(self, source, tmp_path):
        (source / "model.safetensors").rename(source / "pytorch_model.bin")
        self.refused(source, tmp_path, "pickle only .*save_pretrained")

    def test_no_weights(self, source, tmp_path):
        (source / "model.safetensors").unlink()
        self.refused(source, tmp_path, "has no weights")

    def test_no_config(self, source, tmp_path):
        (source / "config.json").unlink()
        self.refused(source, tmp_path, "has no config.json")

    def test_broken_config(self, source, tmp_path):
        (source / "config.json").write_text("{")
        self.refused(source, tmp_path, "not valid JSON")

    def test_truncated_weights(self, source, tmp_path):
        file = source / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        self.refused(source, tmp_path, "damaged or cut off")

    def test_missing_shard(self, tmp_path):
        source = save(make_source("Roberta", "Model"), tmp_path / "source", max_shard_size="20KB")
        sorted(source.glob("*.safetensors"))[1].unlink()
        self.refused(source, tmp_path, "names files that are not there: model-00002")

    def test_no_such_folder(self, tmp_path):
        self.refused(tmp_path / "nowhere", tmp_path, "there is no folder")
        self.refused("nobody/nothing", tmp_path, "HF_HUB_OFFLINE='1'")

    def test_decoder_source(self, tmp_path):
        model = make_source("Bert", "Model", is_decoder=True)
        self.refused(save(model, tmp_path / "source"), tmp_path, "source is a decoder")

    def test_wishes(self, source, tmp_path):
        self.refused(source, tmp_path, "needs a decoder", tie_encoder_decoder=True)
        self.refused(source, tmp_path, "must be None or", decoder="bert")
        self.refused(source, tmp_path, "must be", head="lose")


EXPORTED = [name for name in dir(hybrid_longformer) if name.startswith("HybridLongformerFor") and "Cond" not in name]
EXPORTED += ["HybridLongformerModel"]
PLAIN = {"num_random_blocks": 0, "attention_window": [8, 16]}


class TestExport:
    @pytest.mark.parametrize("name", EXPORTED)
    def test_same_outputs_as_longformer(self, name, tmp_path):
        ours = build(getattr(hybrid_longformer, name), **PLAIN)
        source = save(ours, tmp_path / "source")
        report = export_to_longformer(source, tmp_path / "output")
        assert report.verification.largest_difference < 1e-5
        assert_complete(report, source, tmp_path / "output")
        theirs = getattr(transformers, report.target_class).from_pretrained(tmp_path / "output").eval()
        inputs = make_inputs(name.removeprefix("HybridLongformer"), 40, with_globals=True, types=2)
        assert_equal_outputs(outputs_of(ours, inputs), outputs_of(theirs, inputs))
        assert report.target_class in (tmp_path / "output" / "README.md").read_text()

    @pytest.mark.parametrize("family", ["Roberta", "Bert"])
    def test_there_and_back(self, family, tmp_path):
        """BERT counts positions from 0 and shares global projections; Longformer does neither."""
        source = save(make_source(family, "ForMaskedLM", hidden_act="gelu"), tmp_path / "source")
        convert_checkpoint(source, tmp_path / "hybrid", num_random_blocks=0, max_length=100, attention_window=WINDOW)
        report = export_to_longformer(tmp_path / "hybrid", tmp_path / "output")
        assert report.verification.largest_difference < 1e-5

    def test_longformer_comes_back_unchanged(self, tmp_path):
        source = save(make_source("Longformer", "ForMaskedLM"), tmp_path / "source")
        convert_checkpoint(source, tmp_path / "hybrid", max_length=TOKENS)
        export_to_longformer(tmp_path / "hybrid", tmp_path / "output")
        before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "output"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)

    def test_untied_head(self, tmp_path):
        model = build(hybrid_longformer.HybridLongformerForMaskedLM, tie_word_embeddings=False, **PLAIN)
        assert export_to_longformer(model, tmp_path / "output").verification.largest_difference < 1e-5

    @pytest.mark.parametrize(
        "changes",
        [
            {"num_random_blocks": 1},
            PLAIN | {"attention_dilation": [1, 2]},
            PLAIN | {"num_extra_global_tokens": 2},
            PLAIN | {"global_context": "mean"},
            PLAIN | {"causal_attention": True},
            PLAIN | {"lm_head_act": "relu"},
            {"num_random_blocks": 0, "attention_window": [8, 12]},
        ],
        ids=str,
    )
    def test_what_longformer_cannot_do(self, changes, tmp_path):
        model = build(hybrid_longformer.HybridLongformerModel, **changes)
        with pytest.raises(ConversionError, match="Longformer has no equal of " + list(changes)[-1]):
            export_to_longformer(model, tmp_path / "output")

    def test_other_models(self, tmp_path):
        with pytest.raises(ConversionError, match="no Hybrid Longformer"):
            export_to_longformer(make_source("Roberta", "Model"), tmp_path / "output")
        model = build(hybrid_longformer.HybridLongformerForConditionalGeneration, **PLAIN)
        with pytest.raises(ConversionError, match="no counterpart"):
            export_to_longformer(model, tmp_path / "output")


def test_model_files_know_nothing_of_conversion():
    folder = Path(hybrid_longformer.__file__).parent
    for path in folder.glob("*.py"):
        if not path.stem.startswith(("conversion", "cli", "__init__")):
            assert "from .conversion" not in path.read_text(), path.name
