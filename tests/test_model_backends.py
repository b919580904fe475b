"""Backends, dtypes and devices of every model class."""

import pytest
import torch
import transformers

from hybrid_longformer import (
    HybridLongformerModel,
)
from tests.models import (
    CLASSES,
    FIRST_WORD,
    both_backends,
    build,
    encoder_of,
    every_class,
    gradients_of,
    largest,
    largest_difference,
    main_output,
    make_inputs,
    name_of,
    results,
    run_model,
)


@every_class
def test_backend_can_be_switched_on_the_fly(model_class: type) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    assert model.config._attn_implementation == "sdpa"
    fast = results(model, inputs)
    outputs = {}
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        for module in model.modules():
            if isinstance(module, transformers.PreTrainedModel):
                assert module.config._attn_implementation == implementation
        outputs[implementation] = results(model, inputs)
    assert 0 < largest_difference(outputs["eager"], fast) <= 1e-5
    assert largest_difference(outputs["sdpa"], fast) == 0


@both_backends
@every_class
def test_backend_can_be_chosen_when_loading(model_class: type, implementation: str, tmp_path) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path, attn_implementation=implementation)
    assert encoder_of(loaded).config._attn_implementation == implementation
    assert largest_difference(results(loaded, inputs), results(model, inputs)) <= 1e-5


def test_unknown_backends_are_refused(tmp_path) -> None:
    model = build(HybridLongformerModel)
    model.save_pretrained(tmp_path)
    for name, message in (("flash_attention_2", "does not support Flash Attention 2"), ("fast", '"fast"')):
        with pytest.raises(ValueError, match=message):
            HybridLongformerModel.from_pretrained(tmp_path, attn_implementation=name)
        with pytest.raises(ValueError, match=message):
            model.set_attn_implementation(name)
    model.config._attn_implementation_internal = "fast"
    with pytest.raises(ValueError, match="'fast' is not known: choose one of eager, sdpa, flex_attention"):
        model(torch.full((1, 5), FIRST_WORD))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@both_backends
@every_class
def test_half_precision(model_class: type, implementation: str, dtype: torch.dtype, tmp_path) -> None:
    exact, inputs = build(model_class), make_inputs(model_class)
    exact.save_pretrained(tmp_path)
    model = model_class.from_pretrained(tmp_path, dtype=dtype, attn_implementation=implementation)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    output, truth = main_output(run_model(model, inputs)), main_output(run_model(exact, inputs))
    assert output.dtype == dtype and output.isfinite().all()
    assert largest(output.float() - truth) <= 30 * torch.finfo(dtype).eps * largest(truth)
    gradients = gradients_of(model.train(), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients.values() if gradient is not None)


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "auto"], ids=str)
@every_class
def test_device_maps(model_class: type, device_map, tmp_path) -> None:
    model, inputs = build(model_class, num_extra_global_tokens=1), make_inputs(model_class)
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path, device_map=device_map)
    assert {parameter.device.type for parameter in loaded.parameters()} == {"cpu"}
    assert torch.equal(main_output(run_model(loaded, inputs)), main_output(run_model(model, inputs)))


@every_class
def test_weights_can_wait_on_disk(model_class: type, tmp_path) -> None:
    """Offloaded weights exist only while their layer's own forward runs."""
    from accelerate import disk_offload

    model, inputs = build(model_class), make_inputs(model_class)
    expected = results(model, inputs)
    disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert any(parameter.is_meta for parameter in model.parameters())
    assert largest_difference(results(model, inputs), expected) <= 1e-5


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@every_class
def test_feed_forward_in_chunks(model_class: type, chunk_size: int) -> None:
    inputs = make_inputs(model_class)
    whole, chunked = (build(model_class, chunk_size_feed_forward=size) for size in (0, chunk_size))
    sizes = []
    encoder_of(chunked).encoder.layer[0].intermediate.register_forward_hook(
        lambda module, args, output: sizes.append(output.shape[1])
    )
    assert largest_difference(results(whole, inputs), results(chunked, inputs)) <= 1e-5
    assert max(sizes) == min(chunk_size, inputs["input_ids"].shape[-1])


@pytest.mark.parametrize("model_class", CLASSES, ids=name_of)
def test_modules_that_stay_whole_are_there(model_class) -> None:
    # FSDP refuses a model that lacks one of them.
    found = {type(module).__name__ for module in build(model_class).modules()}
    assert set(model_class._no_split_modules) <= found
