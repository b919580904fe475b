"""Tasks: what a kind of fine-tuning has of its own, which is its data, its batches and its evaluation.

The engines (engine.py by Accelerate, trainer.py by Trainer) know tasks only through this class.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from hybrid_longformer import HybridLongformerConfig

from .arguments import RunArguments
from .batches import Drawn, GlobalBatches, StreamedBatches, eval_batches, global_mask, pad_rows
from .documents import Split, source_of, take
from .loading import load_pretrained
from .processes import is_sharded

# A tokenizer that knows no limit says so with a number of about 1e30.
NO_LIMIT = 10**9
HYBRID_OVERRIDES = ("attention_window", "num_random_blocks")


class Task(ABC):
    """One kind of fine-tuning.

    Attributes:
        name: as on the command line.
        auto_class: the transformers class that loads its model.
        arguments_class: what it can be told.
        best_metric: the metric that chooses the best model.
        higher_is_better: of that metric.
        default_global: which tokens are global unless the arguments say otherwise.
        lora_saved: modules that LoRA trains whole: the new head.
    """

    name: ClassVar[str]
    auto_class: ClassVar[str]
    arguments_class: ClassVar[type[RunArguments]]
    best_metric: ClassVar[str]
    higher_is_better: ClassVar[bool] = True
    default_global: ClassVar[str] = "none"
    lora_saved: ClassVar[tuple[str, ...]] = ()

    def __init__(self, args: Any):
        self.args = args
        self.tokenizer = load_tokenizer(args.model)
        self.config = load_config(args)
        self.max_length = self._max_length()
        self._rows: dict[Split, Any] = {}
        self._accepted: set[str] = set()
        # What the checkpoint had no weights for.
        self.new_weights: set[str] = set()

    # What each task says for itself.

    @abstractmethod
    def read(self, split: Split) -> Any:
        """The split's rows: something with `len`, `[row]` and `lengths`, each row a dict of lists and numbers."""

    @abstractmethod
    def stream(self) -> Any:
        """The training rows one by one, anew with every iteration."""

    @abstractmethod
    def count_items(self, batch: dict[str, Tensor]) -> Tensor:
        """How many things the model's loss is a mean over."""

    @abstractmethod
    def evaluate(self, model: nn.Module, accelerator: Accelerator, split: Split, folder: Path | None) -> dict[str, Any]:
        """The split's metrics, the same in every process; what was predicted goes into `folder`, if given."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What whoever uses the finished model has to know beside it."""

    def finish_model(self, model: Any) -> None:  # noqa: B027 - most tasks have nothing to do here
        """Last changes before the finished model is saved."""

    # What they share.

    def load_model(self) -> PreTrainedModel:
        """The model, in float32, with the task's head; new weights depend on the seed."""
        transformers.set_seed(self.args.seed)
        auto_class = getattr(transformers, self.auto_class)
        model, loaded = auto_class.from_pretrained(
            self.args.model, config=self.config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
        self.new_weights = set(loaded["missing_keys"])
        self._accepted = set(inspect.signature(model.forward).parameters)
        return model

    def rows(self, split: Split) -> Any:
        """The split's rows, read once; the test set is the validation set where there is no other."""
        split = "validation" if split == "test" and source_of(self.args, "test") is None else split
        if split not in self._rows:
            self._rows[split] = self.read(split)
        return self._rows[split]

    def prepare(self) -> None:
        """Reads and tokenises everything there is to read before training."""
        for split in ("train", "validation", "test"):
            if self.has(split) and not (split == "train" and self.args.streaming):
                self.rows(split)

    def limited(self, rows: Any, split: Split) -> Any:
        """At most as many rows as the arguments allow: the first ones to train on, some from all over to evaluate."""
        is_train = split == "train"
        limit = self.args.max_train_samples if is_train else self.args.max_eval_samples
        return take(rows, limit, spread=not is_train)

    def first_rows(self, stream: Iterable[Any]) -> Iterable[Any]:
        """As many of a training stream's rows as the arguments allow."""
        return islice(stream, self.args.max_train_samples)

    def has(self, split: Split) -> bool:
        return source_of(self.args, split) is not None

    def train_loader(self, *, rank: int, world_size: int, first: int = 0) -> DataLoader:
        """Endless training batches from batch number `first` on; `row_ids` are no input and have to be taken out."""
        share = {"batch_size": self.args.batch_size, "rank": rank, "world_size": world_size, "first": first}
        # A generator of its own: a loader draws a number when it starts, and a resumed run starts one more loader.
        settings: dict[str, Any] = {"collate_fn": self.collate_known, "generator": torch.Generator()}
        workers = self.args.loader_workers
        if self.args.streaming:
            rows = StreamedBatches(self.stream(), **share)
            return DataLoader(rows, batch_size=None, num_workers=min(workers, 1), **settings)
        rows = self.rows("train")
        sampler = GlobalBatches(rows.lengths, seed=self.args.seed, **share)
        return DataLoader(Drawn(rows), batch_sampler=sampler, num_workers=workers, **settings)

    def batches_per_epoch(self, world_size: int) -> int:
        rows = self.rows("train")
        return GlobalBatches(
            rows.lengths, batch_size=self.args.batch_size, seed=self.args.seed, world_size=world_size
        ).per_epoch

    def total_steps(self, world_size: int) -> int:
        if self.args.max_steps is not None:
            return self.args.max_steps
        batches = self.batches_per_epoch(world_size) * self.args.epochs
        return max(1, math.ceil(batches / self.args.gradient_accumulation))

    def collate(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Rows as one padded batch of the inputs that the model takes."""
        batch = pad_rows(rows, pad_token_id=self.tokenizer.pad_token_id)
        return {key: value for key, value in batch.items() if self.takes(key)}

    def takes(self, key: str) -> bool:
        """Whether the model has that input; which optional ones it has is not known before it is loaded."""
        return key not in ("global_attention_mask", "token_type_ids") or not self._accepted or key in self._accepted

    def collate_known(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {**self.collate(rows), "row_ids": [row["row_id"] for row in rows]}

    def global_mask(self, length: int, question: tuple[int, int] | None = None) -> dict[str, list[int]]:
        return {"global_attention_mask": global_mask(length, self.global_placement, question=question)}

    @property
    def global_placement(self) -> str:
        """Which tokens are global, as in `RunArguments.global_attention` but with the task's own default."""
        chosen = self.args.global_attention
        return self.default_global if chosen == "default" else chosen

    def eval_batches(
        self, rows: Any, lengths: Sequence[int], accelerator: Accelerator, what: str
    ) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """This process's share of the rows, on its device, with a bar on the main process.

        The processes of a sharded model can't compute alone: one that has a batch less gets one more at the end without
        any row numbers, whose results nobody wants.
        """
        share: dict[str, Any] = {"batch_size": self.args.eval_batch_size, "world_size": accelerator.num_processes}
        places = eval_batches(lengths, rank=accelerator.process_index, **share)
        own = len(places)
        if is_sharded(accelerator):
            # The first process has the most rows.
            longest = eval_batches(lengths, rank=0, **share)
            places += longest[len(places) :]
        bar = tqdm(places, desc=what, leave=False, disable=not accelerator.is_main_process)
        for number, batch in enumerate(bar):
            inputs = self.collate([{**rows[row], "row_id": row, "draw": 0} for row in batch])
            yield batch if number < own else [], send_to_device(inputs, accelerator.device)

    def _max_length(self) -> int:
        limit = longest_input(self.config, self.tokenizer)
        wanted = limit if self.args.max_length is None else self.args.max_length
        if wanted > limit:
            raise ValueError(
                f"max_length={wanted} is more than the {limit} tokens that {self.args.model} can read: lower it, or "
                "convert the checkpoint with a larger --max-length"
            )
        return wanted


def load_tokenizer(model: str) -> PreTrainedTokenizerFast:
    tokenizer = load_pretrained(AutoTokenizer, model)
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer of {model} is not a fast one, which alone knows where its tokens stand")
    return tokenizer


def load_config(args: RunArguments) -> Any:
    """The checkpoint's configuration with what the arguments change in it."""
    changes: dict[str, Any] = {name: getattr(args, name) for name in HYBRID_OVERRIDES}
    changes = {name: value for name, value in changes.items() if value is not None}
    config = AutoConfig.from_pretrained(args.model)
    if changes and not isinstance(config, HybridLongformerConfig):
        name, value = next(iter(changes.items()))
        raise ValueError(f"{name}={value} is for hybrid models only, but {args.model} is a {config.model_type}")
    if args.dropout is not None:
        known = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
        changes |= {name: args.dropout for name in known if hasattr(config, name)}
    return AutoConfig.from_pretrained(args.model, **changes) if changes else config


def longest_input(config: Any, tokenizer: Any) -> int:
    """Tokens that the model can read."""
    if isinstance(config, HybridLongformerConfig):
        return config.max_tokens
    if tokenizer.model_max_length < NO_LIMIT:
        return tokenizer.model_max_length
    return getattr(config, "max_position_embeddings", 514) - 2


def add_lora(model: PreTrainedModel, args: RunArguments, saved: Sequence[str]) -> nn.Module:
    """Adapters on the attention projections; the head is trained whole."""
    from peft import LoraConfig, get_peft_model

    projections = {"query", "key", "value", "query_global", "key_global", "value_global", "q_proj", "k_proj", "v_proj"}
    found = sorted({name.rpartition(".")[2] for name, _ in model.named_modules()} & projections)
    if not found:
        raise ValueError(f"lora_rank={args.lora_rank}: {type(model).__name__} has none of {sorted(projections)}")
    heads = [name for name in saved if hasattr(model, name)]
    settings = LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=found, modules_to_save=heads)
    return get_peft_model(model, settings)
