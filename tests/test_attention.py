"""Every fast path against the dense oracle: outputs, gradients, dtypes, invariance, memory."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_longformer import HybridSparseAttention, kernels
from hybrid_longformer.attend import attend
from hybrid_longformer.backend import plan_edges
from hybrid_longformer.batch import describe_batch
from hybrid_longformer.pieces import pack_pieces
from hybrid_longformer.plan import build_plans, gathered_window, window_pieces
from tests.cases import CPU, Case, cases


def run(module: HybridSparseAttention, case: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output, and the gradients of a fixed random projection of it by input and parameters."""
    x = case.inputs().requires_grad_()
    output = module(x, **case.masks())
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    gradients = torch.autograd.grad((output * direction).sum(), [x, *module.parameters()], allow_unused=True)
    return output, [torch.zeros(()) if gradient is None else gradient for gradient in gradients]


def largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item() if difference.numel() else 0.0


def assert_equal_to_oracle(case: Case, **changes) -> None:
    fast, fast_gradients = run(case.module(attn_implementation="sdpa", **changes), case)
    oracle, oracle_gradients = run(case.module(attn_implementation="eager", **changes), case)
    assert largest(fast - oracle) <= 1e-5
    scale = max(1.0, max(largest(gradient) for gradient in oracle_gradients))
    for ours, exact in zip(fast_gradients, oracle_gradients, strict=True):
        assert largest(ours - exact) <= 1e-4 * scale


@settings(max_examples=150)
@given(cases())
def test_fused_kernels_equal_the_oracle(case: Case) -> None:
    assert_equal_to_oracle(case)


@pytest.mark.as_shipped
@settings(max_examples=60)
@given(cases())
def test_rows_read_whole_equal_the_oracle(case: Case) -> None:
    """Most of these lengths are read whole unless tests ask for tiles."""
    assert_equal_to_oracle(case)


@settings(max_examples=60)
@given(cases())
def test_explicit_kernels_equal_the_oracle(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_HAS_FUSED_CPU_KERNEL", False)
        assert_equal_to_oracle(case)


@pytest.mark.parametrize("length", [1, 97, 640, 1025, 2049])
def test_base_window_equals_the_oracle(length: int) -> None:
    """The sizes people use: window 512, blocks of 64, several chunks of tiles."""
    module = HybridSparseAttention(hidden_size=64, num_heads=1)
    oracle = HybridSparseAttention(hidden_size=64, num_heads=1, attn_implementation="eager")
    oracle.load_state_dict(module.state_dict())
    x = torch.randn(2, length, 64)
    padding_mask = torch.ones(2, length, dtype=torch.long)
    padding_mask[1, length // 2 + 1 :] = 0
    global_mask = torch.zeros_like(padding_mask)
    global_mask[0, : min(length, 5)] = 1
    arguments = {"global_mask": global_mask, "padding_mask": padding_mask}
    assert largest(module(x, **arguments) - oracle(x, **arguments)) <= 1e-5


@pytest.mark.parametrize("length", [100, 256, 1024, 2048, 2049])
def test_unpadded_documents_equal_the_oracle(length: int) -> None:
    """Short rows are read whole, whole blocks without padding as they stand, others are gathered."""
    module = HybridSparseAttention(hidden_size=32, num_heads=1, attention_window=64)
    oracle = HybridSparseAttention(hidden_size=32, num_heads=1, attention_window=64, attn_implementation="eager")
    oracle.load_state_dict(module.state_dict())
    x, global_mask = torch.randn(2, length, 32), torch.zeros(2, length, dtype=torch.long)
    global_mask[1, [0, min(700, length - 1)]] = 1
    gradients = []
    for attention in (module, oracle):
        inputs = x.clone().requires_grad_()
        output = attention(inputs, global_mask)
        gradients.append((output, *torch.autograd.grad(output.square().sum(), inputs)))
    assert all(largest(ours - exact) <= 1e-5 for ours, exact in zip(*gradients, strict=True))


@settings(max_examples=60)
@given(cases())
def test_windows_read_by_index_equal_windows_read_as_views(case: Case) -> None:
    """Exported graphs read every key by index. (Without global tokens every token has an edge: to itself.)"""
    case.global_share = 0.0
    pattern, batch = case.module().pattern, case.batch()
    views = window_pieces(pattern, batch, torch.float32)
    gathered = [gathered_window(piece, torch.float32) for piece in views]
    q, k, v = torch.randn(3, *batch.shape, case.num_heads, case.head_size).requires_grad_()
    results = []
    for pieces in (views, gathered):
        output = attend(q, k, v, pieces, real=batch.real)
        results.append((output, *torch.autograd.grad(output.square().sum(), (q, k, v))))
    assert all(largest(one - other) <= 1e-4 for one, other in zip(*results, strict=True))


def plain_attention(module: HybridSparseAttention, case: Case, dtype: torch.dtype) -> torch.Tensor:
    """What a user would write with dense PyTorch attention in that dtype."""
    core = module.attention
    x = case.inputs().to(dtype)
    edges = plan_edges(build_plans([module.pattern], case.batch(), dtype=dtype, with_pieces=False)[0])
    heads = (core.num_heads, core.head_size)

    def attend(*layers) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, heads).transpose(1, 2) for layer in layers)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=edges).nan_to_num(0.0).transpose(1, 2).flatten(2)

    context = attend(core.query, core.key, core.value)
    is_global = case.batch().is_global
    if is_global is not None and core.separate_global_projections:
        rows = attend(core.query_global, core.key_global, core.value_global)
        context = torch.where(is_global[..., None], rows, context)
    return module.output(context)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@settings(max_examples=40)
