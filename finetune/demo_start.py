"""Where the demo's model starts from: a tokenizer trained on generated contracts, and weights with two useful habits.

Learning to match a question with far evidence from random weights has a long plateau. It is left much sooner when some
heads begin with equal query and key projections, so that they attend to what is like themselves:
- like words, in the first layer: a word finds its copies, and reads from a copy's position whether that one stands in
  the question;
- like positions, in all layers: a token attends to its neighbours, the nearer the more, and so to its own clause.
"""

from collections.abc import Iterable, Iterator

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hybrid_longformer import HybridLongformerConfig, HybridLongformerForQuestionAnswering
from hybrid_longformer.attention import HybridSelfAttention

from .contracts import generate_contracts

SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
VOCABULARY = 2_000
MAX_TOKENS = 4_096
# Of the hidden size, what positions begin with; words begin with the rest.
_POSITION_SIZE = 28
# And what says that a position is one where questions stand.
_MARK_SIZE, _QUESTION_ROWS = 4, 30
_WORDS = slice(0, -_POSITION_SIZE - _MARK_SIZE)
_POSITIONS = slice(-_POSITION_SIZE - _MARK_SIZE, -_MARK_SIZE)
_MARK = slice(-_MARK_SIZE, None)
# The first layer's first heads find copies, its others neighbours; so do the first heads of the other layers.
_SPECIAL_HEADS = 2


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with RoBERTa's special tokens, learnt from training contracts; every digit is a token."""
    bpe = Tokenizer(models.BPE())
    # Numbers of other splits would otherwise be cut in ways never seen.
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(), trainer)
    bpe.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=MAX_TOKENS,
        model_input_names=["input_ids", "attention_mask"],
    )


def _texts() -> Iterator[str]:
    for contract in generate_contracts(size="medium", split="train", count=400, seed=1):
        yield contract.text
        yield contract.summary
        yield from (question.question for question in contract.questions)


def new_model(vocab_size: int) -> HybridLongformerForQuestionAnswering:
    """The small question-answering model, untrained."""
    config = HybridLongformerConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        attention_window=64,
        num_random_blocks=1,
        block_size=32,
        separate_global_projections=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.06,
        max_position_embeddings=MAX_TOKENS + 2,
    )
    model = HybridLongformerForQuestionAnswering(config)
    _let_heads_find_what_is_alike(model)
    return model


@torch.no_grad()
def _let_heads_find_what_is_alike(model: HybridLongformerForQuestionAnswering) -> None:
    _set_embeddings(model)
    layers = [module for module in model.modules() if isinstance(module, HybridSelfAttention)]
    _find_copies(layers[0], range(_SPECIAL_HEADS))
    _find_neighbours(layers[0], range(_SPECIAL_HEADS, 2 * _SPECIAL_HEADS))
    for attention in layers[1:]:
        _find_neighbours(attention, range(_SPECIAL_HEADS))


def _set_embeddings(model: HybridLongformerForQuestionAnswering) -> None:
    """Words and positions in dimensions of their own."""
    embeddings, scale = model.hybrid_longformer.embeddings, model.config.initializer_range
    words, positions = embeddings.word_embeddings.weight, embeddings.position_embeddings.weight
    words[:, _POSITIONS] = 0
    words[:, _MARK] = 0
    positions.zero_()
    positions[:, _POSITIONS] = scale * sinusoids(len(positions), _POSITION_SIZE)
    positions[:_QUESTION_ROWS, _MARK] = 2 * scale


def _rows(attention: HybridSelfAttention, head: int) -> slice:
    return slice(head * attention.head_size, (head + 1) * attention.head_size)


def _find_copies(attention: HybridSelfAttention, heads: Iterable[int]) -> None:
    """Equal projections of words, and values that tell where a question stands."""
    for rows in (_rows(attention, head) for head in heads):
        for query, key in ((attention.query, attention.key), (attention.query_global, attention.key_global)):
            query.weight[rows] *= 2.2
            query.weight[rows, _POSITIONS] = 0
            query.weight[rows, _MARK] = 0
            key.weight[rows] = query.weight[rows]
        attention.value.weight[rows, _MARK] *= 4.0


def _find_neighbours(attention: HybridSelfAttention, heads: Iterable[int]) -> None:
    """Nearly equal projections of positions: scores of sinusoids depend on the distance alone, and fall with it."""
    for head in heads:
        rows, first = _rows(attention, head), head * attention.head_size
        for projection in (attention.query, attention.key):
            projection.weight[rows, _POSITIONS] *= 0.1
            projection.weight[rows, _WORDS] *= 0.3
            projection.weight[first : first + _POSITION_SIZE, _POSITIONS] += 1.4 * torch.eye(_POSITION_SIZE)


def sinusoids(rows: int, size: int) -> torch.Tensor:
    """(rows, size) sines and cosines of wavelengths from 6 to 600 positions: what tells near from far in a clause."""
    frequencies = 100.0 ** (-torch.arange(0, size, 2) / (size - 2))
    angles = torch.arange(rows)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
