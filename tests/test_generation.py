"""Writing text: generation with cache, beams, padding and global tokens, and the encoder inside EncoderDecoderModel."""

import functools

import pytest
import torch
import transformers
from torch import Tensor

from hybrid_longformer import HybridLongformerForConditionalGeneration, HybridLongformerModel
from tests.models import (
    PAD,
    SEPARATOR,
    TARGET_LENGTH,
    VOCABULARY,
    build,
    collate,
    largest,
    make_documents,
    scramble,
    targets,
    tiny_config,
)

WAYS = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beam sampling": {"do_sample": True, "num_beams": 2},
}
ways = pytest.mark.parametrize("way", WAYS)
deterministic_ways = pytest.mark.parametrize("way", ["greedy", "beam"])


def model(**changes) -> HybridLongformerForConditionalGeneration:
    return build(HybridLongformerForConditionalGeneration, **changes)


def documents_for(side: str = "right", *, with_globals: bool = True, rows: slice = slice(None)) -> dict[str, Tensor]:
    inputs = collate(
        HybridLongformerForConditionalGeneration, make_documents()[rows], side=side, with_globals=with_globals
    )
    del inputs["decoder_input_ids"]
    return inputs


def write(model, inputs: dict, way: str = "greedy", **options) -> Tensor:
    """(B, T) generated tokens; no pair of tokens twice, as a random model would say one word for ever."""
    torch.manual_seed(0)
    defaults = {"max_new_tokens": 10, "no_repeat_ngram_size": 2} | WAYS[way]
    return model.generate(**inputs, **(defaults | options))


def encode(model, inputs: dict, **options) -> Tensor:
    with torch.no_grad():
        return model(**inputs, decoder_input_ids=targets(len(inputs["input_ids"])), **options).encoder_last_hidden_state


@ways
def test_generates(way: str) -> None:
    tokens = write(model(), documents_for(), way)
    assert tokens.shape[0] == 4 and 3 < tokens.shape[1] <= 11
    assert torch.all(tokens[:, 0] == SEPARATOR) and tokens.max() < VOCABULARY
    assert len(tokens.unique(dim=0)) > 1  # what it writes depends on the document
    assert torch.equal(tokens, write(model(), documents_for(), way))


@deterministic_ways
def test_cache_changes_nothing(way: str) -> None:
    model_, inputs = model(), documents_for()
    with_cache = write(model_, inputs, way)
    assert torch.equal(with_cache, write(model_, inputs, way, use_cache=False))
    assert torch.equal(with_cache, write(model_, inputs, way, cache_implementation="static"))


def test_assistant_changes_nothing() -> None:
    """Another model's proposals are taken back from the cache where they are wrong."""
    inputs = documents_for(rows=slice(1))
    assert torch.equal(write(model(), inputs, assistant_model=model(seed=3)), write(model(), inputs))


def test_cache_gives_the_same_logits_step_by_step() -> None:
    model_, inputs = model(), documents_for()
    target = targets(4)
    with torch.no_grad():
        whole = model_(**inputs, decoder_input_ids=target).logits
        cache, steps = None, []
        for step in range(TARGET_LENGTH):
            outputs = model_(
                **inputs, decoder_input_ids=target[:, step : step + 1], past_key_values=cache, use_cache=True
            )
            cache = outputs.past_key_values
            steps.append(outputs.logits)
    assert cache.get_seq_length() == TARGET_LENGTH
    assert largest(torch.cat(steps, dim=1) - whole) <= 1e-5


@deterministic_ways
def test_company_changes_nothing(way: str) -> None:
    model_ = model()
    together = write(model_, documents_for(), way)
    for row in range(4):
        alone = write(model_, documents_for(rows=slice(row, row + 1)), way)[0]
        assert torch.equal(together[row, : len(alone)], alone)
        assert torch.all(together[row, len(alone) :] == PAD)


@pytest.mark.parametrize("with_globals", [True, False])
@deterministic_ways
def test_padding_side_changes_nothing(way: str, with_globals: bool) -> None:
    right, left = (write(model(), documents_for(side, with_globals=with_globals), way) for side in ("right", "left"))
    assert torch.equal(right, left)


def test_embedded_documents_generate_the_same() -> None:
    model_, inputs = model(), documents_for(with_globals=False)
    expected = write(model_, inputs)
    inputs["inputs_embeds"] = model_.get_input_embeddings()(inputs.pop("input_ids"))
    assert torch.equal(write(model_, inputs), expected)


