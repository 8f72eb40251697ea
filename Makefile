# Everything a newcomer types; `make help` lists it. Needs Linux x86-64, glibc 2.28 or later, Python 3.12 or 3.13, bash.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.SUFFIXES:
.DEFAULT_GOAL := help
.PHONY: .venv quickstart test test-all torture proven check lint typecheck slurm-deps constraints clean help

# Other choices: make PYTHON=/path/to/python3.12 EXTRAS=dev
PYTHON ?=
EXTRAS ?= dev,telemetry,sentencepiece,muon,resilience
PIP ?= .venv/bin/python -m pip

# The folders `data` and `tests` must not become importable as top-level modules.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Prints the first interpreter that really runs and can make a virtual environment; a pyenv shim may exist and refuse.
USABLE := import sys, sysconfig, ctypes, ensurepip, ssl, venv; \
  sys.exit(not ((3, 12) <= sys.version_info < (3, 14) and sys.implementation.name == "cpython" \
  and not sysconfig.get_config_var("Py_GIL_DISABLED")))
define FIND_PYTHON
here="$$(uname -sm), $$(getconf GNU_LIBC_VERSION 2>/dev/null || echo no glibc)"
if [[ $$here != "Linux x86_64, glibc "* || $$(printf '%s\n' 2.28 "$${here##* }" | sort -V | head -n 1) != 2.28 ]]; then
  echo "make: this needs Linux x86-64 with glibc 2.28 or later, as PyTorch does; here is $$here" >&2
  exit 1
fi
versions="$${PYENV_ROOT:-$$HOME/.pyenv}/versions"
found=
for candidate in $(or $(PYTHON),python3.13 python3.12 python3 "$$versions"/3.13*/bin/python "$$versions"/3.12*/bin/python); do
  if "$$candidate" -c '$(USABLE)' >/dev/null 2>&1; then found=$$candidate; break; fi
done
if [ -z "$$found" ]; then
  echo "make: no working Python 3.12 or 3.13 with venv$(if $(PYTHON), at $(PYTHON)): install one (python3.12 and python3.12-venv, or pyenv install 3.12), or name one: make PYTHON=/path/to/python3.12" >&2
  exit 1
fi
endef

help: ## this list
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

.venv: .venv/.installed ## the virtual environment with everything pinned by constraints.txt

# The stamp is the last thing written: without it the environment is made anew, so that an interrupted installation
# leaves nothing half done; with it a change of the two files updates the environment in place.
.venv/.installed: pyproject.toml constraints.txt
	@if [ ! -e $@ ]; then
	$(FIND_PYTHON)
	  echo "Making .venv with $$("$$found" -c 'import sys; print(sys.executable)')"
	  rm -rf .venv
	  "$$found" -m venv .venv
	fi
	rm -f $@
	echo "Installing shardwright and what it needs into .venv: about 5 GB on disk, some minutes, quiet until done"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

quickstart: .venv/.installed ## train a small GPT over two tensor-parallel ranks on this machine's CPU
	@.venv/bin/shardwright train experiment=quickstart

test: .venv/.installed ## all tests that fit this machine
	@.venv/bin/python tests/run_sections.py

test-all: .venv/.installed ## the slow ones too
	@.venv/bin/python tests/run_sections.py --all

KILLS ?= 100
torture: .venv/.installed ## kill a run of two ranks a hundred times at random moments (KILLS=100); half an hour
	@OMP_NUM_THREADS=1 TORTURE_KILLS=$(KILLS) .venv/bin/python -m pytest --no-header -s tests/distributed/test_torture.py

proven: .venv/.installed ## write what docs/parallelism.md says was proven, from the layouts that the tests declare
	@PYTHONSAFEPATH= .venv/bin/python -m tests.layouts_page

check: lint typecheck ## lint and typecheck

lint: .venv/.installed build/typecheck/shardwright ## ruff and the rules of who may import whom
	@.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	PYTHONPATH=build/typecheck .venv/bin/lint-imports

typecheck: .venv/.installed build/typecheck/shardwright ## mypy
	@.venv/bin/mypy build/typecheck/shardwright/*

# mypy and import-linter know nothing of mapped folders: a farm of links shows them the namespace.
build/typecheck/shardwright: Makefile
	@rm -rf $@
	mkdir -p $@
	for folder in conf data parallel pretrain slurm tests; do ln -s ../../../$$folder $@/$$folder; done

slurm-deps: ## install Slurm, munge and shellcheck for tests/slurm (Debian or Ubuntu, as root); no service is started
	@command -v apt-get >/dev/null || { echo "make: slurm-deps needs apt-get (Debian or Ubuntu)" >&2; exit 1; }
	[ "$$(id -u)" = 0 ] || { echo "make: slurm-deps installs packages and must run as root" >&2; exit 1; }
	policy=/usr/sbin/policy-rc.d
	if [ ! -e $$policy ]; then
	  printf '#!/bin/sh\nexit 101\n' > $$policy
	  chmod 755 $$policy
	  trap 'rm -f "$$policy"' EXIT
	fi
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge shellcheck

# Resolves pyproject.toml, the parts for a GPU included; nothing is installed. Transformer Engine's metadata needs torch
# while it is read: the environment has it, so no isolated build environment fetches another one.
define PINS
import json, sys
report = json.load(sys.stdin)
pins = {item["metadata"]["name"]: item["metadata"]["version"] for item in report["install"]}
pins.pop("shardwright", None)
print("# Every version that was checked together. Renew with `make constraints`, then run all tests.")
print("\n".join(sorted((f"{name}=={version}" for name, version in pins.items()), key=str.lower)))
endef
export PINS
constraints: .venv/.installed ## write constraints.txt anew with the newest versions that pyproject.toml allows
	@mkdir -p build
	$(PIP) install --quiet --dry-run --ignore-installed --no-build-isolation --report build/resolved.json \
	  --editable '.[dev,telemetry,sentencepiece,muon,resilience,te]'
	.venv/bin/python -c "$$PINS" < build/resolved.json > build/constraints.txt
	mv build/constraints.txt constraints.txt

clean: ## remove what was built and cached here; .venv, runs and data_cache stay
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
