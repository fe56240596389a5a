PY ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Where it is set, a hundred modules are compiled again in every process that a test starts.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-machines test-processes soak fuzz lint faults hosts slurm rampage bench peers man clean install

# Most modules of torch are never imported: compiling them all takes longer than installing them.
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PY) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade -c constraints.txt pip
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[torch,examples]' --group dev
	touch $@

demo: install
	$(BIN)/dlctl run --fresh examples/digits/job.toml

# What only computes, and waits for no clock, takes the time that is left over by the processes that
# all others start and wait for. Four seconds of theirs can take two minutes then, so only a machine
# that never ends is to find the end of its time.
MACHINES = $(addprefix tests/,algorithms compress contracts fuzz models optim roles shards sim wire)
PYTEST = $(BIN)/python -m pytest --no-loadscope-reorder
test: install
	$(MAKE) --no-print-directory -j 2 --output-sync=target test-machines test-processes
test-machines:
	nice -n 19 $(PYTEST) -n auto --timeout 600 $(MACHINES)
test-processes:
	$(PYTEST) -n 4 $(addprefix --ignore=,$(MACHINES)) tests

SEEDS ?= 100000
FIRST ?= 0
TIME ?= 86400

soak: install
	$(BIN)/python tests/sim/soak.py --seeds $(SEEDS) --first $(FIRST) --time $(TIME)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Faults on real processes, as a table: make faults ONLY=worker-kill TIMES=3 SEED=7 OUT=faults.json
export ONLY TIMES SEED OUT
faults: install
	$(BIN)/python -m tests.faults

# Three hosts in network namespaces: killed daemons, a host cut off, a host lost; needs root. And
# what else takes long on real processes.
hosts: install
	$(BIN)/python -m pytest -m "long or not long" tests/hosts tests/integ/test_new_keys.py \
		tests/integ/test_surroundings.py tests/models/test_first_calls.py \
		tests/sim/test_rotation.py

# A real Slurm on three such hosts: killed daemons, scancel, preemption, a time limit; needs root.
slurm: install
	$(BIN)/python -m pytest -m "long or not long" tests/slurm

# The digits example while somebody kills its daemons.
rampage: install
	$(BIN)/python -m tests.faults.rampage

# New inputs for all that reads what comes from outside: make fuzz TIME=600 ONLY=wire,logs SEED=7
fuzz: TIME = 60
fuzz: install
	$(BIN)/python -m tests.fuzz --time $(TIME) --only "$(ONLY)" $(if $(SEED),--seed $(SEED))

bench: install
	$(BIN)/python -m benchmarks

# Every peer of the benchmarks that is installed trains for a moment.
peers: install
	$(BIN)/python -m pytest -m "long or not long" tests/test_benchmarks.py

man: install
	$(BIN)/python -m dlctl.cli.manpages

clean:
	rm -rf $(VENV) runs examples/*/runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
