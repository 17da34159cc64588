# Two commands for a fresh machine: `make demo` and `make test`. Both make the environment first.

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip install --quiet -c constraints.txt

.PHONY: demo test test-all quick check format clean

# The stamp is newer than the files that say what to install, so a change to either installs again.
$(VENV)/stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "shiplap needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Say make PYTHON=python3.12"; exit 2; }
	@echo "Making $(VENV) and installing shiplap into it; this takes about a minute."
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy
	$(PIP) -e '.[train,dev]'
	@touch $@

demo: $(VENV)/stamp
	$(VENV)/bin/shiplap train gpt2 --tensor-parallel 2 --sequence-parallel --tp-comm-overlap \
		--num-layers 2 --batch-size 64 --sequence-length 64 --num-iteration 300 --learning-rate 3e-3 \
		--warmup-iteration 30 --val-loss-every 100 --sample-every 300 --sample-num-tokens 300

test: $(VENV)/stamp
	scripts/check

# Every case, those too that differ from one of `make test` in numbers only; under an hour.
test-all: $(VENV)/stamp
	scripts/check -m ''

# The daily loop: under a minute.
quick: $(VENV)/stamp
	$(VENV)/bin/python -m pytest -q -m quick

check: test

format: $(VENV)/stamp
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix

clean:
	rm -rf $(VENV) build src/*.egg-info
