"""Shared set-up: no network, one thread per test process, and a place for the real weights and documents."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

from hybrid_longformer import plan

settings.register_profile("suite", deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _quiet_and_repeatable():
    torch.manual_seed(0)
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _tiles_for_short_rows(monkeypatch, request):
    """Rows are cut into tiles as soon as these read fewer keys: else most tests would be about rows read whole."""
    if "as_shipped" not in request.keywords:
        monkeypatch.setattr(plan, "OVERHEAD_OF_TILES_IN_KEYS", 0)


@pytest.fixture(scope="session")
def work(tmp_path_factory) -> Path:
    """Checkpoints and data for fine-tuning; to be read only."""
    from .finetuning import make_work

    return make_work(tmp_path_factory.mktemp("finetune"))


@pytest.fixture
def own_accelerator(monkeypatch, tmp_path_factory):
    """Accelerate as in a new process, and tokenised data of this session only."""
    from accelerate.state import AcceleratorState

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))
    yield
    AcceleratorState._reset_state(True)
