"""The configuration refuses what cannot be, by name, and survives saving and loading."""

import pytest

from hybrid_longformer import HybridLongformerConfig, HybridLongformerModel, HybridSparseAttention

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_window": 511}, "attention_window=511 is odd.*use 510 or 512"),
        ({"attention_window": [512, 17]}, "attention_window=17 is odd"),
        ({"attention_window": 0}, "attention_window=0 must be a whole number of at least 2"),
        ({"attention_window": -2}, "attention_window=-2"),
        ({"attention_window": [512] * 3}, r"attention_window=\[512, 512, 512\].*list of 2.*num_hidden_layers=2"),
        ({"attention_window": "512"}, "attention_window='512'"),
        ({"attention_dilation": 0}, "attention_dilation=0 must be a whole number of at least 1"),
        ({"attention_dilation": [1, 2, 3]}, r"attention_dilation=\[1, 2, 3\].*num_hidden_layers=2"),
        ({"attention_dilation": [[1, 2], [1, 2]]}, r"attention_dilation=\[1, 2\].*num_attention_heads=4"),
        ({"attention_dilation": [[1, 2, 3, 4], [1, 2, 3, -4]]}, "attention_dilation=-4"),
        ({"num_random_blocks": -1}, "num_random_blocks=-1 must be a whole number of at least 0"),
        ({"num_extra_global_tokens": -3}, "num_extra_global_tokens=-3"),
        ({"max_global_tokens": 0}, "max_global_tokens=0 must be a whole number of at least 1"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": 4096}, "block_size=4096 does not fit.*max_position_embeddings=4098.*num_random_blocks=0"),
        ({"hidden_size": 30}, "hidden_size=30 must be a multiple of num_attention_heads=4"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"attention_probs_dropout_prob": 1.0}, "attention_probs_dropout_prob=1.0 must be a probability"),
        ({"hidden_dropout_prob": -0.1}, "hidden_dropout_prob=-0.1"),
        ({"global_context": "max"}, "global_context='max' must be None or 'mean'"),
        ({"causal_attention": "yes"}, "causal_attention='yes' must be True or False"),
        ({"hidden_act": "geluu"}, "hidden_act='geluu' is no activation of transformers: did you mean 'gelu'"),
        ({"layer_norm_eps": -1.0}, "layer_norm_eps=-1.0 must be a number above 0"),
        ({"vocab_size": 100, "pad_token_id": 500}, "pad_token_id=500 is no token: vocab_size=100 allows 0 to 99"),
        ({"sep_token_id": -1}, "sep_token_id=-1 is no token"),
    ],
)
@pytest.mark.parametrize("door", ["built", "loaded", "changed"])
def test_impossible_configs_are_refused(changes: dict, message: str, door: str, tmp_path) -> None:
    config = HybridLongformerConfig(**SMALL)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        if door == "built":
            HybridLongformerConfig(**(SMALL | changes))
        elif door == "loaded":
            config.save_pretrained(tmp_path)
            HybridLongformerConfig.from_pretrained(tmp_path, **changes)
        else:
            for name, value in changes.items():
                setattr(config, name, value)
            HybridLongformerModel(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_windw": 512}, "attention_windw=512 is not a field.*did you mean 'attention_window'"),
        ({"num_random_block": 3}, "did you mean 'num_random_blocks'"),
        ({"flavour": "mint"}, "flavour='mint' is not a field of this configuration"),
    ],
)
def test_unknown_keys_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HybridLongformerConfig(**changes)


@pytest.mark.parametrize(
    ("attention_dilation", "expected"),
    [
        (2, [(2, 2, 2, 2), (2, 2, 2, 2)]),
        ([1, 3], [(1, 1, 1, 1), (3, 3, 3, 3)]),
        ([1, [1, 1, 2, 4]], [(1, 1, 1, 1), (1, 1, 2, 4)]),
    ],
)
def test_dilation_per_layer_and_head(attention_dilation, expected) -> None:
    config = HybridLongformerConfig(**SMALL, attention_dilation=attention_dilation)
    assert [pattern.dilation_per_head for pattern in config.attention_patterns()] == expected


def test_config_survives_a_round_trip(tmp_path) -> None:
    config = HybridLongformerConfig(
        **SMALL, attention_window=[32, 64], random_seed=5, num_labels=3, attention_dilation=2
    )
    config.save_pretrained(tmp_path)
    loaded = HybridLongformerConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert loaded.attention_patterns() == config.attention_patterns()


def test_default_config_is_valid_and_layers_have_their_own_seed() -> None:
    seeds = [pattern.seed for pattern in HybridLongformerConfig().attention_patterns()]
    assert len(set(seeds)) == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_window": 511}, "attention_window=511 is odd"),
        ({"attention_dilation": [1, 2, 3]}, "attention_dilation"),
        ({"num_heads": 5}, "hidden_size=32 must be a multiple of num_heads=5"),
        ({"separate_global_projections": "yes"}, "separate_global_projections='yes' must be True or False"),
    ],
)
def test_attention_module_refuses_in_the_same_words(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HybridSparseAttention(**({"hidden_size": 32, "num_heads": 2} | changes))
