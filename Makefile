PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DEBIAN := bubblewrap socat libibverbs1 libnuma1 libcurl4
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: train test check install debian clean

train: install
	$(BIN)/gyre quickstart $(ARGS)

test: install .gyre-harness/mini-swe-agent/.installed
	$(BIN)/python -m pytest $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: debian $(VENV)/.installed

# Where it runs as root, the Debian packages come along; elsewhere `gyre doctor` names what is missing.
debian:
	@if [ "$$(id -u)" = 0 ] && ! dpkg -s $(DEBIAN) >/dev/null 2>&1; then \
	  apt-get update -qq && apt-get install -y -qq $(DEBIAN); fi

$(VENV)/.installed: requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "gyre needs Python 3.11: set PYTHON to its name"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

.gyre-harness/mini-swe-agent/.installed: infra/harness/install.py | $(VENV)/.installed
	$(BIN)/python -m infra.harness.install mini-swe-agent --into .gyre-harness/mini-swe-agent
	touch $@

clean:
	rm -rf .gyre .cache/tasks
