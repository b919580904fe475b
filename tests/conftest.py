"""Shared set-up: no network, one thread per test process, and a place for the real weights and documents."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("suite", deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _quiet_and_repeatable():
    torch.manual_seed(0)
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
