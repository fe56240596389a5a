PY ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Where it is set, a hundred modules are compiled again in every process that a test starts.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-machines test-processes oracles long-machines long-processes soak seeds fuzz \
	lint faults hosts slurm kubernetes ray preemptions integrations storage rampage bench peers claims \
	man docs figures clean install

# Most modules of torch are never imported: compiling them all takes longer than installing them.
# Those that are, are compiled here: the processes of a run would all do that at the same time.
# The build hook is for wheels; of what it makes only the kernels are needed here, if they can be made.
PIP = HATCH_BUILD_NO_HOOKS=true $(BIN)/pip install -q --no-compile -c constraints.txt
COMPILED = daemons.worker.main, daemons.script.main, daemons.attach.begin, torch._dynamo, \
	daemons.agent.serving, daemons.template.__main__, dlctl.ops.launch, dlctl.cli.commands.run

# What training needs, and then what is tested and measured with.
$(VENV)/.torch: pyproject.toml constraints.txt hatch_build.py dlctl/kernels/kernels.c
	$(PY) -m venv $(VENV)
	$(PIP) -e '.[torch]'
	$(BIN)/python hatch_build.py
	$(BIN)/python -c 'import $(COMPILED)'
	touch $@

install: $(VENV)/.installed
$(VENV)/.installed: $(VENV)/.torch
	$(PIP) --upgrade pip
	$(PIP) -e '.[torch,plot,prometheus,tensorboard]' --group dev
	touch $@

$(VENV)/.oracles: $(VENV)/.installed
	$(PIP) --group oracles
	touch $@

demo: $(VENV)/.torch
	$(BIN)/dlctl run --fresh examples/digits/job.toml

# What only computes and waits for no clock; then what starts processes, which wait for each other.
# Launchers start agents, and wait for them by the clock.
MACHINES = $(addprefix tests/,algorithms compress daemons/worker fuzz optim records roles shards sim \
	wire) $(filter-out %/test_launcher_contract.py,$(wildcard tests/contracts/test_*.py))
# Without the last option, xdist waits for ever for the tests of a worker that has crashed.
PYTEST = $(BIN)/python -m pytest --no-loadscope-reorder --max-worker-restart=0
test: test-machines test-processes
test-machines: install
	$(PYTEST) -n auto --timeout 120 $(MACHINES)
test-processes: install
	$(PYTEST) -n 4 --timeout 120 $(addprefix --ignore=,$(MACHINES)) tests

# Every method next to a loop of its paper, torch, scipy or another method, as a table: how far they
# are apart, and how far they may be.
oracles: $(VENV)/.oracles
	DLCTL_ORACLES=1 $(BIN)/python -m pytest -m oracle --timeout 300 \
		$$(grep -rl --include='test_*.py' 'pytest.mark.oracle(' tests)

# What takes too long for every commit: all of what a `long` test has some examples of in `make test`,
# rare ways to recover in the simulator, and twenty times the examples of hypothesis, other ones each
# time. Commands and daemons start as they do for users: `make test` forks them from one process.
LONG = $(PYTEST) -m "long or hypothesis" --hypothesis-profile many
long-machines: install
	$(LONG) -n auto --timeout 1300 $(MACHINES)
long-processes: install
	DLCTL_TESTS_SPAWN=1 $(LONG) -n 2 --timeout 400 $(addprefix --ignore=,$(MACHINES) tests/hosts tests/slurm) tests

SEEDS ?= 2000
FIRST ?= 0
TIME ?= 86400

# The long tests of all that only computes, and then new seeds: make soak SEEDS=100000 TIME=3600
soak: long-machines seeds
seeds: install
	$(BIN)/python tests/sim/soak.py --seeds $(SEEDS) --first $(FIRST) --time $(TIME)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The long tests of real processes, those of the benchmarks too, and then faults on such processes,
# as a table. With ONLY the table alone: make faults ONLY=worker-kill TIMES=3 SEED=7 OUT=faults.json
export ONLY TIMES SEED OUT
faults: install $(if $(ONLY),,long-processes)
	$(BIN)/python -m tests.faults

# Three hosts in network namespaces: killed daemons, a host cut off, a host lost; needs root.
hosts: install
	$(BIN)/python -m pytest -m "long or not long" --timeout 400 tests/hosts

# A real Slurm on three such hosts: killed daemons, scancel, preemption, a time limit; needs root.
slurm: install
	$(BIN)/python -m pytest -m "long or not long" --timeout 400 tests/slurm

# What `dlctl kubernetes` writes: against the published schemas of three versions, with kubectl
# (Debian's kubernetes-client), and its pods as containers on this machine; needs root.
kubernetes: .venv-kubernetes/.installed
	DLCTL_KUBERNETES=1 .venv-kubernetes/bin/python -m pytest -m "long or not long" --timeout 400 tests/kubernetes
