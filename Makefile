# make demo: everything in one go.   make quick: the checks that take a minute.   make test: lint and all tests.
# make help: all targets.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help install dev demo quick slow test test-long unit lint docs locks sbom wheel reference mutants peers soak soak-openmpi slurm test-arm soak-arm test-openmpi test-browser test-torch17 test-torch110 test-matrix clean

PYTHON ?= $(shell env/find_python.sh 3.11 3.12 3.13 || echo python3)
# On Arm, wheels of newer PyTorch than 2.10 bring CUDA packages.
PINS   ?= env/$(if $(filter aarch64,$(shell uname -m)),aarch64-torch-2.10,torch-2.13).txt
## PIP_ARGS: options of pip, such as an index with CPU builds of PyTorch
PIP_ARGS ?=
## UNCHECKED: packages that are installed without a check of their hashes, such as torch from an index of other builds; or all
UNCHECKED ?=
export UNCHECKED
VENV := .venv
## MPI: system uses the MPI on PATH instead of one from a wheel; the environment stays so until MPI=wheel
MPI ?= $(if $(wildcard $(VENV)/.installed-system),system,wheel)
$(if $(filter wheel system,$(MPI)),,$(error MPI=$(MPI): valid are MPI=wheel and MPI=system))

# Modules are compiled once, not by each of the hundreds of processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

