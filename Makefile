PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DEBIAN := bubblewrap socat libibverbs1 libnuma1 libcurl4
HARNESSES := mini-swe-agent claude-code codex qwen-code opencode
STAMPS := $(HARNESSES:%=.gyre-harness/%/.installed)
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: train test test-harnesses check install debian nodejs clean

train: install
	$(BIN)/gyre quickstart $(ARGS)

test: install $(STAMPS)
	$(BIN)/python -m pytest $(ARGS)

# The same checks of the real harnesses as in `make test`, with longer conversations.
test-harnesses: install $(STAMPS)
	GYRE_TEST_TURNS=$(or $(TURNS),60) $(BIN)/python -m pytest tests/harnesses $(ARGS)

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

.gyre-harness/%/.installed: infra/harness/install.py | $(VENV)/.installed nodejs
	$(BIN)/python -m infra.harness.install $* --into .gyre-harness/$*
	touch $@

nodejs:
	@if ! command -v npm >/dev/null; then \
	  if [ "$$(id -u)" = 0 ]; then apt-get update -qq && apt-get install -y -qq nodejs npm; \
	  else echo "harnesses from npm need Node.js 20 or newer and npm: install nodejs and npm"; exit 2; fi; fi

clean:
	rm -rf .gyre .cache/tasks
