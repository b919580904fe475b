"""torch.compile without a graph break or a recompile per length; torch.export and ONNX at lengths never exported."""

import pytest
import torch
from torch._dynamo.utils import counters

from hybrid_longformer import HybridLongformerForQuestionAnswering, HybridSparseAttention
from tests.models import tiny_config

pytestmark = pytest.mark.slow


def tiny_model(**changes) -> HybridLongformerForQuestionAnswering:
    torch.manual_seed(0)
    options = {"max_position_embeddings": 1202, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return HybridLongformerForQuestionAnswering(tiny_config(**(options | changes)))


def inputs(batch_size: int, length: int, num_global: int = 7) -> dict[str, torch.Tensor]:
    """Padding, and a number of global tokens that differs in the batch."""
    ids = torch.randint(3, 60, (batch_size, length))
    mask = torch.ones_like(ids)
    mask[-1, length // 2 :] = 0
    ids[mask == 0] = 1
    is_global = torch.zeros_like(ids)
    is_global[:, :num_global] = 1
    is_global[0, length // 3] = 1
    return {"input_ids": ids, "attention_mask": mask, "global_attention_mask": is_global}


def labels(batch_size: int) -> dict[str, torch.Tensor]:
    return {"start_positions": torch.arange(batch_size) + 3, "end_positions": torch.arange(batch_size) + 5}


def gradients(loss: torch.Tensor, sources: list[torch.Tensor]) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, sources, allow_unused=True)
    return [torch.zeros(()) if gradient is None else gradient for gradient in found]


def assert_compiles_whole_and_once(model: torch.nn.Module, loss_of, **options) -> None:
    """The same loss and gradients with and without torch.compile, in one graph for all lengths."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, **options)
    parameters = list(model.parameters())
    for length in (300, 301, 555, 812):
        torch.manual_seed(1)
        loss = loss_of(compiled, length)
        torch.manual_seed(1)
        expected_loss = loss_of(model, length)
        assert (loss - expected_loss).abs() <= 1e-5
        pairs = zip(gradients(loss, parameters), gradients(expected_loss, parameters), strict=True)
        assert max((ours - exact).abs().max().item() for ours, exact in pairs) <= 1e-4
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_training_step_compiles_whole_and_once_for_all_lengths() -> None:
    model = tiny_model(num_hidden_layers=1, attention_window=16).train()
    assert_compiles_whole_and_once(model, lambda model, length: model(**inputs(2, length), **labels(2)).loss)


def test_attention_with_dropout_compiles_whole_and_once_for_all_lengths() -> None:
    """Without global rows the only random numbers are the operator's own: the same seed, the same drops."""
    options = {"attention_window": 16, "num_random_blocks": 2, "block_size": 16}
    attention = HybridSparseAttention(hidden_size=32, num_heads=2, dropout=0.1, **options).train()
    assert_compiles_whole_and_once(
        attention,
        lambda attention, length: attention(torch.randn(2, length, 32)).abs().sum(-1).mean(),
        # The operator stays whole in any compiler; this one is quick.
        backend="aot_eager",
    )


@pytest.mark.parametrize("dilation", [1, [1, 2]])
def test_short_rows_share_a_graph(dilation: int | list[int]) -> None:
    """Rows that are read whole, whose bias is laid out block by block: one graph for few and for more blocks."""
    torch._dynamo.reset()
    counters.clear()
    options = {"attention_window": 32, "attention_dilation": dilation, "num_random_blocks": 2, "block_size": 16}
    attention = HybridSparseAttention(hidden_size=32, num_heads=2, **options).eval()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (83, 100, 130):
        x = torch.randn(1, length, 32)
        global_mask = torch.zeros(1, length, dtype=torch.long)
        global_mask[0, 3] = 1
        with torch.no_grad():
            assert (compiled(x, global_mask) - attention(x, global_mask)).abs().max() <= 1e-5
    assert counters["stats"]["unique_graphs"] == 1


def test_compiled_graph_refuses_more_globals_than_it_has_slots() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        tiny_model(num_hidden_layers=1, attention_window=16).eval(), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    with torch.no_grad(), pytest.raises(RuntimeError, match="more than 64 tokens global; set max_global_tokens"):
        compiled(**inputs(2, 300, num_global=70))


class TwoLogits(torch.nn.Module):
    """The model with a tuple for an output, as exporters like it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, global_attention_mask):
        output = self.model(
            input_ids, attention_mask=attention_mask, global_attention_mask=global_attention_mask, return_dict=True
        )
        return output.start_logits, output.end_logits


def assert_exported_equals_model(model, run) -> None:
    # Shorter and longer than the exported length, odd, and other batch sizes.
    for batch_size, length in ((2, 300), (3, 555), (1, 301), (2, 20), (2, 97), (4, 1000)):
        batch = inputs(batch_size, length)
        with torch.no_grad():
            expected = model(**batch)
        start, end = run(batch)
        real = batch["attention_mask"]
        assert ((start - expected.start_logits) * real).abs().max() <= 1e-5
        assert ((end - expected.end_logits) * real).abs().max() <= 1e-5


def export(model) -> torch.export.ExportedProgram:
    dynamic = {name: dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC) for name in inputs(2, 300)}
    return torch.export.export(TwoLogits(model), (), inputs(2, 300), dynamic_shapes=dynamic, strict=False)


def test_export_with_dynamic_batch_and_length() -> None:
    model = tiny_model(max_global_tokens=16).eval()
    exported = export(model).module()
    assert_exported_equals_model(model, lambda batch: exported(**batch))


def test_onnx_with_dynamic_batch_and_length(tmp_path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    # One layer: what is translated is the same in each, and most of the time goes into rewriting the graph.
    model = tiny_model(max_global_tokens=16, num_hidden_layers=1, attention_window=8).eval()
    torch.onnx.export(export(model), dynamo=True, verbose=False).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")

    def run(batch: dict) -> list[torch.Tensor]:
        return [torch.tensor(x) for x in session.run(None, {name: value.numpy() for name, value in batch.items()})]

    assert_exported_equals_model(model, run)