BIN  := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(MPI)
DEV       := $(VENV)/.dev
DOCS_VENV := .venv-docs
# the sources of the kernels of each environment, and the modules that compile them and measure products
KERNELS   := fugaku_gpt/kernels/build.py fugaku_gpt/kernels/product_verdicts.py fugaku_gpt/ops/product_timing.py \
             $(wildcard fugaku_gpt/kernels/source/*)
# The only way to create an environment, here and in `fugaku-gpt env create`.
MAKE_ENVIRONMENT = MPI=$(MPI) env/make_environment.sh

help: ## list the targets and variables
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile
	@echo "variables, as in make test TESTS=tests/planner:"
	@awk -F '## |: ' '/^## [A-Z_]+: / { name = $$2; sub(/^## [A-Z_]+: /, ""); printf "  %-20s %s\n", name, $$0 }' Makefile

install: $(INSTALLED) ## create .venv with the pinned PyTorch, an MPI and the command fugaku-gpt

$(INSTALLED): setup.py setup.cfg pyproject.toml $(PINS) $(wildcard $(PINS:.txt=*.lock)) $(KERNELS)
	@echo "installing into $(VENV) with $(PYTHON): $$(grep -m1 ^torch $(PINS)), MPI: $(MPI)"
	@$(MAKE_ENVIRONMENT) $(PYTHON) $(VENV) $(PINS) $(MPI) --quiet $(PIP_ARGS)

dev: $(DEV) ## install, with the tools of tests and lint
$(DEV): $(INSTALLED) env/tests.lock env/dev.lock env/mutants.lock
	@env/install_locked.sh $(BIN)/python env/tests.lock:env/dev.lock:env/mutants.lock --quiet $(PIP_ARGS)
	@touch $@

demo: install ## train four layouts of a small GPT and a Llama on the standard library, print the table and a line
	@$(BIN)/fugaku-gpt data prepare --stdlib --vocab-size 2048 --limit-mib 12 --out runs/demo-data
	@$(BIN)/fugaku-gpt sweep run benchmarks/sweeps/demo.yaml --out runs/demo --scheduler local
	@echo "a line of Python that the Llama continues:"
	@line=$$(printf '\n_'); printf '    if'; $(BIN)/fugaku-gpt generate runs/demo/llama-r1 --threads 1 --prompt '    if' \
	  --max-tokens 24 --stop "$${line%_}"

## TESTS: a part of the suite: paths and options of pytest, such as "tests -k 'recompute and not mpi'"
TESTS ?=
## WORKERS: processes that run tests (4, since many wait for ranks or for a queue)
WORKERS ?= 4
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal
quick: WORKERS = $(shell nproc) # its tests wait for nothing

quick: dev ## run lint without types, and tests without ranks, PyTorch or long programs: a minute on two cores
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(PYTEST) -m "not slow and not torch" $(or $(TESTS),tests)

test: $(if $(TESTS),,lint) unit ## run lint and all tests but long ones, with 1, 2, 4 and 8 MPI ranks; TESTS="PATHS -k WORDS": these

unit: dev
	@$(PYTEST) $(or $(TESTS),-m "not long" tests)

test-long: dev ## run the tests that `make test` leaves out
	@$(PYTEST) -m "long" $(or $(TESTS),tests --ignore tests/test_smollm2.py)
	@$(if $(TESTS),,$(BIN)/python -m pytest -q -rs -m "long" tests/test_smollm2.py) # alone: it takes most of the memory

slow: dev ## list the tests that `make quick` leaves out
	@$(BIN)/python -m pytest -q --collect-only -m "slow or torch" $(or $(TESTS),tests)

lint: dev ## run ruff, mypy and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy fugaku_gpt
	@$(BIN)/lint-imports

docs: $(DOCS_VENV)/.installed ## build the documentation as a static site in build/docs, and check its links
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet
	@echo "build/docs/index.html"

$(DOCS_VENV)/.installed: env/docs.lock
	@$(PYTHON) -m venv $(DOCS_VENV)
	@env/install_locked.sh $(DOCS_VENV)/bin/python env/docs.lock --quiet $(PIP_ARGS)
	@touch $@

locks: dev ## resolve the pins of env/ anew, and write their locks: all packages with their hashes
	@PYTHONPATH=. $(BIN)/python -m env.make_locks

wheel: dev ## build the wheel of the package into dist/: the same bytes for the same commit
	@PYTHONPATH=. $(BIN)/python -m env.make_wheel dist

sbom: install ## write the bill of materials of .venv, CycloneDX from its lock: build/sbom.cdx.json
	@PYTHONPATH=. $(BIN)/python -m env.make_sbom $(PINS:.txt=.lock) build/sbom.cdx.json

reference: install ## generate docs/reference/ from the code
	@PYTHONPATH=. $(BIN)/python -m docs.generate_reference

slurm: ## install Debian's Slurm, for the tests against a real one (needs root)
	@env/install_packages.sh "real Slurm" "munged slurmctld slurmd" "slurmctld slurmd slurm-client munge"

## MUTANTS: options of `make mutants`, such as "--mutants 40 --seed 7 --only planner/search"
mutants: dev ## try the tests: change operators and constants of rooms of plain data, and count what no test notices
	@PYTHONPATH=. $(BIN)/python -m tests.mutants --map build/mutants/map.json $(MUTANTS)

soak: dev ## run 500 random layouts on 1 to 8 ranks with random delays: does any hang, or draw another curve?
	@for seed in 1 2 3 4 5; do for part in 1:4 2:8 3:12 4:14 5:8 6:18 7:8 8:28; do \
	  OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.mpi.start $${part%:*} \
	  -m tests.mpi.soak --layouts $${part#*:} --seed $$seed || exit 1; done; done
	@echo "checkpoints of 8 layouts, each into each:"
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.mpi.start 8 -m tests.mpi.reshard
	@echo "a run that is killed 100 times:"
	@PYTHONPATH=. $(BIN)/python -m tests.kills --kills 100
	@echo "writers of a store of runs that are killed 1,000 times, while others read it:"
	@folder=$$(mktemp -d) && PYTHONPATH=. $(BIN)/python -m tests.jobs.store_kills $$folder/runs 1000 7; rm -rf $$folder
	@echo "calls to the file system that fail, one by one: does each command end, and name it?"
	@for scenario in train job sweep compare; do \
	  OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.disk_faults.run $$scenario --workers 4 || exit 1; done
	@echo "every reader of files, with odd files, and fuzzed for 10 minutes each:"
	@env/install_locked.sh $(BIN)/python env/fuzz.lock --quiet $(PIP_ARGS) || \
	  echo "=== atheris cannot be installed here ==="
	@PYTHONPATH=. $(BIN)/python -m tests.fuzz --seed $$(date +%s)
	@PYTHONPATH=. $(BIN)/python -m tests.fuzz --guided --seconds 600 --seed $$(date +%s)
	@echo "ranks that leave the common path, stop or die: does the doctor name them?"
	@PYTHONPATH=. $(BIN)/python -m tests.mpi.hangs
	@echo "healthy runs that are killed from outside: does the doctor accuse nobody?"
	@PYTHONPATH=. $(BIN)/python -m tests.mpi.outside_kills

# Trainers of others beside ours in benchmarks, with the same PyTorch. DeepSpeed comes as sources.
PEERS := .venv-peers
peers: $(PEERS)/.peers ## create .venv-peers with the trainers of others that benchmarks/step.py and peers.py measure
$(PEERS)/.peers: $(PEERS)/.installed-peers env/peers.lock
	@DS_ACCELERATOR=cpu env/install_locked.sh $(PEERS)/bin/python env/peers.lock --quiet --no-build-isolation $(PIP_ARGS)
	@touch $@
$(PEERS)/.installed-peers: override MPI := wheel
$(PEERS)/.installed-peers: setup.py setup.cfg pyproject.toml $(PINS) $(wildcard $(PINS:.txt=*.lock)) $(KERNELS)
	@echo "installing into $(PEERS) with $(PYTHON)"
	@$(MAKE_ENVIRONMENT) $(PYTHON) $(PEERS) $(PINS) peers --quiet $(PIP_ARGS)

# Executors for other tools, each in an environment of its own, since their hosts pin other versions.
test-integrations: ## run the tests of integrations/ with Snakemake and PSI/J, on a simulated PJM
	@$(MAKE) --no-print-directory integration HOST=snakemake DISTRIBUTION=snakemake-executor-plugin-pjm
	@$(MAKE) --no-print-directory integration HOST=psij DISTRIBUTION=psij-pjm

.PHONY: integration
integration:
	@python=$$(env/find_python.sh 3.11 3.12 3.13) || { \
	  echo "=== SKIPPED: tests of $(DISTRIBUTION): no Python 3.11 or later on PATH or in pyenv ==="; exit 0; }; \
	env/make_integration.sh $$python .venv-$(HOST) env/$(HOST).lock $(DISTRIBUTION) --quiet $(PIP_ARGS); code=$$?; \
	if [ $$code = 3 ]; then echo "=== SKIPPED: tests of $(DISTRIBUTION): its packages cannot be had here ==="; exit 0; fi; \
	test $$code = 0 && echo "=== tests of $(DISTRIBUTION) ===" && \
	.venv-$(HOST)/bin/python -m pytest -q -p no:cacheprovider -n $(WORKERS) --dist worksteal \
	  $(or $(TESTS),integrations/$(DISTRIBUTION)/tests)

# Pages in the Chromium of the system, which Playwright drives from an environment of its own.
test-browser: ## run the tests of pages in a real headless Chromium (root installs it)
	@env/install_packages.sh Chromium chromium chromium
	@command -v chromium > /dev/null || { echo "=== SKIPPED: tests of pages: no chromium on PATH ==="; exit 0; }; \
	python=$$(env/find_python.sh 3.11 3.12 3.13) || { \
	  echo "=== SKIPPED: tests of pages: no Python 3.11 or later on PATH or in pyenv ==="; exit 0; }; \
	env/make_integration.sh $$python .venv-browser env/browser.lock "" --quiet $(PIP_ARGS); code=$$?; \
	if [ $$code = 3 ]; then echo "=== SKIPPED: tests of pages: Playwright cannot be had here ==="; exit 0; fi; \
	test $$code = 0 && echo "=== tests of pages in $$(chromium --version 2> /dev/null) ===" && \
	.venv-browser/bin/python -m pytest -q -p no:cacheprovider $(or $(TESTS),tests/browser)

# Training and parity on older builds. They need Python 3.8; where there is none, a message says so.
OLD_TESTS := $(wildcard $(addprefix tests/,comm compat data kernels/test_attention_tiling.py kernels/test_matmul_tiling.py kernels/test_trials.py layout model ops parallel training matrix test_mpi.py))
test-torch17: ## run the training and parity tests on PyTorch 1.7.1
	@$(MAKE) --no-print-directory old BUILD=1.7 OLD=.venv-torch17
test-torch110: ## run the training and parity tests on PyTorch 1.10.2
	@$(MAKE) --no-print-directory old BUILD=1.10 OLD=.venv-torch110

# The emulated machine: A64FX processors by qemu, in a folder that is made once.
AARCH64 := .aarch64
test-arm: ARM_TESTS := -m "not soak"
test-arm: arm ## run kernels, commands and training on an emulated Arm machine
soak-arm: arm ## run these, count the cycles of every kernel on A64FX, and resolve the pins for Arm

.PHONY: arm
arm: dev
	@PYTHON=$(BIN)/python PIP_ARGS="$(PIP_ARGS)" env/make_aarch64.sh $(AARCH64) || [ $$? = 3 ]
	@test ! -x $(AARCH64)/bin/python || \
	  FUGAKU_GPT_AARCH64=$(AARCH64) $(BIN)/python -m pytest -q -n 2 --dist worksteal $(ARM_TESTS) $(or $(TESTS),tests/aarch64)

# Open MPI 4, on which Fujitsu's MPI is built. As on Fugaku, mpi4py is compiled by its mpicc; without optimisation, which
# takes many times as long.
OPENMPI := .venv-openmpi
OPENMPI_TESTS = tests/comm tests/launch tests/simulator/test_mpiexec.py tests/doctor/test_machine.py \
  tests/cli/test_train.py
test-openmpi: ## run tests of ranks on Debian's Open MPI 4.1 (root installs it), with parity on 2 ranks
	@$(MAKE) --no-print-directory openmpi $(if $(TESTS),,TESTS="$(OPENMPI_TESTS)" PARITY_RANKS=2)
soak-openmpi: ## run every test that starts ranks on Debian's Open MPI 4.1, with parity on 1, 2, 4 and 8 ranks
	@$(MAKE) --no-print-directory openmpi $(if $(TESTS),,TESTS="tests -m mpi")

.PHONY: openmpi
openmpi:
	@env/install_packages.sh "Open MPI" "mpirun mpicc" "openmpi-bin libopenmpi-dev"
	@mpirun --version 2>&1 | grep -q "(Open MPI)" || { \
	  echo "=== SKIPPED: tests on Open MPI: no mpirun of Open MPI is the first on PATH ==="; exit 0; }; \
	$(MAKE) -s --no-print-directory $(OPENMPI)/.tools && \
	echo "=== tests on $$(mpirun --version | head -n 1), mpi4py compiled ===" && \
	$(OPENMPI)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal $(TESTS) $(if $(PARITY_RANKS),&& \
	OMP_NUM_THREADS=1 PYTHONPATH=. $(OPENMPI)/bin/python -m tests.mpi.start $(PARITY_RANKS) -m tests.mpi.run)

$(OPENMPI)/.tools: $(OPENMPI)/.installed-openmpi env/tests.lock
	@env/install_locked.sh $(OPENMPI)/bin/python env/tests.lock --quiet $(PIP_ARGS)
	@touch $@
$(OPENMPI)/.installed-openmpi: override MPI := system
$(OPENMPI)/.installed-openmpi: setup.py setup.cfg pyproject.toml $(PINS) $(wildcard $(PINS:.txt=*.lock)) $(KERNELS)
	@echo "installing into $(OPENMPI) with $(PYTHON), for $$(mpirun --version | head -n 1)"
	@MPI4PY=source CFLAGS=-O0 $(MAKE_ENVIRONMENT) $(PYTHON) $(OPENMPI) $(PINS) openmpi --quiet $(PIP_ARGS)

test-matrix: dev ## run those tests on every build that installs here, read the checkpoints of each in each, and print a table
	@$(MAKE) --no-print-directory old BUILD=1.7 OLD=.venv-torch17 OLD_TESTS=
	@$(MAKE) --no-print-directory old BUILD=1.10 OLD=.venv-torch110 OLD_TESTS=
	@PYTHONPATH=. $(BIN)/python -m tests.matrix.run $(OLD_TESTS) checkpoints

.PHONY: old
old:
	@python=$$(env/find_python.sh 3.8) || { \
	  echo "=== SKIPPED: tests on PyTorch $(BUILD): no Python 3.8 on PATH or in pyenv ==="; exit 0; }; \
	$(MAKE) --no-print-directory PYTHON=$$python $(OLD)/.installed-$(BUILD) && { test -z "$(OLD_TESTS)" || \
	{ echo "=== tests on PyTorch $(BUILD) ===" && \
	$(OLD)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not long" $(OLD_TESTS); }; }

$(OLD)/.installed-$(BUILD): override MPI := wheel
$(OLD)/.installed-$(BUILD): setup.py setup.cfg pyproject.toml $(wildcard env/torch-$(BUILD).*) $(KERNELS)
	@echo "installing PyTorch $(BUILD) into $(OLD) with $(PYTHON)"
	@$(MAKE_ENVIRONMENT) $(PYTHON) $(OLD) env/torch-$(BUILD).txt $(BUILD) --quiet $(PIP_ARGS)

clean: ## remove environments and demo output
	rm -rf $(VENV) $(DOCS_VENV) $(AARCH64) $(OPENMPI) .venv-snakemake .venv-psij .venv-browser .venv-peers .venv-torch17 .venv-torch110 .venv-torch113 build/docs build/sbom.cdx.json dist runs/demo runs/demo-data *.egg-info
