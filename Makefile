# The two commands of the README are `make run` and `make test`; both install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: install run run-check test check bench soak clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --quiet \
		--constraint constraints.txt --editable '.[torch,serve,report,hf,demo,data,sinks,peers,dev]'
	touch $(READY)

# Plan, tune, export, serve and report a real Gemma 3 270M on two local processes.
run: install
	$(BIN)/phalanx run examples/gemma3-270m.toml

# The same with the report's gates: exit 1 when one is missed.
run-check: install
	$(BIN)/phalanx run examples/gemma3-270m.toml --check

# Tests of processes have the cores for themselves; the others share them.
PYTEST := $(BIN)/python -m pytest -q
FAST := $(PYTEST) -n 2 --dist loadfile -m "not slow and not dist and not demo" --timeout 120

test: install
	$(FAST)
	$(PYTEST) -m "not slow and (dist or demo)"

# Style, types, import rules and the tests that need no process: under three minutes.
check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(FAST)

bench: install
	mkdir -p runs/bench
	for name in core reshard scheduler padding decode planner simulator pipeline context; do $(BIN)/python benchmarks/$$name.py --json runs/bench/$$name.json || exit 1; done

soak: install
	HYPOTHESIS_PROFILE=search $(PYTEST) -m "not slow and not dist and not demo"
	$(PYTEST) -m slow

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
