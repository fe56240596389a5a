PY ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench man clean install

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PY) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade -c constraints.txt pip
	$(BIN)/pip install -q -c constraints.txt -e '.[torch,examples]' --group dev
	touch $@

demo: install
	$(BIN)/dlctl run --fresh examples/digits/job.toml

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/python -m benchmarks

man: install
	$(BIN)/python -m dlctl.cli.manpages

clean:
	rm -rf $(VENV) runs examples/*/runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
