PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all lint docs clean

demo: $(STAMP)  ## train a small Llama with ZeRO-3 on two CPU processes
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_llama.py

test: lint  ## everything that must hold before a change goes in
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-all: lint  ## the same with every value of every parameter: takes about twice as long
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m ''

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)  ## the documentation as a site, in build/site
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/make_api.py
	$(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@
