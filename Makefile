# Two environments, each made by pip from this project's own files and left alone until those change.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
EXTRAS := dev,view,bench,finetune
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: test test-oldest quick lint format demo bench clean

test: lint  ## ruff, mypy and the whole suite
	.venv/bin/python -m pytest -n 2

quick: .venv/installed  ## the suite without what compiles, exports or measures
	.venv/bin/python -m pytest -n 2 -m "not slow"

test-oldest: .venv-oldest/installed  ## the quick tests on the oldest transformers that pyproject.toml allows
	.venv-oldest/bin/python -m pytest -n 2 -m "not slow"

lint: .venv/installed
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

format: .venv/installed
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

demo: .venv/installed  ## the main job on generated contracts: fine-tune, compare, save, reload, ask
	.venv/bin/python -m finetune.demo

bench: .venv/installed  ## side by side with HF Longformer, dense attention and other encoders
	.venv/bin/python -m benchmarks.attention
	.venv/bin/python -m benchmarks.models

# torch goes first and pinned: anything looser may pull another build with gigabytes of its own.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	@touch $@

.venv-oldest/installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --constraint constraints-oldest.txt torch
	.venv-oldest/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable ".[$(EXTRAS)]"
	@touch $@

clean:
	rm -rf .venv .venv-oldest .mypy_cache .pytest_cache .ruff_cache .hypothesis
