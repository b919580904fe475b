"""What all classes of the family share: configuration, initialisation, and checkpoints that carry their code."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .attention import HybridSelfAttention
from .configuration_hybrid_longformer import HybridLongformerConfig
from .layers import HybridLongformerLayer
from .saving import push_checkpoint, save_extras


@contextmanager
def _own_class(model: nn.Module) -> Iterator[None]:
    """FSDP gives a model a class whose code is torch's, and a checkpoint has to carry the code of the model's own."""
    given = type(model)
    model.__class__ = next(each for each in given.__mro__ if not each.__module__.startswith("torch."))
    try:
        yield
    finally:
        model.__class__ = given


class HybridLongformerPreTrainedModel(PreTrainedModel):
    """What all classes share: configuration, initialisation, and checkpoints that carry their code."""

    config: HybridLongformerConfig
    config_class = HybridLongformerConfig
    base_model_prefix = "hybrid_longformer"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _no_split_modules = ["HybridLongformerEmbeddings", "HybridLongformerLayer"]
    _can_record_outputs = {"hidden_states": HybridLongformerLayer, "attentions": HybridSelfAttention}

    def __init__(self, config: HybridLongformerConfig, *args: Any, **kwargs: Any):
        # A config may have been changed since it was built.
        config.check()
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # Of the encoder alone: a plain parameter, which no rule for layers reaches.
        extra = getattr(module, "extra_global_tokens", None)
        if extra is not None:
            init.normal_(extra, mean=0.0, std=self.config.initializer_range)

    def save_pretrained(
        self, save_directory: str | os.PathLike, *args: Any, tokenizer: Any = None, **kwargs: Any
    ) -> None:
        """As in transformers, and writes the model card (and the tokenizer, if given) beside weights and code."""
        with _own_class(self):
            super().save_pretrained(save_directory, *args, **kwargs)
            if kwargs.get("is_main_process", True):
                save_extras(self, save_directory, tokenizer)

    def push_to_hub(self, repo_id: str, *, tokenizer: Any = None, **kwargs: Any) -> Any:
        """Uploads the same self-contained folder that `save_pretrained` writes.

        Args:
            tokenizer: saved along, if given.
            kwargs: commit_message, commit_description, private, token, revision, create_pr, max_shard_size.
        """
        return push_checkpoint(self, repo_id, tokenizer=tokenizer, **kwargs)
