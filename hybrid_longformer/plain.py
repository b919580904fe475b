"""Plain layers: those whose outputs and gradients may be worked out from their weight and bias alone."""

import torch
from torch import Tensor, nn


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is its weight and bias and nothing else. Adapters, quantised layers and layers whose weights a
    hook brings in have to be called."""
    return type(layer) is nn.Linear and not has_hooks(layer)


def has_hooks(module: nn.Module) -> bool:
    """Whether calling a module does more than its `forward`."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "_hf_hook" in vars(module)


def is_in_graph(x: Tensor) -> bool:
    """Whether operations are compiled, exported or autocast, which plain operations leave to others."""
    return torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)
