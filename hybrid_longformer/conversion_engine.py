"""Engine: decides what becomes of every tensor of a source, and writes the result shard by shard."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .conversion_maps import NameMap
from .conversion_report import Action, TensorFate
from .conversion_source import ConversionError, SourceCheckpoint

Make = Callable[[Sequence[Tensor]], Tensor]
_BASE_MODULES = ("embeddings", "encoder", "pooler", "extra_global_tokens")
_NAMED_IN_ERRORS = 10


def tile_positions(table: Tensor, rows: int, *, reserved: int = 2, target_reserved: int | None = None) -> Tensor:
    """A longer (or shorter) position table: the learned positions repeated behind the rows that stand for none.

    Args:
        table: (positions, E), learned.
        rows: of the result, reserved ones included.
        reserved: first rows of `table` that stand for no position: 2 in RoBERTa and BART, 0 in BERT.
        target_reserved: the same of the result; None for as many. Those that `table` lacks are zeros.

    Returns:
        (rows, E), a table of its own.
    """
    target_reserved = reserved if target_reserved is None else target_reserved
    if not 0 <= reserved < len(table):
        raise ValueError(f"reserved={reserved} must be at least 0 and leave some of the table's {len(table)} rows")
    if not 0 <= target_reserved <= rows:
        raise ValueError(f"rows={rows} must be at least target_reserved={target_reserved}, and both at least 0")
    head, positions = table[: min(reserved, target_reserved)], table[reserved:]
    filler = table.new_zeros(target_reserved - len(head), table.shape[1])
    wanted = rows - target_reserved
    return torch.cat([head, filler, positions.repeat(-(-wanted // len(positions)), 1)[:wanted]])


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one tensor of the result is made."""

    fate: TensorFate
    make: Make


@dataclass(frozen=True, kw_only=True)
class Resize:
    """What a position table becomes.

    Args:
        source_rows: of the source's table, by its config.
        reserved: first rows of the source's table that stand for no position.
        target_reserved: the same of the result's.
        rows: of the result's table.
        added: tensor whose first row is added to every position, or None.
    """

    source_rows: int
    reserved: int
    target_reserved: int
    rows: int
    added: str | None = None

    @property
    def action(self) -> Action:
        return "tiled" if self.rows - self.target_reserved > self.source_rows - self.reserved else "copied"

    @property
    def note(self) -> str:
        held, wanted = self.source_rows - self.reserved, self.rows - self.target_reserved
        notes = [f"{held:,} positions repeated to {wanted:,}"] if wanted > held else []
        notes += [f"the first {wanted:,} of {held:,} positions"] if wanted < held else []
        notes += ["with the first token type added"] if self.added else []
        notes += (
            [f"reserved rows {self.reserved} -> {self.target_reserved}"]
            if self.reserved != self.target_reserved
            else []
        )
        return ", ".join(notes)

    def make(self, tensors: Sequence[Tensor]) -> Tensor:
        table = tile_positions(tensors[0], self.rows, reserved=self.reserved, target_reserved=self.target_reserved)
        if self.added is not None:
            table[self.target_reserved :] += tensors[1][:1]
        return table


