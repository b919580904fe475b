"""Random cases of everything the attention core combines, and helpers to run them."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from hybrid_longformer import HybridSparseAttention
from hybrid_longformer.batch import Batch, describe_batch

CPU = torch.device("cpu")


@dataclass
class Case:
    """One combination of pattern and batch."""

    seed: int
    batch_size: int
    length: int
    num_heads: int
    head_size: int
    window: int
    dilation: list[int]
    num_random_blocks: int
    block_size: int
    is_causal: bool
    separate_global_projections: bool
    global_context: str | None
    padding_side: str
    global_share: float
    is_packed: bool

    @property
    def hidden_size(self) -> int:
        return self.num_heads * self.head_size

    def module(self, **changes) -> HybridSparseAttention:
        """The attention of this case, with weights large enough for uneven attention."""
        torch.manual_seed(self.seed)
        options = {
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "attention_window": self.window,
            "attention_dilation": self.dilation,
            "num_random_blocks": self.num_random_blocks,
            "block_size": self.block_size,
            "random_seed": self.seed,
            "causal_attention": self.is_causal,
            "separate_global_projections": self.separate_global_projections,
            "global_context": self.global_context,
        }
        module = HybridSparseAttention(**(options | changes))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(std=1.0 / self.hidden_size**0.5)
        return module

    def masks(self) -> dict[str, Tensor | None]:
        """global_mask, padding_mask and document_ids, differing between the rows; some rows may be all padding."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch_size, self.length)
        padding = None
        if self.padding_side != "none":
            kept = torch.randint(0, self.length + 1, (self.batch_size, 1), generator=generator)
            first = {"left": self.length - kept, "right": 0 * kept, "both": (self.length - kept) // 2}
            start = first[self.padding_side]
            index = torch.arange(self.length)
            padding = ((index >= start) & (index < start + kept)).long()
        chosen = torch.rand(shape, generator=generator) < self.global_share
        # The first row of a larger batch has none: the number of globals differs inside the batch.
        if self.batch_size > 1:
            chosen[0] = False
        documents = (torch.rand(shape, generator=generator) < 4 / self.length).long().cumsum(1)
        return {
            "global_mask": chosen.long() if self.global_share else None,
            "padding_mask": padding,
            "document_ids": documents if self.is_packed else None,
        }

    def batch(self) -> Batch:
        return describe_batch(batch_size=self.batch_size, length=self.length, device=CPU, **self.masks())

    def inputs(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.batch_size, self.length, self.hidden_size, generator=generator)


@st.composite
def cases(draw, *, max_length: int = 400) -> Case:
    num_heads = draw(st.sampled_from([1, 2, 3]))
    dilation = draw(
        st.one_of(
            st.just([1] * num_heads), st.lists(st.sampled_from([1, 2, 3]), min_size=num_heads, max_size=num_heads)
        )
    )
    return Case(
        seed=draw(st.integers(0, 1000)),
        batch_size=draw(st.integers(1, 3)),
        length=draw(st.one_of(st.integers(1, 40), st.integers(41, max_length))),
        num_heads=num_heads,
        head_size=draw(st.sampled_from([16, 24, 32, 64])),
        window=draw(st.sampled_from([2, 6, 16, 32, 64])),
        dilation=dilation,
        num_random_blocks=draw(st.sampled_from([0, 1, 3])),
        block_size=draw(st.sampled_from([4, 7, 16])),
        is_causal=draw(st.booleans()),
        separate_global_projections=draw(st.booleans()),
        global_context=draw(st.sampled_from([None, None, "mean"])),
        padding_side=draw(st.sampled_from(["none", "left", "right", "both"])),
        global_share=draw(st.sampled_from([0.0, 0.01, 0.2, 1.0])),
        is_packed=draw(st.sampled_from([False, False, True])),
    )
