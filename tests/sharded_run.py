"""What tests/test_finetune_processes.py launches: a fine-tuning run whose model FSDP divides, on CPUs.

Accelerate itself uses FSDP on GPUs only, so it is made to believe that this is where it is.
"""

import os
import sys
from typing import Any

from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from finetune import engine
from finetune.tasks import TASKS, run

start_processes = engine.start_processes


def fsdp_plugin(config_file: str) -> FullyShardedDataParallelPlugin:
    """FSDP as one of the project's config files wants it."""
    settings = load_config_from_file(config_file).fsdp_config
    return FullyShardedDataParallelPlugin(
        fsdp_version=settings["fsdp_version"],
        auto_wrap_policy=settings["fsdp_auto_wrap_policy"],
        transformer_cls_names_to_wrap=settings["fsdp_transformer_layer_cls_to_wrap"].split(","),
        reshard_after_forward=settings["fsdp_reshard_after_forward"],
        state_dict_type=settings["fsdp_state_dict_type"],
        cpu_ram_efficient_loading=settings["fsdp_cpu_ram_efficient_loading"],
    )


def start_sharded(config_file: str, **options: Any) -> Accelerator:
    accelerator = start_processes(**options)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = fsdp_plugin(config_file)
    return accelerator


if __name__ == "__main__":
    task, config_file, *argv = sys.argv[1:]
    engine.start_processes = lambda **options: start_sharded(config_file, **options)
    exit_code = run(TASKS[task], argv)
    # Torch's caches keep FSDP's meshes, and these gloo's threads, which the interpreter's end may abort.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
