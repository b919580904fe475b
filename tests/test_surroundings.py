"""What users do around a model: autocast, DDP, hooks, layers of their own. No fast path may overlook it."""

import copy

import pytest
import torch
from torch import Tensor, nn

from hybrid_longformer import HybridLongformerForSequenceClassification, HybridLongformerModel, HybridSparseAttention
from tests.models import build, largest

IDS = torch.arange(300)[None] % 90 + 3
GLOBAL = (torch.arange(300)[None] < 2).long()


def make_model(**changes) -> HybridLongformerModel:
    return build(HybridLongformerModel, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **changes)


def states(model: nn.Module) -> Tensor:
    return model(IDS, global_attention_mask=GLOBAL).last_hidden_state


def modes():
    return pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad], ids=["inference", "training"])


# --- autocast ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_maps_under_autocast(implementation: str, dtype: torch.dtype) -> None:
    model = make_model(attn_implementation=implementation)
    with torch.autocast("cpu", dtype=dtype):
        outputs = model(IDS, global_attention_mask=GLOBAL, output_attentions=True)
    assert all(torch.allclose(maps.float().sum(-1), torch.ones(()), atol=0.02) for maps in outputs.attentions)
    assert largest(outputs.last_hidden_state.float() - states(model)) <= 0.1


def test_backward_may_be_called_under_autocast() -> None:
    model = make_model()
    loss = states(model).square().mean()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    pairs = [(ours, exact) for ours, exact in zip(found, expected, strict=True) if exact is not None]
    # The backward pass of other layers is in half precision then, which is torch's own doing.
    assert pairs and all(largest(ours - exact) <= 0.03 * largest(exact) + 1e-6 for ours, exact in pairs)


def test_a_double_model_ignores_autocast() -> None:
    model = make_model().double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = states(model)
        found.sum().backward()
    assert found.dtype == torch.float64 and largest(found - states(model)) <= 1e-9


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("num_tokens", [20, 300])
def test_every_parameter_has_a_gradient(num_tokens: int, autocast: bool) -> None:
    """DDP waits for all of them."""
    model = build(HybridLongformerForSequenceClassification).train()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(IDS[:, :num_tokens], labels=torch.tensor([1])).loss
    loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_ddp_takes_several_steps_under_autocast(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(build(HybridLongformerForSequenceClassification).train())
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(IDS[:, :20], labels=torch.tensor([1])).loss
            loss.backward()
    finally:
        torch.distributed.destroy_process_group()


# --- layers that are not what they were ---


class Column(nn.Module):
    """A projection whose output stands column by column in memory."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).transpose(1, 2).contiguous().transpose(1, 2)


@modes()
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("num_tokens", [40, 300])
def test_outputs_of_projections_may_stand_in_any_order(name: str, num_tokens: int, mode) -> None:
    torch.manual_seed(0)
    options = {"attention_window": 16, "num_random_blocks": 2, "block_size": 8}
    attention = HybridSparseAttention(hidden_size=32, num_heads=2, **options)
    changed = copy.deepcopy(attention)
    setattr(changed.attention, name, Column(getattr(changed.attention, name)))
    x = torch.randn(1, num_tokens, 32)
    with mode():
        assert largest(changed(x) - attention(x)) <= 1e-5


@modes()
@pytest.mark.parametrize("path", ["attention.self.query", "attention.self.key_global", "intermediate.dense"])
def test_a_forward_of_ones_own_is_called(path: str, mode) -> None:
    model = make_model()
    layer = model.encoder.layer[0].get_submodule(path)
    with mode():
        before = states(model)
        layer.forward = lambda x: torch.zeros(*x.shape[:-1], layer.out_features)
        with torch.no_grad():
            after = states(model)
            layer.weight.zero_()
            layer.bias.zero_()
        del layer.forward
        expected = states(model)
    assert largest(after - expected) <= 1e-5 < largest(before - expected)


@modes()
def test_hooks_of_all_modules_see_every_projection(mode) -> None:
    model, seen = make_model(), set()
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.add(module))
    try:
        with mode():
            states(model)
    finally:
        handle.remove()
    layer = model.encoder.layer[0]
    for name in ("attention.self.query", "attention.self.key", "intermediate.dense", "output.dense"):
        assert layer.get_submodule(name) in seen, name


class OnlyLinear(Tensor):
    """A weight as quantisation has it: it can be multiplied by, and nothing else."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            plain = [x.as_subclass(Tensor) if isinstance(x, OnlyLinear) else x for x in args]
            return function(*plain, **(kwargs or {}))
        if getattr(function, "__name__", "") in ("addmm", "mm", "matmul", "permute", "numpy_T", "T"):
            raise NotImplementedError(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_weights_of_another_kind_are_left_to_their_layer() -> None:
    model = make_model()
    expected = states(model)
    for name in ("attention.self.query", "attention.self.value", "intermediate.dense", "output.dense"):
        linear = model.encoder.layer[0].get_submodule(name)
        weight = linear.weight.detach().as_subclass(OnlyLinear)
        del linear.weight
        linear.weight = weight
    with torch.no_grad():
        assert largest(states(model) - expected) <= 1e-5


@modes()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_one_layer_may_make_queries_and_keys(implementation: str, mode) -> None:
    """The bias of a key changes nothing, that of a query does."""
    model = make_model(attn_implementation=implementation)
    attention = model.encoder.layer[0].attention.self
    nn.init.normal_(attention.query.bias)
    attention.key = copy.deepcopy(attention.query)
    with mode():
        expected = states(model)
        attention.key = attention.query
        assert largest(states(model) - expected) <= 1e-5


class Kept(nn.Module):
    """An activation whose result depends on what it was asked before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize(
    "activation", [nn.Sequential(nn.GELU(), nn.Dropout(0.5)), nn.ReLU(inplace=True), nn.Softmax(dim=1), Kept()], ids=str
)
def test_activations_of_ones_own_are_called_once_for_all_tokens(activation: nn.Module) -> None:
    model = make_model(num_hidden_layers=1, attention_window=16).train()
    layer = model.encoder.layer[0]
    layer.intermediate.activation = activation
    expected_activation = copy.deepcopy(activation)
    torch.manual_seed(1)
    states(model).square().sum().backward()
    found = layer.output.dense.weight.grad.clone()
    model.zero_grad()
    seen: dict[str, Tensor] = {}
    layer.intermediate.activation = expected_activation
    layer.output.dense.register_forward_hook(lambda _, inputs, output: seen.update(x=inputs[0], out=output))
    torch.manual_seed(1)
    loss = states(model).square().sum()
    seen["out"].retain_grad()
    loss.backward()
    by_hand = seen["out"].grad.flatten(0, 1).T @ seen["x"].flatten(0, 1)
    assert largest(found - by_hand) <= 1e-4


# --- packed documents of any ids ---


@pytest.mark.parametrize("ids", [[0, 1, 2], [7, 3, 9], [0, 1, 0], [5000, 5001, 5002], [0, 1, -1], [2, 1, 0]], ids=str)
def test_document_ids_may_be_any_numbers(ids: list[int]) -> None:
    model, lengths = make_model(), [40, 23, 60]
    document_ids = torch.tensor(ids).repeat_interleave(torch.tensor(lengths))[None]
    with torch.no_grad():
        packed = model(IDS[:, : sum(lengths)], document_ids=document_ids).last_hidden_state
        alone = [model(part).last_hidden_state for part in IDS[:, : sum(lengths)].split(lengths, dim=1)]
    assert largest(packed - torch.cat(alone, dim=1)) <= 1e-5
