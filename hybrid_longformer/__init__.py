"""hybrid_longformer: local + global + random attention for long documents, in the Hugging Face ecosystem."""

from .attention import HybridSelfAttention, HybridSparseAttention
from .configuration_hybrid_longformer import HybridLongformerConfig
from .pattern import AttentionPattern

__version__ = "0.1.0"

__all__ = ["AttentionPattern", "HybridLongformerConfig", "HybridSelfAttention", "HybridSparseAttention", "__version__"]
