"""The demo runs from end to end: two models, a comparison, a checkpoint reloaded by its own code, an answer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_demo_in_short(tmp_path):
    output = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, "-m", "finetune.demo", "--quick", "--output", str(output)],
        cwd=ROOT,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    hybrid, local = (json.loads((output / name / "metrics.json").read_text())["test"] for name in ("hybrid", "local"))
    # Two steps train nothing: what the shipped model knows already must show.
    assert hybrid["f1"] > 70
    assert local["f1"] < 50
    assert (output / "comparison.png").stat().st_size > 10_000
    assert "model code: transformers_modules." in done.stdout
    expected = json.loads(done.stdout.split("the contract says: ")[1].split(")\n")[0])
    assert f">>{expected}<<" in " ".join(done.stdout.split())
