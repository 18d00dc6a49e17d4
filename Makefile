# Two environments, because transformers renamed its cache argument in 5.24: the oldest tested release and the newest.
PYTHON ?= python3
TORCH := torch==2.13.0
TRITON := triton==3.7.1; platform_system == 'Linux'
OLDEST := transformers==5.19.0
NEWEST := transformers==5.24.0
WORKERS ?= auto
PYTEST := -m pytest -q -n $(WORKERS)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: demo test lint full clean

demo: .venv/ready
	.venv/bin/windowed-mtp demo

test: lint .venv/ready .venv-newest/ready
	OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST)
	OMP_NUM_THREADS=1 .venv-newest/bin/python $(PYTEST) tests/unit tests/integration tests/property/test_engine_properties.py

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

full: .venv/ready
	OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST) -m full

.venv/ready: TRANSFORMERS := $(OLDEST)
.venv-newest/ready: TRANSFORMERS := $(NEWEST)
.venv/ready .venv-newest/ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q "$(TORCH)" "$(TRITON)" "$(TRANSFORMERS)"
	$(@D)/bin/pip install -q -e ".[dev]" "$(TORCH)" "$(TRANSFORMERS)"
	touch $@

clean:
	rm -rf .venv .venv-newest