# --- global tokens ---


def recorded_marks(monkeypatch) -> list[Tensor | None]:
    """The global marks that the attention of the encoder really sees, call by call."""
    seen: list[Tensor | None] = []
    describe = HybridLongformerModel._describe

    def watch(self, hidden_states, attention_mask, global_attention_mask, document_ids):
        seen.append(global_attention_mask)
        return describe(self, hidden_states, attention_mask, global_attention_mask, document_ids)

    monkeypatch.setattr(HybridLongformerModel, "_describe", watch)
    return seen


@ways
def test_global_marks_reach_the_encoder_once(way: str, monkeypatch) -> None:
    model_, inputs = model(), documents_for()
    seen = recorded_marks(monkeypatch)
    write(model_, inputs, way)
    (marks,) = seen
    assert torch.equal(marks, inputs["global_attention_mask"])


def test_global_marks_change_what_is_encoded() -> None:
    model_, inputs = model(), documents_for()
    marked = encode(model_, inputs)
    for marks in (torch.zeros_like(inputs["attention_mask"]), inputs["global_attention_mask"].roll(1, dims=1)):
        changed = encode(model_, inputs | {"global_attention_mask": marks})
        assert largest((changed - marked)[0]) > 0.01
    scores = [
        write(model_, each, return_dict_in_generate=True, output_scores=True).scores[0]
        for each in (inputs, inputs | {"global_attention_mask": inputs["attention_mask"]})
    ]
    assert largest(scores[0] - scores[1]) > 0.01


@deterministic_ways
def test_global_marks_are_expanded_for_beams(way: str, monkeypatch) -> None:
    """Several texts per document: every copy of a document has that document's marks and text."""
    model_, inputs = model(), documents_for()
    shapes = []
    forward = HybridLongformerForConditionalGeneration.forward

    @functools.wraps(forward)
    def watch(self, *args, **kwargs):
        shapes.append((kwargs["global_attention_mask"].shape[0], kwargs["attention_mask"].shape[0]))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(HybridLongformerForConditionalGeneration, "forward", watch)
    beams = WAYS[way].get("num_beams", 1)
    tokens = write(model_, inputs, way, num_return_sequences=beams)
    assert tokens.shape[0] == 4 * beams
    assert set(shapes) == {(4 * beams, 4 * beams)}
    best = tokens[::beams]
    assert torch.equal(best, write(model_, inputs, way))


@pytest.mark.parametrize("side", ["left", "right"])
@ways
def test_first_token_is_global_by_default(way: str, side: str, monkeypatch) -> None:
    model_, inputs = model(), documents_for(side, with_globals=False)
    seen = recorded_marks(monkeypatch)
    default = write(model_, inputs, way)
    first = torch.zeros_like(inputs["attention_mask"])
    first[torch.arange(4), inputs["attention_mask"].argmax(1)] = 1
    assert torch.equal(seen[0], first)
    assert torch.equal(default, write(model_, inputs | {"global_attention_mask": first}, way))
    state = encode(model_, inputs)
    assert torch.equal(state, encode(model_, inputs | {"global_attention_mask": first}))
    assert torch.equal(state, model_.get_encoder()(**inputs).last_hidden_state)
    nothing = encode(model_, inputs | {"global_attention_mask": torch.zeros_like(first)})
    assert largest((state - nothing)[0]) > 0.01


# --- outputs, losses, limits ---


def test_encoder_outputs_can_be_given() -> None:
    model_, inputs = model(), documents_for()
    encoded = model_.get_encoder()(**inputs)
    expected = model_(**inputs, decoder_input_ids=targets(4)).logits
    masks = {"attention_mask": inputs["attention_mask"]}
    for outputs in (encoded, encoded.to_tuple()):
        logits = model_(encoder_outputs=outputs, decoder_input_ids=targets(4), **masks).logits
        assert torch.equal(logits, expected)
    assert torch.equal(write(model_, masks, encoder_outputs=encoded), write(model_, inputs))


