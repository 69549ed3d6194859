# Unset, PYTHON and TORCH mean what .venv has; for a new one the newest Python that is found, and torch's CPU build.
PYTHON ?=
TORCH ?=
# Has torch's CPU build where pip (or uv), as it is set up, finds none. TORCH=default: the ordinary build, for CUDA too.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV := .venv
BIN := $(VENV)/bin
DEBIAN := bubblewrap socat libibverbs1 libnuma1 libcurl4
# What infra/harness/install.py pins.
HARNESSES := $(shell sed -n 's/^ *Package."\([a-z-]*\)".*/\1/p' infra/harness/install.py)
STAMPS := $(HARNESSES:%=.gyre-harness/%/.installed)
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: train test test-harnesses check bench install debian asked nodejs clean

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

# NAME is one of proxy, trajectory, elastic, migration; ARGS="--help" tells its options.
bench: install
	@$(BIN)/python -m tests.bench $(NAME) $(ARGS)

install: debian $(VENV)/.installed

# Where it runs as root, the Debian packages come along; elsewhere `gyre doctor` names what is missing.
debian:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  for package in $(DEBIAN); do dpkg -s $$package >/dev/null 2>&1 || dpkg -s $${package}t64 >/dev/null 2>&1 || \
	    { apt-get update -qq && apt-get install -y -qq $(DEBIAN); break; }; done; fi

# Each candidate is run: a name alone proves nothing (a shim of pyenv, a Python without venv).
PYTHONS := $(or $(PYTHON),$(BIN)/python python3.13 python3.12 python3.11 python3)
USABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
INSTALL = for python in $(PYTHONS); do if $$python -c '$(USABLE)' 2>/dev/null; then \
  exec $$python -I infra/install.py $(VENV) --torch="$(TORCH)" --torch-index="$(TORCH_INDEX)"; fi; done

$(VENV)/.installed: requirements.lock requirements-cuda.lock pyproject.toml infra/install.py $(if $(PYTHON)$(TORCH),asked)
	@$(INSTALL); \
	if [ -z "$(PYTHON)" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq python3 python3-venv; $(INSTALL); fi; \
	echo "gyre needs Python 3.11, 3.12 or 3.13 with venv and ensurepip, which is none of: $(PYTHONS)." \
	  "Install one (Debian, Ubuntu: python3 python3-venv), or name it: make PYTHON=..." >&2; exit 2

# What is named is compared with what is installed, each time.
asked:

.gyre-harness/%/.installed: infra/harness/install.py | $(VENV)/.installed nodejs
	$(BIN)/python -m infra.harness.install $* --into .gyre-harness/$*
	touch $@

nodejs:
	@if ! command -v npm >/dev/null; then \
	  if [ "$$(id -u)" = 0 ]; then apt-get update -qq && apt-get install -y -qq nodejs npm; \
	  else echo "harnesses from npm need Node.js 20 or newer and npm: install nodejs and npm"; exit 2; fi; fi

clean:
	rm -rf .gyre .cache/tasks