@dataclass(kw_only=True)
class Job:
    """One conversion: a source, the names, and the empty model that says which tensors the result has.

    Args:
        model: the result's model on the meta device.
        prefix: what the source's classes with a head call their base model.
        base_prefix: the same of the result's class; "" if it is the base model itself.
        resizes: position tables of the result by name.
        drop_heads: leave out every tensor of the source's head.
    """

    source: SourceCheckpoint
    model: Any
    map: NameMap
    prefix: str
    base_prefix: str
    resizes: Mapping[str, Resize] = field(default_factory=dict)
    drop_heads: bool = False

    def __post_init__(self) -> None:
        tied = self.model.get_expanded_tied_weights_keys(all_submodels=True)
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        self.tied = {self._bare(name, self.base_prefix): self._bare(tied[name], self.base_prefix) for name in tied}
        self.targets = {self._bare(name, self.base_prefix): s for name, s in shapes.items() if name not in tied}
        self.stored = {self._bare(name, self.prefix): name for name in self.source.tensors}

    def recipes(self) -> tuple[list[Recipe], list[TensorFate]]:
        """How to make every tensor of the result, and the fates of the source tensors that are in none."""
        chosen, dropped, extra = self._assign_sources()
        made = {target: self._recipe(target, chosen) for target in self.targets}
        missing = [target for target, recipe in made.items() if recipe is None]
        if missing or extra:
            raise ConversionError(self._mismatch_text(missing, extra))
        return [recipe for recipe in made.values() if recipe is not None], dropped

    def _assign_sources(self) -> tuple[dict[str, str], list[TensorFate], list[str]]:
        """Target -> source for everything the rules name, the dropped ones, and those that nothing is known about."""
        candidates: dict[str, list[tuple[int, str]]] = {}
        dropped, extra = [], []
        for bare, name in self.stored.items():
            rank, target = _rename(bare, self.map.names) or (0, None)
            if target in self.tied:
                # Only if nothing else is there for the tensor that both share.
                rank, target = rank + len(self.map.names), self.tied[target]
            reason = self._reason_to_drop(bare, target)
            if reason is not None:
                dropped.append(TensorFate(target=None, action="dropped", sources=(name,), note=reason))
            elif target in self.targets:
                candidates.setdefault(target, []).append((rank, name))
            else:
                extra.append(name)
        chosen = {}
        for target, ranked in candidates.items():
            (_, chosen[target]), *others = sorted(ranked)
            note = f"a second copy of {chosen[target]}"
            dropped += [TensorFate(target=None, action="dropped", sources=(other,), note=note) for _, other in others]
        return chosen, dropped, extra

    def _reason_to_drop(self, bare: str, target: str | None) -> str | None:
        reason = _match(bare, self.map.drops)
        if reason is None and target not in self.targets and self.drop_heads:
            return "left out with the head"
        if reason is None and target not in self.targets and bare.startswith("pooler."):
            return "this head does not read the pooler"
        return reason

    def _recipe(self, target: str, chosen: Mapping[str, str]) -> Recipe | None:
        if target in chosen:
            return self._copy(target, chosen[target], "copied", chosen)
        for pattern, other_pattern, action in self.map.copies:
            other = _rename(target, ((pattern, other_pattern),))
            if other is not None and other[1] in chosen:
                return self._copy(target, chosen[other[1]], action, chosen)
        shape = self.targets[target]
        reason = _match(target, self.map.zeros)
        if reason is not None:
            fate = TensorFate(target=self._full(target), action="new", note=f"zeros, which is exact: {reason}")
            return Recipe(fate=fate, make=lambda _: torch.zeros(shape))
        reason = _match(target, self.map.new)
        if reason is not None:
            fate = TensorFate(target=self._full(target), action="new", note=f"random: {reason}")
            return Recipe(fate=fate, make=partial(_new_tensor, target, shape, self.model.config.initializer_range))
        return None

    def _copy(self, target: str, source: str, action: Any, chosen: Mapping[str, str]) -> Recipe:
        resize = self.resizes.get(target)
        if resize is None:
            make = partial(_reshape, source, self.targets[target])
            return Recipe(fate=TensorFate(target=self._full(target), action=action, sources=(source,)), make=make)
        rows = self.source.tensors[source].shape[0]
        if rows != resize.source_rows:
            raise ConversionError(
                f"{source} has {rows} rows, but the config asks for {resize.source_rows}: the config belongs to other "
                "weights"
            )
        sources = (source,) if resize.added is None else (source, chosen[resize.added])
        fate = TensorFate(target=self._full(target), action=resize.action, sources=sources, note=resize.note)
        return Recipe(fate=fate, make=resize.make)

    def _bare(self, name: str, prefix: str) -> str:
        return name.removeprefix(f"{prefix}.") if prefix else name

    def _full(self, target: str) -> str:
        return f"{self.base_prefix}.{target}" if self.base_prefix and target.startswith(_BASE_MODULES) else target

    def _mismatch_text(self, missing: Sequence[str], extra: Sequence[str]) -> str:
        parts = [f"the tensors of {self.source.label} are not those of a {self.source.architecture}"]
        if missing:
            parts.append(f"missing for {_enumerate([self._full(name) for name in missing])}")
        if extra:
            parts.append(f"not known: {_enumerate(extra)}")
        return "; ".join(parts) + ". Check `architectures` in its config, or load and save it with its own class first"


