"""Conversion of real RoBERTa weights, on real text; skipped where neither is at hand."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from hybrid_longformer import HybridLongformerModel, convert_checkpoint, export_to_longformer

SHARED = Path(os.environ.get("HYBRID_LONGFORMER_SHARED", Path(__file__).resolve().parents[2] / "shared"))
WEIGHTS = SHARED / "models" / "granite-30m-roberta"
PAPERS = SHARED / "data" / "scisummnet" / "validation.jsonl.gz"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (WEIGHTS.is_dir() and PAPERS.exists()),
        reason=f"no real weights and documents in {SHARED}; set HYBRID_LONGFORMER_SHARED to the folder that has them",
    ),
]


@pytest.fixture(scope="module")
def paper() -> str:
    with gzip.open(PAPERS, "rt", encoding="utf-8") as lines:
        return json.loads(next(lines))["document"]


@pytest.fixture(scope="module")
def source():
    # In float64 rounding hides nothing: the states are as large as 15, where float32's own backends differ by 5e-5.
    return AutoModel.from_pretrained(WEIGHTS, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[int, Path]:
    folders = {window: tmp_path_factory.mktemp("converted") / str(window) for window in (512, 1024)}
    for window, folder in folders.items():
        report = convert_checkpoint(WEIGHTS, folder, attention_window=window)
        assert report.verification.largest_difference < 1e-4
        assert report.verification.num_tokens == 512
    return folders


@pytest.mark.parametrize(("window", "length"), [(512, 257), (1024, 512)])
@torch.no_grad()
def test_equal_where_the_window_is_full_attention(window, length, source, converted, paper):
    tokenizer = AutoTokenizer.from_pretrained(converted[window])
    assert tokenizer.model_max_length == 4096
    ids = tokenizer(paper, truncation=True, max_length=length, return_tensors="pt")["input_ids"]
    assert ids.shape[1] == length
    result = HybridLongformerModel.from_pretrained(converted[window], dtype=torch.float64).eval()
    expected = source(ids).last_hidden_state
    torch.testing.assert_close(result(ids).last_hidden_state, expected, atol=1e-9, rtol=0)
    marked = torch.zeros_like(ids)
    marked[:, 0] = 1
    found = result(ids, global_attention_mask=marked).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@torch.no_grad()
def test_long_documents_give_finite_vectors(converted, paper):
    tokenizer = AutoTokenizer.from_pretrained(converted[512])
    result = HybridLongformerModel.from_pretrained(converted[512], dtype=torch.float32).eval()
    ids = tokenizer(paper, truncation=True, return_tensors="pt")["input_ids"]
    assert 512 < ids.shape[1] <= 4096
    assert torch.isfinite(result(ids).last_hidden_state).all()


def test_export_gives_equal_longformer(tmp_path):
    convert_checkpoint(WEIGHTS, tmp_path / "hybrid", num_random_blocks=0, verify=False)
    report = export_to_longformer(tmp_path / "hybrid", tmp_path / "longformer")
    assert report.verification.largest_difference < 1e-4
    assert report.verification.num_tokens == 1024


def test_folder_loads_without_this_package(converted, tmp_path):
    code = (
        "import sys, torch; from transformers import AutoModel, AutoTokenizer; folder = sys.argv[1]; "
        "model = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32); "
        "tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True); "
        "print(tuple(model(**tokenizer('A long document.', return_tensors='pt')).last_hidden_state.shape)); "
        "assert 'hybrid_longformer' not in sys.modules"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HF_MODULES_CACHE"] = str(tmp_path / "modules")
    run = subprocess.run(
        [sys.executable, "-c", code, str(converted[512])],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "(1, 6, 384)" in run.stdout
