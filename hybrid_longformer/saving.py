"""Saving: what a checkpoint folder holds beside weights, config and code: a model card and the tokenizer."""

import os
import tempfile
from pathlib import Path
from typing import Any

CARD = """\
---
library_name: transformers
tags:
- hybrid_longformer
- long-document
- sparse-attention
{pipeline_line}---

# {title}

{class_name}: a RoBERTa-style encoder with local + global + random attention, for documents of up to
{max_tokens:,} tokens. The folder carries its own code.

```python
from transformers import {auto_class}

model = {auto_class}.from_pretrained("path/or/hub-id", trust_remote_code=True)
```

A tokenizer that was saved along is loaded with
`AutoTokenizer.from_pretrained("path/or/hub-id", trust_remote_code=True)`: transformers reads the configuration, and
with it the folder's code, before the tokenizer.

| | |
|---|---|
| layers, hidden size, heads | {layers}, {hidden_size}, {heads} |
| window per layer | {window} (a token sees half of it on each side) |
| dilation | {dilation} |
| random blocks per query block | {random_blocks} of {block_size} tokens, seed {seed} |
| separate global projections | {separate} |
| parameters | {parameters:,} |

Mark the tokens that should see everything with `global_attention_mask` (1 = global, 0 = not); without it the model
uses its task's default: the question for question answering, the first token for classification and summarisation,
none for masked-language modelling and token classification.
"""

PIPELINES = {
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForSeq2SeqLM": "summarization",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}


def model_card(model: Any, title: str) -> str:
    """The card of a checkpoint, from its configuration alone."""
    config = model.config
    pipeline = PIPELINES.get(model._auto_class)
    return CARD.format(
        pipeline_line=f"pipeline_tag: {pipeline}\n" if pipeline else "",
        title=title,
        class_name=type(model).__name__,
        max_tokens=config.max_tokens,
        auto_class=model._auto_class,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        window=config.attention_window,
        dilation=config.attention_dilation,
        random_blocks=config.num_random_blocks,
        block_size=config.block_size,
        seed=config.random_seed,
        separate="yes" if config.separate_global_projections else "no",
        parameters=model.num_parameters(),
    )


def save_extras(model: Any, folder: str | os.PathLike, tokenizer: Any = None) -> None:
    """Writes the card, unless the folder has one already, and the tokenizer, if there is one."""
    card = Path(folder) / "README.md"
    if not card.exists():
        card.write_text(model_card(model, Path(folder).resolve().name), encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def push_checkpoint(
    model: Any,
    repo_id: str,
    *,
    tokenizer: Any = None,
    max_shard_size: int | str = "50GB",
    commit_message: str | None = None,
    **upload: Any,
) -> Any:
    """Uploads a self-contained checkpoint; a card that the repository has is kept."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / repo_id.split("/")[-1]
        model.save_pretrained(folder, tokenizer=tokenizer, max_shard_size=max_shard_size)
        message = commit_message or f"Upload {type(model).__name__}"
        return push_folder(folder, repo_id, keep_card=True, commit_message=message, **upload)


def push_folder(
    folder: Path,
    repo_id: str,
    *,
    keep_card: bool,
    private: bool | None = None,
    token: bool | str | None = None,
    **upload: Any,
) -> Any:
    """Uploads a folder; the repository is made if it isn't there, and its own card may be kept if it is."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ImportError("push_to_hub needs huggingface_hub: pip install huggingface_hub") from error
    api = HfApi(token=token)
    # The name with its owner, which the given one may lack.
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    kept = ["README.md"] if keep_card and api.file_exists(repo_id, "README.md") else None
    return api.upload_folder(repo_id=repo_id, folder_path=folder, ignore_patterns=kept, **upload)
