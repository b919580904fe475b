"""hybrid_longformer: local + global + random attention for long documents, in the Hugging Face ecosystem."""

from .attention import HybridSelfAttention, HybridSparseAttention
from .configuration_hybrid_longformer import AUTO_MAP, HybridLongformerConfig
from .conversion import ConversionError, ConversionReport, convert_checkpoint, export_to_longformer, tile_positions
from .modeling_hybrid_longformer import (
    HybridLongformerForConditionalGeneration,
    HybridLongformerForMaskedLM,
    HybridLongformerForMultipleChoice,
    HybridLongformerForQuestionAnswering,
    HybridLongformerForSequenceClassification,
    HybridLongformerForTokenClassification,
    HybridLongformerModel,
    HybridLongformerPreTrainedModel,
)
from .packing import PackingCollator, unpack
from .pattern import AttentionPattern

__version__ = "0.1.0"

__all__ = [
    "AttentionPattern",
    "ConversionError",
    "ConversionReport",
    "HybridLongformerConfig",
    "HybridLongformerForConditionalGeneration",
    "HybridLongformerForMaskedLM",
    "HybridLongformerForMultipleChoice",
    "HybridLongformerForQuestionAnswering",
    "HybridLongformerForSequenceClassification",
    "HybridLongformerForTokenClassification",
    "HybridLongformerModel",
    "HybridLongformerPreTrainedModel",
    "HybridSelfAttention",
    "HybridSparseAttention",
    "PackingCollator",
    "__version__",
    "convert_checkpoint",
    "export_to_longformer",
    "tile_positions",
    "unpack",
]


def _register() -> None:
    """Makes AutoConfig and every AutoModel class know this model without trust_remote_code."""
    import transformers

    transformers.AutoConfig.register(HybridLongformerConfig.model_type, HybridLongformerConfig, exist_ok=True)
    for auto_class, path in AUTO_MAP.items():
        if auto_class != "AutoConfig":
            model_class = globals()[path.rpartition(".")[2]]
            getattr(transformers, auto_class).register(HybridLongformerConfig, model_class, exist_ok=True)


_register()
