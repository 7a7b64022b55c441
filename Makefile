PYTHON  ?= python3
PROFILE ?= demo
VENV    := .venv
WORKERS ?= 2
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help study lab test test-full figures clean

help: ## show this list
	@echo "epiviz: make TARGET"
	@sed -n 's/^\([a-z][a-z-]*\):.*## /  \1 /p' $(MAKEFILE_LIST) | awk '{t=$$1; $$1=""; printf "  %-10s%s\n", t, $$0}'

study: $(READY) ## run every notebook into runs/study and print the findings (PROFILE=demo, ARGS="--force …")
	$(BIN)/epiviz study --profile $(PROFILE) $(ARGS)

lab: $(READY) ## open JupyterLab on the first notebook (LAB_ARGS="--no-browser --port 8889")
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks/01_first_look.ipynb $(LAB_ARGS)

test: $(READY) ## run all tests (TEST_ARGS="-k retention")
	$(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=worksteal $(TEST_ARGS)

test-full: $(READY) ## run every policy on every model and dtype and a whole sweep (hours), and write data/results/matrix.csv
	$(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=worksteal --full tests/test_matrix.py tests/test_executors.py $(TEST_ARGS)

figures: $(READY) ## take the README's pictures again
	$(BIN)/python docs/make_figures.py

clean: ## remove the environment, builds and caches; runs/ stays
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find epiviz notebooks tests \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

# --no-compile: Python compiles what it imports; all of 20,000 files would take two minutes
# --clear: an environment that an interrupted call left without pip is not worth keeping
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "epiviz needs Python 3.11 or newer, and there is no '$(PYTHON)' here."; \
	  echo "Install it, or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "epiviz needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1)."; \
	  echo "Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' lacks the venv module. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo "Making the environment in $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing epiviz and what it needs into $(VENV); the first time takes some minutes"
	$(BIN)/python -m pip install --no-compile -e '.[dev]' -c constraints.txt
	@touch $@
