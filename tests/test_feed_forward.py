"""Feed-forward for some tokens at a time: exact, light, and never past a layer that is more than its weight."""

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from hybrid_longformer import feed_forward as module
from hybrid_longformer.feed_forward import can_divide, feed_forward
from hybrid_longformer.layers import Intermediate, ResidualOutput, feed_forward_block
from tests.models import HybridLongformerModel as Model
from tests.models import build, encoder_of, make_inputs, tiny_config

AT_A_TIME, HIDDEN, WIDE = 4, 6, 10
activations = pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu"])


@pytest.fixture(autouse=True)
def _few_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKENS_AT_A_TIME", AT_A_TIME)


def make_layers() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(HIDDEN, WIDE).double(), nn.Linear(WIDE, HIDDEN).double()


def gradients(output: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad((output**2).sum(), wanted)


# Fewer tokens than are taken at a time, as many, one more, and several rows that don't add up to a multiple.
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (1, 5), (3, 7)])
@activations
def test_outputs_and_gradients_are_those_of_the_layers(shape: tuple[int, int], activation: str) -> None:
    up, down = make_layers()
    x = torch.randn(*shape, HIDDEN, dtype=torch.float64, requires_grad=True)
    wanted = [x, *up.parameters(), *down.parameters()]
    ours, plain = feed_forward(x, up, ACT2FN[activation], down), down(ACT2FN[activation](up(x)))
    assert torch.allclose(ours, plain, atol=1e-12)
    for one, other in zip(gradients(ours, wanted), gradients(plain, wanted), strict=True):
        assert torch.allclose(one, other, atol=1e-12)
    with torch.no_grad():
        assert torch.allclose(feed_forward(x, up, ACT2FN[activation], down), plain, atol=1e-12)


@pytest.mark.parametrize("frozen", range(5))
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    up, down = make_layers()
    x = torch.randn(1, 9, HIDDEN, dtype=torch.float64, requires_grad=True)
    everything = [x, *up.parameters(), *down.parameters()]
    everything[frozen].requires_grad_(False)
    wanted = [tensor for tensor in everything if tensor.requires_grad]
    results = [gradients(output, wanted) for output in (feed_forward(x, up, nn.GELU(), down), down(nn.GELU()(up(x))))]
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-12)
    feed_forward(x, up, nn.GELU(), down).sum().backward()
    assert everything[frozen].grad is None


def test_one_wide_tensor_is_kept_for_gradients_and_none_without() -> None:
    up, down = make_layers()
    x = torch.randn(1, 50, HIDDEN, dtype=torch.float64, requires_grad=True)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        feed_forward(x, up, nn.GELU(), down)
    assert kept.count((50, WIDE)) == 1 and max(torch.Size(shape).numel() for shape in kept) == 50 * WIDE
    seen: list[int] = []

    class Watched(nn.GELU):
        def forward(self, wide: Tensor) -> Tensor:
            seen.append(len(wide))
            return super().forward(wide)

    with torch.no_grad():
        feed_forward(x, up, Watched(), down)
    assert max(seen) == AT_A_TIME and sum(seen) == 50


def test_second_derivatives_are_refused() -> None:
    up, down = make_layers()
    x = torch.randn(1, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(feed_forward(x, up, nn.GELU(), down).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_only_plain_layers_in_full_precision_are_divided() -> None:
    up, down = (layer.float() for layer in make_layers())
    x = torch.randn(1, 5, HIDDEN)
    assert can_divide(x, up, nn.GELU(), down)
    assert not can_divide(x.bfloat16(), up, nn.GELU(), down)
    assert not can_divide(x, up, nn.PReLU(), down)
    assert not can_divide(x, nn.Linear(HIDDEN, WIDE, bias=False), nn.GELU(), down)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not can_divide(x, up, nn.GELU(), down)
    down.register_forward_hook(lambda *arguments: None)
    assert not can_divide(x, up, nn.GELU(), down)


@pytest.mark.parametrize("watched", ["intermediate", "intermediate.dense", "intermediate.activation", "output"])
def test_modules_with_hooks_are_called(watched: str) -> None:
    config = tiny_config()
    layer = nn.Module()
    layer.intermediate = Intermediate(config.intermediate_size, config)
    layer.output = ResidualOutput(config.intermediate_size, config)
    layer.eval()
    x, calls = torch.randn(1, 9, config.hidden_size), []
    expected = feed_forward_block(layer.intermediate, layer.output, x)
    layer.get_submodule(watched).register_forward_hook(lambda *arguments: calls.append(1))
    assert torch.allclose(feed_forward_block(layer.intermediate, layer.output, x), expected, atol=1e-6)
    assert calls


def test_a_model_takes_some_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(Model).eval(), make_inputs(Model)
    sizes: list[int] = []
    activation = encoder_of(model).encoder.layer[0].intermediate.activation
    forward = activation.forward
    monkeypatch.setattr(activation, "forward", lambda wide: sizes.append(len(wide)) or forward(wide))
    with torch.no_grad():
        model(**inputs)
    assert sizes and max(sizes) <= AT_A_TIME