def _enumerate(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED_IN_ERRORS
    return ", ".join(names[:_NAMED_IN_ERRORS]) + (f" and {rest} more" if rest > 0 else "")


def _pattern(rule: str) -> str:
    return re.escape(rule).replace(r"\*", r"(\d+)") + r"(\..*)?"


def _match(name: str, reasons: Mapping[str, str]) -> str | None:
    return next((reason for rule, reason in reasons.items() if re.fullmatch(_pattern(rule), name)), None)


def _rename(name: str, rules: Sequence[tuple[str, str]]) -> tuple[int, str] | None:
    """The rank of the most specific rule for a name, and the name it gives."""
    best: tuple[int, str] | None = None
    longest = -1
    for rank, (source, target) in enumerate(rules):
        match = re.fullmatch(_pattern(source), name)
        if match and len(source) > longest:
            longest = len(source)
            *layers, rest = match.groups()
            renamed = target.replace("*", layers[0]) if layers else target
            best = rank, renamed + (rest or "")
    return best


def _reshape(name: str, shape: tuple[int, ...], tensors: Sequence[Tensor]) -> Tensor:
    tensor = tensors[0]
    # BART keeps the bias of its logits as a row.
    squeezed = tensor[0] if tensor.dim() == len(shape) + 1 and tensor.shape[0] == 1 else tensor
    if tuple(squeezed.shape) != shape:
        raise ConversionError(
            f"{name} has shape {tuple(tensor.shape)}, but the config asks for {shape}: "
            "the config belongs to other weights"
        )
    return squeezed


def _new_tensor(name: str, shape: tuple[int, ...], std: float, _: Sequence[Tensor]) -> Tensor:
    """What the model's own initialisation would give, but the same in every run."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if name.lower().replace("_", "").endswith("layernorm.weight"):
        return torch.ones(shape)
    seed = int.from_bytes(name.encode()[-7:], "little")
    return torch.empty(shape).normal_(std=std, generator=torch.Generator().manual_seed(seed))


def write_weights(source: SourceCheckpoint, recipes: Sequence[Recipe], folder: Path, dtype: torch.dtype) -> None:
    """Makes and writes every tensor; the result has as many shards as the source, and one is read at a time.

    What is only renamed goes from file to file: each tensor read is a view of a mapping of its own, so two tensors of
    the result that are the same one of the source don't share memory, which safetensors would refuse.
    """
    files = source.files
    shards: list[list[Recipe]] = [[] for _ in files]
    for recipe in recipes:
        sources = recipe.fate.sources
        shards[files.index(source.tensors[sources[0]].file) if sources else -1].append(recipe)
    shards = [shard for shard in shards if shard]
    weight_map: dict[str, str] = {}
    total_size = 0
    with tqdm(total=len(recipes), desc="converting", unit="tensor", leave=False, disable=None) as progress:
        for number, shard in enumerate(shards, start=1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else SAFE_WEIGHTS_NAME
            tensors: dict[str, Tensor] = {}
            for recipe in shard:
                assert recipe.fate.target is not None
                made = recipe.make([source.read(source_name) for source_name in recipe.fate.sources])
                tensors[recipe.fate.target] = made.to(dtype=dtype).contiguous()
                progress.update()
            save_file(tensors, folder / name, metadata={"format": "pt"})
            # Made for its owner's eyes only; the other files are made as the umask says, like the folder.
            (folder / name).chmod(folder.stat().st_mode & 0o666)
            weight_map |= dict.fromkeys(tensors, name)
            total_size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