def test_maps_of_generated_tokens() -> None:
    outputs = write(
        model(), documents_for(), return_dict_in_generate=True, output_attentions=True, output_hidden_states=True
    )
    steps = outputs.sequences.shape[1] - 1
    assert [one.shape for one in outputs.encoder_attentions] == [(4, 2, 37, 37)] * 2
    assert len(outputs.cross_attentions) == len(outputs.decoder_attentions) == steps
    for step, (own, cross) in enumerate(zip(outputs.decoder_attentions, outputs.cross_attentions, strict=True)):
        assert own[0].shape == (4, 2, 1, step + 1) and cross[0].shape == (4, 2, 1, 37)
        assert largest(own[0].sum(-1) - 1) <= 1e-5 and largest(cross[0].sum(-1) - 1) <= 1e-5
    assert torch.equal(outputs.sequences, write(model(), documents_for()))


def test_labels_give_the_loss_of_the_next_token() -> None:
    model_, inputs = model(), documents_for()
    labels = torch.randint(3, VOCABULARY, (4, TARGET_LENGTH))
    labels[2, 3:] = -100
    with torch.no_grad():
        outputs = model_(**inputs, labels=labels)
        # Every label is told from the labels before it alone.
        steps = [
            model_(**inputs, decoder_input_ids=model_.prepare_decoder_input_ids_from_labels(labels)[:, : step + 1])
            for step in range(TARGET_LENGTH)
        ]
    logits = torch.stack([step.logits[:, -1] for step in steps], dim=1)
    assert largest(outputs.logits - logits) <= 1e-5
    own = -logits.log_softmax(-1)[labels != -100].gather(1, labels[labels != -100][:, None])
    assert outputs.loss.item() == pytest.approx(own.mean().item(), abs=1e-5)
    assert outputs.past_key_values is None


def test_decoder_inputs_are_labels_behind_the_start_token() -> None:
    labels = torch.tensor([[5, 6, 7, 2], [8, 2, -100, -100]])
    shifted = model(decoder_start_token_id=9).prepare_decoder_input_ids_from_labels(labels)
    assert shifted.tolist() == [[9, 5, 6, 7], [9, 8, 2, PAD]]
    assert labels.tolist() == [[5, 6, 7, 2], [8, 2, -100, -100]]


def test_labels_need_a_start_token() -> None:
    with pytest.raises(ValueError, match="decoder_start_token_id=None and pad_token_id=1 must both be set"):
        model(decoder_start_token_id=None)(**documents_for(), labels=targets(4))


def test_decoder_needs_exactly_one_input() -> None:
    with pytest.raises(ValueError, match="exactly one of decoder_input_ids and decoder_inputs_embeds"):
        model()(**documents_for())


@pytest.mark.parametrize("name", ["decoder_input_ids", "labels"])
def test_decoder_refuses_tokens_outside_the_vocabulary(name: str) -> None:
    wrong = torch.full((len(documents_for()["input_ids"]), 3), 100)
    with pytest.raises(ValueError, match="decoder_input_ids contains 100, but vocab_size=100 allows 0 to 99"):
        model()(**documents_for(), **{name: wrong})


def test_padding_behind_the_labels_changes_nothing() -> None:
    model_, inputs, target = model(), documents_for(), targets(4)
    plain = model_(**inputs, decoder_input_ids=target).logits
    padded = torch.cat([target, torch.full((4, 3), PAD)], dim=1)
    mask = (padded != PAD).long()
    logits = model_(**inputs, decoder_input_ids=padded, decoder_attention_mask=mask).logits
    assert largest(logits[:, :TARGET_LENGTH] - plain) <= 1e-5


def test_decoder_sees_no_later_token() -> None:
    model_, inputs = model(), documents_for()
    changed = targets(4)
    changed[:, 4] = 50
    first, second = (model_(**inputs, decoder_input_ids=ids).logits for ids in (targets(4), changed))
    assert largest(first[:, :4] - second[:, :4]) <= 1e-6 and largest(first[:, 4:] - second[:, 4:]) > 0.01


@pytest.mark.parametrize("way", ["labels", "greedy"])
def test_too_long_texts_are_refused(way: str) -> None:
    """The position table holds 8 tokens: 8 are written, the ninth is refused."""
    model_, inputs = model(decoder_max_position_embeddings=10), documents_for()
    message = (
        r"the decoder is at token 9, but its position table holds 8 \(decoder_max_position_embeddings=10\): "
        "lower max_new_tokens or truncate the labels"
    )
    options = {"eos_token_id": None, "forced_eos_token_id": None}
    if way == "labels":
        assert model_(**inputs, labels=torch.full((4, 8), 5)).loss.isfinite()
        with pytest.raises(ValueError, match=message):
            model_(**inputs, labels=torch.full((4, 9), 5))
    else:
        assert write(model_, inputs, max_new_tokens=8, **options).shape == (4, 9)
        with pytest.raises(ValueError, match=message):
            write(model_, inputs, max_new_tokens=9, **options)


