"""Processes: starts Accelerate on the hardware at hand, and ends it so that no thread outlives the interpreter."""

import gc
from contextlib import suppress
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DistributedType
from torch import nn

if torch.distributed.is_available():
    # Functions in there have the default process group as a default argument. If DistributedDataParallel imports them
    # after the group was made, they keep it and its threads for ever, and one that still lets go of a tensor while the
    # interpreter shuts down aborts the process ("terminate called without an active exception").
    import torch.distributed.nn


def start_processes(**options: Any) -> Accelerator:
    """An Accelerator on the CPU where there is nothing else, whose processes may leave parameters unused.

    Without being told so, accelerate takes each of several processes on a machine without GPUs for the only one. And a
    batch without global tokens does not use their projections, which DistributedDataParallel must expect.

    Args:
        options: of `Accelerator`; `kwargs_handlers` are added to.
    """
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True), *options.pop("kwargs_handlers", [])]
    on_cpu = not torch.accelerator.is_available()
    return Accelerator(**({"cpu": on_cpu} | options), kwargs_handlers=handlers)


def end_processes(accelerator: Accelerator) -> None:
    """Waits for all processes, then closes trackers and ends what they talk through.

    Call it where nothing that `accelerator.prepare` returned is in any variable any more, so behind the function that
    trained: a model that is still there would keep the threads it talks through.
    """
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether each process holds a part of the model only, so that all of them have to compute together."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def share_input_embeddings(model: nn.Module) -> None:
    """Lets a seq2seq model with tied tables read them through one module, as FSDP wants before it divides them.

    FSDP keeps a shared parameter in one group. Accelerate puts the modules for input and output into one, but does not
    know the decoder's.
    """
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_word_embeddings", True):
        find: Any = model.get_input_embeddings
        put: Any = model.set_input_embeddings
        # Models made of two others have no one table.
        with suppress(NotImplementedError):
            put(find())
