# Two commands: `make demo` and `make test`. Each sets up everything it needs in .venv. CONTRIBUTING.md has the others.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test test-all stress coverage docs lint format clean
demo: $(VENV)/.installed
	$(BIN)/cuboid demo

test: lint
	$(BIN)/pytest

test-all: lint
	$(if $(LARGE),CUBOID_LARGE=1) $(BIN)/pytest -m '' --durations 20

coverage: $(VENV)/.installed
	$(BIN)/coverage erase
	COVERAGE_FILE=$(CURDIR)/.coverage $(BIN)/coverage run -m pytest -m ''
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --show-missing

stress: $(VENV)/.installed
	$(BIN)/python tests/stress.py

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Cuboid needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,docs,hf]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
