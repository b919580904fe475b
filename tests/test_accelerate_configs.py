"""Accelerate's config files: each is what accelerate takes it for, and two CPU processes train like one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env

from hybrid_longformer import (
    HybridLongformerForConditionalGeneration,
    HybridLongformerForMaskedLM,
    HybridLongformerForQuestionAnswering,
)

from .models import tiny_config
from .two_processes import train_here

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "finetune" / "accelerate"
TYPES = {
    "cpu_2_processes": DistributedType.MULTI_GPU,
    "gpus_ddp": DistributedType.MULTI_GPU,
    "gpus_fsdp_encoder": DistributedType.FSDP,
    "gpus_fsdp_seq2seq": DistributedType.FSDP,
    "gpus_deepspeed_zero3": DistributedType.DEEPSPEED,
}
SHARDED_CLASSES = {
    HybridLongformerForQuestionAnswering: "gpus_fsdp_encoder",
    HybridLongformerForMaskedLM: "gpus_fsdp_encoder",
    HybridLongformerForConditionalGeneration: "gpus_fsdp_seq2seq",
}


def path_of(name: str) -> str:
    return str(FOLDER / f"{name}.yaml")


def launch_arguments(name: str):
    """What `accelerate launch` makes of a file."""
    arguments = launch_command_parser().parse_args(["--config_file", path_of(name), "script.py"])
    return _validate_launch_command(arguments)[0]


def test_every_file_is_known_here() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(TYPES)


@pytest.mark.parametrize("name", TYPES)
def test_accelerate_reads_it(name: str) -> None:
    config = load_config_from_file(path_of(name))
    assert config.distributed_type is TYPES[name]
    assert (config.num_processes, config.num_machines, config.main_process_port) == (2, 1, 0)
    assert config.use_cpu is (name == "cpu_2_processes")
    assert config.mixed_precision == ("no" if config.use_cpu else "bf16")
    arguments = launch_arguments(name)
    assert arguments.use_fsdp is (config.distributed_type is DistributedType.FSDP)
    assert arguments.use_deepspeed is (config.distributed_type is DistributedType.DEEPSPEED)
    assert arguments.multi_gpu is (config.distributed_type is DistributedType.MULTI_GPU)


@pytest.mark.parametrize("name", TYPES)
def test_every_nested_setting_is_one_that_accelerate_knows(name: str) -> None:
    """Accelerate refuses unknown keys at the top, and passes over unknown ones below."""
    known = vars(launch_command_parser().parse_args(["script.py"]))
    config = load_config_from_file(path_of(name))
    assert set(config.fsdp_config) | set(config.deepspeed_config) <= set(known)


@pytest.mark.parametrize(("model_class", "name"), SHARDED_CLASSES.items(), ids=lambda value: str(value).split(".")[-1])
def test_fsdp_wraps_layers_that_the_model_has(model_class: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in prepare_multi_gpu_env(launch_arguments(name)).items():
        monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    model = model_class(tiny_config())
    # Stops at a class that the model lacks.
    plugin.set_auto_wrap_policy(model)
    wrapped = plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
    found = {type(module) for module in model.modules()}
    assert wrapped <= found
    assert wrapped == {kind for kind in found if kind.__name__.endswith("Layer") and "Longformer" in kind.__name__}


def test_zero3_divides_everything() -> None:
    arguments = launch_arguments("gpus_deepspeed_zero3")
    assert int(arguments.zero_stage) == 3
    assert arguments.zero3_init_flag is True and arguments.zero3_save_16bit_model is True


def launch_two(output: Path, sharded: dict[str, str]) -> dict:
    """What two CPU processes write down; see tests/two_processes.py."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", path_of("cpu_2_processes")]
    command += ["-m", "tests.two_processes", str(output), json.dumps(sharded)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(output.read_text())


@pytest.mark.slow
def test_two_processes_train_like_one_and_leave_no_thread(tmp_path: Path) -> None:
    results = launch_two(tmp_path / "results.json", {})
    assert (results["processes"], results["type"]) == (2, "MULTI_CPU")
    assert results["losses"] == pytest.approx(train_here(), abs=1e-5)
    if sys.platform == "linux":
        # A thread that is left may abort its process at the very end, one time in dozens.
        assert results["threads"] and not results["threads_left"]


@pytest.mark.slow
def test_fsdp_divides_models_without_changing_them(tmp_path: Path) -> None:
    sharded = {model_class.__name__: path_of(name) for model_class, name in SHARDED_CLASSES.items()}
    results = launch_two(tmp_path / "results.json", sharded)
    for name in sharded:
        assert results[name]["kinds"] == ["DTensor"]
        assert results[name]["after"] == pytest.approx(results[name]["before"], rel=1e-5)