@given(case=cases())
def test_half_precision_is_as_good_as_plain_attention(dtype: torch.dtype, case: Case) -> None:
    case.global_context = None
    module = case.module().to(dtype)
    exact = case.module(attn_implementation="eager").to(dtype).double()
    with torch.no_grad():
        ours = module(case.inputs().to(dtype), **case.masks())
        plain = plain_attention(module, case, dtype)
        truth = exact(case.inputs().to(dtype).double(), **case.masks())
    assert ours.dtype == dtype and ours.isfinite().all()
    assert largest(ours - truth) <= 2 * largest(plain - truth)


@settings(max_examples=25)
@given(cases(max_length=150))
def test_double_precision_is_exact(case: Case) -> None:
    fast, oracle = (case.module(attn_implementation=name).double() for name in ("sdpa", "eager"))
    x = case.inputs().double()
    assert largest(fast(x, **case.masks()) - oracle(x, **case.masks())) <= 1e-12


@settings(max_examples=40)
@given(cases())
def test_map_rows_sum_to_one_and_reading_it_changes_nothing(case: Case) -> None:
    case.global_context = None
    module = case.module(dropout=0.3)
    for mode in (module.eval(), module.train()):
        torch.manual_seed(0)
        output, attention_map = mode(case.inputs(), **case.masks(), return_attention_map=True)
        torch.manual_seed(0)
        assert torch.equal(output, mode(case.inputs(), **case.masks()))
        real = torch.ones(case.batch_size, case.length) if case.batch().real is None else case.batch().real.float()
        assert attention_map.shape == (case.batch_size, case.num_heads, case.length, case.length)
        assert largest(attention_map.sum(-1) - real[:, None]) <= 1e-5


@settings(max_examples=40)
@given(cases())
def test_padding_and_company_change_nothing(case: Case) -> None:
    """A document alone, padded on either side, beside others, and packed with others gives the same output."""
    case.padding_side, case.is_packed, case.global_context = "none", False, "mean"
    module = case.module()
    x, masks = case.inputs()[-1:], case.masks()
    chosen = (
        torch.zeros(1, case.length, dtype=torch.long) if masks["global_mask"] is None else masks["global_mask"][-1:]
    )
    alone = module(x, chosen)
    generator = torch.Generator().manual_seed(case.seed)
    left, right = torch.randint(0, 90, (2,), generator=generator).tolist()
    filler = torch.randn(2, left + case.length + right, case.hidden_size, generator=generator)
    document = slice(left, left + case.length)
    filler[1, document] = x[0]
    global_mask = (torch.rand(filler.shape[:2], generator=generator) < 0.05).long()
    global_mask[1, document] = chosen[0]
    padding_mask = torch.ones(filler.shape[:2], dtype=torch.long)
    padding_mask[1, :left] = padding_mask[1, left + case.length :] = 0
    padded = module(filler, global_mask, padding_mask)[1:, document]
    assert largest(padded - alone) <= 1e-5
    ids = torch.zeros(filler.shape[:2], dtype=torch.long)
    ids[1, left:] += 1
    ids[1, left + case.length :] += 1
    packed = module(filler, global_mask, document_ids=ids)[1:, document]
    assert largest(packed - alone) <= 1e-5


def test_no_call_changes_the_next() -> None:
    module = HybridSparseAttention(hidden_size=32, num_heads=2, attention_window=8, num_random_blocks=2, block_size=4)
    long, short = torch.randn(1, 300, 32), torch.randn(1, 3, 32)
    before = module(long)
    module(short)
    module.train()(short)
    assert torch.equal(module.eval()(long), before)


def test_training_and_evaluation_see_the_same_graph() -> None:
    module = HybridSparseAttention(hidden_size=32, num_heads=2, attention_window=8, num_random_blocks=2, block_size=4)
    x = torch.randn(1, 300, 32)
    assert torch.equal(module.train()(x), module.eval()(x))


