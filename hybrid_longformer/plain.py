"""Plain layers: those whose outputs and gradients may be worked out from their weight and bias alone."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is its weight and bias and nothing else. Adapters, quantised layers and layers whose weights a
    hook brings in have to be called."""
    return type(layer) is nn.Linear and type(layer.weight) in (nn.Parameter, Tensor) and not has_hooks(layer)


def has_hooks(module: nn.Module) -> bool:
    """Whether calling a module does more than the `forward` of its class."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module) or _has_any_global_hook()


def is_in_graph(x: Tensor) -> bool:
    """Whether operations are compiled, exported or autocast, which plain operations leave to others."""
    return torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)


def no_autocast(x: Tensor) -> AbstractContextManager:
    """For what chooses its dtypes itself. Nothing to do, and no time spent on it, where autocast is off."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