.venv-kubernetes/.installed: pyproject.toml constraints.txt
	$(PY) -m venv $(@D)
	$(@D)/bin/pip install -q --upgrade pip
	HATCH_BUILD_NO_HOOKS=true $(@D)/bin/pip install -q --no-compile -c constraints.txt -e '.[torch]' \
		--group dev kubernetes-validate==1.37.0
	touch $@

# The example of Ray on a real cluster of three nodes on this machine, one of which is killed.
ray: .venv-ray/.installed
	DLCTL_RAY=1 .venv-ray/bin/python -m pytest -W ignore -m "long or not long" --timeout 400 tests/ray
.venv-ray/.installed: pyproject.toml constraints.txt
	$(PY) -m venv $(@D)
	$(@D)/bin/pip install -q --upgrade pip
	HATCH_BUILD_NO_HOOKS=true $(@D)/bin/pip install -q --no-compile -e '.[torch]' --group dev \
		'ray>=2.40' "$$(grep ^torch== constraints.txt)"
	touch $@

# Training loops of other packages in runs, and trackers: with the oldest versions that pyproject.toml
# allows, and with the newest.
OLDEST = transformers==4.57.1 accelerate==1.10.1 peft==0.17.1 lightning==2.5.0 wandb==0.19.11 \
	mlflow==3.9.0
integrations: .venv-oldest/.installed .venv-newest/.installed
	$(foreach venv,$(^D),DLCTL_INTEGRATIONS=1 HF_HUB_OFFLINE=1 \
		$(venv)/bin/python -m pytest -W ignore -m "long or not long" --timeout 300 tests/integrations \
		tests/hosts/test_frameworks_on_hosts.py &&) true
.venv-oldest/.installed: WITH = $(OLDEST)
.venv-newest/.installed: WITH = peft
.venv-%/.installed: pyproject.toml constraints.txt
	$(PY) -m venv $(@D)
	HATCH_BUILD_NO_HOOKS=true $(@D)/bin/pip install -q --no-compile --upgrade pip
	HATCH_BUILD_NO_HOOKS=true $(@D)/bin/pip install -q --no-compile --upgrade \
		-e '.[torch,transformers,lightning,wandb,mlflow]' --group dev $(WITH) "$$(grep ^torch== constraints.txt)"
	$(@D)/bin/python -c 'import $(COMPILED), lightning.pytorch, transformers.trainer, peft, mlflow.server, wandb'
	touch $@

# Checkpoints in object storage: two S3 servers, moto's and s3rver, and a store that fails. Needs npm.
storage: .venv-storage/.installed
	DLCTL_STORAGE=1 DLCTL_S3RVER=.venv-storage/node_modules/.bin/s3rver \
		.venv-storage/bin/python -m pytest -W ignore -m "long or not long" --timeout 900 \
		tests/storage tests/contracts/test_checkpoint_stores.py
.venv-storage/.installed: pyproject.toml constraints.txt
	$(PY) -m venv $(@D)
	HATCH_BUILD_NO_HOOKS=true $(@D)/bin/pip install -q --no-compile --upgrade pip
	HATCH_BUILD_NO_HOOKS=true $(@D)/bin/pip install -q --no-compile -e '.[torch,s3,gs]' --group dev \
		--group storage "$$(grep ^torch== constraints.txt)" "$$(grep ^fsspec== constraints.txt)"
	npm install --silent --no-save --prefix $(@D) s3rver@3.7.1
	touch $@

# Ten preemptions in one run on a real Slurm, and the page about them; 15 minutes, needs root.
preemptions: install
	$(BIN)/python -m benchmarks.preemptions
	$(BIN)/python docs/preemptions.py

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
	$(BIN)/python -m pytest -m "long or not long" tests/benchmarks/test_benchmarks.py

# What papers claim: the outcomes, from the records in benchmarks/results, and the page of the
# documents. Claims without a record run, and so does ONLY=NAME: about a minute each.
claims: install
	$(BIN)/python -m benchmarks.claims $(ONLY)

# What is generated of man and docs/methods: commands, keys, methods.
man: install
	$(BIN)/python docs/reference.py

# The documents as a site in build/site, and as man pages in build/man; a warning is an error.
docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	.venv-docs/bin/python docs/manpages.py build/man

# The figure of each method, from simulated runs: minutes.
figures: .venv-docs/.installed
	.venv-docs/bin/python docs/figures.py

.venv-docs/.installed: pyproject.toml
	$(PY) -m venv .venv-docs
	.venv-docs/bin/pip install -q --upgrade -c constraints.txt pip
	.venv-docs/bin/pip install -q -c constraints.txt -e . --group docs
	touch $@

clean:
	rm -rf $(VENV) .venv-docs .venv-oldest .venv-newest .venv-storage .venv-kubernetes .venv-ray runs examples/*/runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
