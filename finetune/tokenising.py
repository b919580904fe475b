"""Tokenising: data sets turned into tokens once, by several workers, and found again by what they hold."""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset

# The cache's files are of no use to code that lays rows out otherwise: count this up when it does.
LAYOUT_VERSION = 1


def tokenise(
    dataset: Dataset, encode: Callable[..., dict], *, tokenizer: Any, workers: int, desc: str, **settings: Any
) -> Dataset:
    """`encode(rows, tokenizer=..., **settings)` over a data set, in batches.

    The result is cached under a hash of the texts, the tokenizer and the settings. The library's own hash would change
    with every process, since a tokenizer remembers the last truncation it was asked for.
    """
    key = content_hash(dataset, encode, tokenizer, settings)
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "hybrid_longformer"
    cache.mkdir(parents=True, exist_ok=True)
    return dataset.map(
        partial(encode, tokenizer=tokenizer, **settings),
        batched=True,
        batch_size=16,
        num_proc=workers if workers > 1 else None,
        remove_columns=dataset.column_names,
        cache_file_name=str(cache / f"{key}.arrow"),
        new_fingerprint=key,
        desc=f"tokenise {desc}",
    )


def content_hash(dataset: Dataset, encode: Callable, tokenizer: Any, settings: dict[str, Any]) -> str:
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    for setting in ("truncation", "padding"):
        described.pop(setting, None)
    facts = [LAYOUT_VERSION, encode.__qualname__, settings, dataset.column_names, described]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for row in dataset:
        digest.update(json.dumps(row, default=str).encode())
    return digest.hexdigest()[:32]