def test_padding_rows_and_all_padding_give_finite_results() -> None:
    module = HybridSparseAttention(hidden_size=32, num_heads=2, attention_window=8)
    x = torch.randn(2, 200, 32, requires_grad=True)
    padding_mask = torch.zeros(2, 200, dtype=torch.long)
    padding_mask[0, :50] = 1
    context, _ = module.attention(x, plan_of(module, x, padding_mask=padding_mask))
    assert largest(context[0, 50:]) == largest(context[1]) == 0.0
    context.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def plan_of(module: HybridSparseAttention, x: torch.Tensor, **masks):
    batch = describe_batch(batch_size=x.shape[0], length=x.shape[1], device=CPU, **masks)
    return build_plans([module.pattern], batch, dtype=x.dtype)[0]


class Watch(TorchDispatchMode):
    """Records the largest result of any operation and the names of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(func.name())
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def watch_training_step(implementation: str, *, dropout: float, is_packed: bool, length: int = 4096) -> int:
    module = HybridSparseAttention(
        hidden_size=32,
        num_heads=2,
        attention_window=32,
        attention_dilation=[1, 2],
        num_random_blocks=2,
        block_size=16,
        dropout=dropout,
        global_context="mean",
        attn_implementation=implementation,
    )
    x = torch.randn(1, length, 32, requires_grad=True)
    global_mask = torch.zeros(1, length, dtype=torch.long)
    global_mask[0, [0, 7, -1]] = 1
    padding_mask = torch.ones_like(global_mask)
    padding_mask[0, -9:] = 0
    ids = torch.arange(length)[None] // 1500 if is_packed else None
    with Watch() as watch:
        module(x, global_mask, padding_mask, document_ids=ids).sum().backward()
    return watch.largest


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_fast_path_never_allocates_n_by_n(dropout: float, is_packed: bool) -> None:
    assert watch_training_step("sdpa", dropout=dropout, is_packed=is_packed) < 4096 * 4096 / 10


def test_the_watch_sees_n_by_n() -> None:
    assert watch_training_step("eager", dropout=0.0, is_packed=False, length=512) >= 512 * 512


def test_plan_is_built_from_tensors_without_reading_them_back() -> None:
    """No `.item()`, no `nonzero`, and not one operation more for a longer batch."""
    names = {}
    for length in (3000, 24000):
        module = HybridSparseAttention(hidden_size=32, num_heads=2, attention_dilation=[1, 2])
        masks = {"padding_mask": torch.ones(2, length, dtype=torch.long), "global_mask": torch.zeros(2, length).long()}
        masks["global_mask"][:, :4] = 1
        masks["document_ids"] = torch.arange(length).expand(2, -1) // 1000
        with Watch() as watch:
            batch = describe_batch(batch_size=2, length=length, device=CPU, max_global_tokens=4, **masks)
            build_plans([module.pattern] * 2, batch, dtype=torch.float32)
        names[length] = watch.names
        assert not {"aten::_local_scalar_dense", "aten::nonzero", "aten::item"} & set(watch.names)
    assert names[3000] == names[24000]


def test_layers_share_what_their_patterns_share() -> None:
    from hybrid_longformer import HybridLongformerConfig

    patterns = HybridLongformerConfig(num_hidden_layers=3, attention_window=[64, 64, 32]).attention_patterns()
    batch = describe_batch(batch_size=1, length=2000, device=CPU)
    first, second, third = build_plans(patterns, batch, dtype=torch.float32)
    assert first.pieces[0] is second.pieces[0]
    assert first.pieces[0] is not third.pieces[0]
    assert not torch.equal(first.pieces[1].key_index, second.pieces[1].key_index)


@settings(max_examples=60)
@given(cases())
def test_layers_planned_together_are_planned_as_alone(case: Case) -> None:
    pattern, batch = case.module().pattern, case.batch()
    patterns = [replace(pattern, seed=seed) for seed in (5, 3, 5)] + [replace(pattern, window=4, seed=3)]
    together = build_plans(patterns, batch, dtype=torch.float32)
    for plan in together:
        (alone,) = build_plans([plan.pattern], batch, dtype=torch.float32)
        (tensors, layout), (own_tensors, own_layout) = pack_pieces(plan.pieces), pack_pieces(alone.pieces)
        assert layout == own_layout
        assert all(torch.equal(*pair) for pair in zip(tensors, own_tensors, strict=True))


@pytest.mark.parametrize(
    ("marks", "used"), [([[1, 0, 1], [0, 1, 1]], None), ([[1, 0, 1], [0, 0, 1]], [[1, 1], [1, 0]])]
)
def test_slots_that_all_hold_global_tokens_need_no_mask(marks: list, used: list | None) -> None:
    batch = describe_batch(batch_size=2, length=3, device=CPU, global_mask=torch.tensor(marks))
    assert batch.num_global_slots == 2
    assert (
        used is None if batch.is_global_slot is None else torch.equal(batch.is_global_slot, torch.tensor(used).bool())
    )
    assert batch.used_global_slots.sum() == torch.tensor(marks).sum()


@settings(max_examples=40)
@given(cases())
def test_absorbed_global_projections_are_exact(case: Case) -> None:
    case.separate_global_projections = True
    case.global_share = case.global_share or 0.01
    absorbed, projected = (run_with_absorbing(case, allowed) for allowed in (True, False))
    assert largest(absorbed[0] - projected[0]) <= 1e-5
    scale = max(1.0, max(largest(gradient) for gradient in projected[1]))
    for ours, exact in zip(absorbed[1], projected[1], strict=True):
        assert largest(ours - exact) <= 1e-4 * scale


def run_with_absorbing(case: Case, allowed: bool):
    module = case.module()
    module.attention._can_absorb = lambda num_slots: allowed
    return run(module, case)


def test_adapters_on_global_projections_are_not_bypassed() -> None:
    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 0.5 * x

    x, global_mask = torch.randn(1, 100, 32), torch.zeros(1, 100, dtype=torch.long)
    global_mask[0, 0] = 1
    modules = []
    for name in ("sdpa", "eager"):
        torch.manual_seed(0)
        module = HybridSparseAttention(hidden_size=32, num_heads=2, attention_window=8, attn_implementation=name)
        module.attention.key_global = Adapted(32, 32)
        modules.append(module)
    assert largest(modules[0](x, global_mask) - modules[1](x, global_mask)) <= 1e-5


def test_autocast_agrees_with_half_precision() -> None:
    module = HybridSparseAttention(hidden_size=32, num_heads=2, attention_window=8, num_random_blocks=2, block_size=4)
    x, global_mask = torch.randn(2, 200, 32), torch.zeros(2, 200, dtype=torch.long)
    global_mask[1, :2] = 1
    exact = module(x, global_mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = module(x, global_mask)
        half.sum().backward()
    assert half.dtype == torch.bfloat16
    assert largest(half - exact) < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_mask": torch.full((1, 5), 2)}, "global_mask contains 2"),
        ({"padding_mask": torch.tensor([[0.0, 0.0, 0.0, 0.0, -1e4]])}, "padding_mask contains -10000"),
        ({"padding_mask": torch.ones(1, 4)}, r"padding_mask has shape \(1, 4\) but the input has \(1, 5\)"),
        ({"global_mask": torch.ones(5)}, r"global_mask has shape \(5,\)"),
        ({"document_ids": torch.zeros(2, 5)}, r"document_ids has shape \(2, 5\)"),
    ],
)
def test_wrong_masks_are_refused(changes: dict, message: str) -> None:
    module = HybridSparseAttention(hidden_size=32, num_heads=2, attention_window=8)
    with pytest.raises(ValueError, match=message):
        module(torch.randn(1, 5, 32), **changes)


@pytest.mark.parametrize("shape", [(5, 32), (1, 5, 31), (1, 0, 32)])
def test_wrong_inputs_are_refused(shape: tuple[int, ...]) -> None:
    module = HybridSparseAttention(hidden_size=32, num_heads=2, attention_window=8)
    with pytest.raises(ValueError, match=r"x has shape|at least one token"):
        module(torch.randn(shape))


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="'flash' is not known: choose one of eager, sdpa, flex_attention"):
        HybridSparseAttention(hidden_size=32, num_heads=2, attn_implementation="flash")


def test_promise_of_few_globals_is_kept_or_refused() -> None:
    module = HybridSparseAttention(hidden_size=32, num_heads=2, attention_window=8, max_global_tokens=3)
    free = HybridSparseAttention(hidden_size=32, num_heads=2, attention_window=8)
    free.load_state_dict(module.state_dict())
    x, global_mask = torch.randn(2, 100, 32), torch.zeros(2, 100, dtype=torch.long)
    global_mask[0, [3, 50, 99]] = 1
    assert largest(module(x, global_mask) - free(x, global_mask)) <= 1e-6
    padding_mask = torch.ones_like(global_mask)
    padding_mask[0, 99] = 0
    global_mask[0, 51] = 1
    assert largest(module(x, global_mask, padding_mask) - free(x, global_mask, padding_mask)) <= 1e-6
    with pytest.raises(RuntimeError, match="more than 3 tokens global; set max_global_tokens"):
        module(x, global_mask)
