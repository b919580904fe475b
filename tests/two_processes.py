"""What tests/test_accelerate_configs.py launches: trains a tiny model in several processes and writes what happened."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn

import hybrid_longformer
from finetune.processes import end_processes, share_input_embeddings, start_processes

from .models import tiny_config
from .sharded_run import fsdp_plugin

NUM_STEPS, NUM_ROWS, NUM_TOKENS = 3, 4, 50


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return getattr(hybrid_longformer, name)(tiny_config()).eval()


def make_batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 90, (NUM_ROWS, NUM_TOKENS), generator=generator)
    start = torch.randint(0, NUM_TOKENS, (NUM_ROWS,), generator=generator)
    return {"input_ids": ids, "start_positions": start, "end_positions": start}


def train(model: Any, optimizer: Any, accelerator: Accelerator | None = None) -> list[float]:
    """The loss of each step over all rows, of which every process reads its own."""
    losses = []
    for step in range(NUM_STEPS):
        batch = make_batch(step)
        if accelerator is not None:
            own = slice(accelerator.process_index, None, accelerator.num_processes)
            batch = {name: tensor[own] for name, tensor in batch.items()}
        loss = model(**batch).loss
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        detached = loss.detach()
        losses.append(float(detached if accelerator is None else accelerator.gather(detached).mean()))
    return losses


def train_here() -> list[float]:
    """In this process alone, the way it should be."""
    model = make_model("HybridLongformerForQuestionAnswering")
    return train(model, torch.optim.SGD(model.parameters(), lr=0.5))


def train_together(accelerator: Accelerator) -> list[float]:
    model = make_model("HybridLongformerForQuestionAnswering")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return train(model, optimizer, accelerator)


def sharded_outputs(name: str, config_file: str, accelerator: Accelerator) -> dict[str, Any]:
    """The mean square of a model's outputs before and after FSDP divided it as a config file says.

    Accelerate itself uses FSDP on GPUs only, so its own function is called with what it reads of an accelerator.
    """
    model = make_model(name)
    share_input_embeddings(model)
    before = mean_square(model)
    stand_in = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=fsdp_plugin(config_file)),
        mixed_precision="no",
        device=torch.device("cpu"),
        is_main_process=accelerator.is_main_process,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
    )
    model = fsdp2_prepare_model(stand_in, model)
    kinds = {type(parameter).__name__ for parameter in model.parameters()}
    return {"before": before, "after": mean_square(model), "kinds": sorted(kinds)}


@torch.no_grad()
def mean_square(model: nn.Module) -> float:
    ids = make_batch(0)["input_ids"]
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else {})
    outputs: Any = model(**inputs)
    found = outputs.logits if hasattr(outputs, "logits") else outputs.start_logits
    return float(found.double().square().mean())


def gloo_threads() -> list[str]:
    """The threads of this process that torch's gloo group runs; only Linux can tell."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def train_and_end() -> tuple[bool, dict[str, Any]]:
    """Trains, ends the processes as every script should, and says what is left."""
    accelerator = start_processes()
    results: dict[str, Any] = {
        "processes": accelerator.num_processes,
        "type": accelerator.distributed_type.value,
        "losses": train_together(accelerator),
        "threads": gloo_threads(),
    }
    is_main = accelerator.is_main_process
    end_processes(accelerator)
    return is_main, results | {"threads_left": gloo_threads()}


def main(output: Path, sharded: dict[str, str]) -> None:
    """Trains, or with config files by the class of a model, divides those models as the files say."""
    if not sharded:
        is_main, results = train_and_end()
    else:
        accelerator = start_processes()
        is_main = accelerator.is_main_process
        results = {name: sharded_outputs(name, file, accelerator) for name, file in sharded.items()}
    if is_main:
        output.write_text(json.dumps(results))
    if sharded:
        # Torch's caches keep FSDP's meshes, and these gloo's threads, which the interpreter's end may abort. FSDP is
        # for GPUs; here on the CPU it is only tried, so the process leaves without that end.
        accelerator.wait_for_everyone()
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