def test_saved_generation_settings_come_back(tmp_path) -> None:
    model_ = model()
    model_.generation_config.max_new_tokens = 7
    model_.generation_config.no_repeat_ngram_size = 2
    model_.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert loaded.generation_config.max_new_tokens == 7
    assert torch.equal(loaded.generate(**documents_for()), write(model_, documents_for(), max_new_tokens=7))


def test_configuration_gets_a_decoder() -> None:
    config = tiny_config()
    assert not config.is_encoder_decoder
    model_ = HybridLongformerForConditionalGeneration(config)
    assert model_.config.is_encoder_decoder and len(model_.decoder.layer) == config.num_hidden_layers
    smaller = HybridLongformerForConditionalGeneration(tiny_config(decoder_layers=1, decoder_attention_heads=4))
    assert len(smaller.decoder.layer) == 1
    assert smaller.decoder.layer[0].attention.self.head_size == 8


# --- EncoderDecoderModel ---


def encoder_decoder(decoder: str) -> transformers.EncoderDecoderModel:
    """Our encoder and a tiny BERT or RoBERTa that writes."""
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 60,
        "is_decoder": True,
        "add_cross_attention": True,
        "pad_token_id": PAD,
    }
    written = {
        "BERT": lambda: transformers.BertLMHeadModel(transformers.BertConfig(**options)),
        "RoBERTa": lambda: transformers.RobertaForCausalLM(transformers.RobertaConfig(**options)),
    }[decoder]()
    model_ = transformers.EncoderDecoderModel(encoder=build(HybridLongformerModel), decoder=scramble(written))
    model_.config.decoder_start_token_id = model_.generation_config.decoder_start_token_id = SEPARATOR
    model_.config.pad_token_id = model_.generation_config.pad_token_id = PAD
    return model_.eval()


decoders = pytest.mark.parametrize("decoder", ["BERT", "RoBERTa"])


# transformers' own notice about the loss.
quiet = pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")


@quiet
@decoders
def test_encoder_trains_in_encoder_decoder_model(decoder: str) -> None:
    model_, inputs = encoder_decoder(decoder), documents_for()
    outputs = model_(**inputs, labels=targets(4))
    outputs.loss.backward()
    assert largest(outputs.encoder_last_hidden_state - model_.encoder(**inputs).last_hidden_state) <= 1e-6
    # The pooler is not read, and a bias that all keys share is lost in the softmax.
    for name, parameter in model_.encoder.named_parameters():
        if not name.startswith("pooler") and not name.endswith(("key.bias", "key_global.bias")):
            assert parameter.grad is not None and largest(parameter.grad) > 0, name


@decoders
def test_encoder_writes_in_encoder_decoder_model(decoder: str, tmp_path) -> None:
    model_, inputs = encoder_decoder(decoder), documents_for()
    tokens = write(model_, inputs, "beam")
    assert tokens.shape[0] == 4 and len(tokens.unique(dim=0)) > 1
    left = write(model_, documents_for("left"), "beam")
    assert torch.equal(left, tokens)
    model_.save_pretrained(tmp_path)
    loaded = transformers.EncoderDecoderModel.from_pretrained(tmp_path)
    assert type(loaded.encoder) is HybridLongformerModel
    assert torch.equal(write(loaded, inputs, "beam"), tokens)


@quiet
@decoders
def test_global_marks_reach_the_encoder_in_encoder_decoder_model(decoder: str, monkeypatch) -> None:
    model_, inputs = encoder_decoder(decoder), documents_for()
    seen = recorded_marks(monkeypatch)
    write(model_, inputs)
    assert torch.equal(seen[0], inputs["global_attention_mask"])
    states = [
        model_(**inputs | {"global_attention_mask": marks}, labels=targets(4)).encoder_last_hidden_state
        for marks in (inputs["global_attention_mask"], torch.zeros_like(inputs["attention_mask"]))
    ]
    assert largest((states[0] - states[1])[0]) > 0.01
