# Every path here is relative, so that the project may lie anywhere, spaces included.
# Half of the time of an import is its compilation, which tests would repeat in each process.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env bench-env demo down check audit dist test-fast test test-long test-fuzz test-install test-parity test-faults test-infra test-serving gpu-acceptance clean

help:
	@echo "make env    the virtual environment .venv, from requirements.lock"
	@echo "make bench-env  .venv-bench, with the packages that benchmarks and one test compare Penstock with"
	@echo "make demo   start the platform, run the whole pipeline once and show the result"
	@echo "make down   stop the platform"
	@echo "make check  lint, formatting, types, import contract, names"
	@echo "make audit  known vulnerabilities of the packages in requirements.lock, according to OSV"
	@echo "make dist   Penstock as a wheel, in dist/, for projects that \`penstock init\` made"
	@echo "make test-fast  the tests that need no service and little time: two of three, in a minute and a half"
	@echo "make test   the tests, but those below"
	@echo "make test-long  the tests that take half a minute or more each, in a quarter of an hour"
	@echo "make test-fuzz  10,000 spoiled files and answers for all that reads them, in some minutes"
	@echo "make test-install  Penstock as a wheel: a team's project with a platform of its own, each extra alone"
	@echo "make test-parity  check that many processes train the same model as a single one"
	@echo "make test-faults  kills, full disks and outages on a real platform; ROW=row_04 runs one of them"
	@echo "make test-infra  real images, Compose, Slurm, Kubernetes and object stores; as root on Debian; PART=slurm runs one"
	@echo "make test-serving  what was registered, in the real servers: vLLM, Triton, llama.cpp and others; PART=vllm runs one"
	@echo "make gpu-acceptance  what must hold on an NVIDIA GPU, in 9 minutes: docs/training.md; PYTHON=python3, PART=losses"
	@echo "make clean  stop the platform; remove .venv and caches, but not .penstock"

env:
	@bash infra/bootstrap.sh

bench-env:
	@bash infra/bootstrap.sh bench

demo:
	@bash infra/bootstrap.sh user
	@.venv/bin/penstock up
	@.venv/bin/penstock run

down:
	@.venv/bin/penstock down

check: env
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/pytest -q tests/architecture/test_names.py

audit: env
	@eval "$$(.venv/bin/python infra/pip_settings.py)" && .venv/bin/python infra/package_audit.py requirements.lock

dist: env
	@eval "$$(.venv/bin/python infra/pip_settings.py)" && .venv/bin/uv build --quiet --wheel --out-dir dist

# Tests that start a service or train for long stand in tests/slow_tests.txt.
test-fast: env
	OMP_NUM_THREADS=1 .venv/bin/pytest -n 2 -q tests/unit tests/architecture @tests/slow_tests.txt

# Those that need what is slow to raise, the platform's first, as they take longest.
SHARED = tests/e2e tests/platform tests/faults tests/distributed tests/integration tests/infra
# One of three processes has the platform, whose tests wait for much; the others fill two cores.
test: env bench-env
	OMP_NUM_THREADS=1 .venv/bin/pytest -n 3 --no-loadscope-reorder $(SHARED) tests/architecture tests/golden tests/unit

# Half a minute or more each, all cases of a test together.
test-long: env bench-env
	OMP_NUM_THREADS=1 .venv/bin/pytest -n 3 --no-loadscope-reorder -m "long and not parity" $(SHARED) tests/unit

test-fuzz: env
	OMP_NUM_THREADS=1 .venv/bin/pytest -n 2 -q -m fuzz tests/unit/fuzz

# Installs hundreds of packages several times and starts a second platform.
test-install: env
	.venv/bin/pytest -n 2 tests/install

# Processes of a case wait for each other: one case leaves a part of two cores idle.
test-parity: env
	OMP_NUM_THREADS=1 .venv/bin/pytest -n 2 --no-loadscope-reorder -m parity $(SHARED) tests/unit

# Some two minutes a row. Each is a command of its own: make test-faults ROW=row_04
ROW =
test-faults: env
	.venv/bin/pytest -m faults $(SHARED) tests/install -k "$(ROW)"

# Installs Debian's packages, builds what Debian only has as source and keeps that in
# $$PENSTOCK_INFRA_CACHE. What can't run here is skipped with its reason.
PART =
test-infra: env
	@bash tests/infra/install.sh
	.venv/bin/pytest -n 2 -m infra tests/infra -k "$(PART)"

# Installs each server into an environment of its own, in $$PENSTOCK_SERVING_CACHE. What can't be
# installed here is skipped with its reason.
test-serving: env
	@bash tests/serving/install.sh
	OMP_NUM_THREADS=1 .venv/bin/pytest -n 2 -m serving tests/serving -k "$(PART)"

# Needs no .venv: a bare machine has a Python of its own. Goes on from what an earlier run finished.
PYTHON = .venv/bin/python
gpu-acceptance:
	$(PYTHON) -m tests.gpu_acceptance $(PART)

clean:
	@if [ -x .venv/bin/penstock ]; then .venv/bin/penstock down; fi
	rm -rf .venv .venv-bench .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
