# Everything a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# No look-ups on the hub (each hangs for half a minute without a network), no threads beyond the cores, and modules are compiled
# once, not by each of the hundreds of processes that tests start.
QUICK := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
LINTED := rlhf_core flows tasks deployments tests benchmarks examples
MUTATIONS := tests/rlhf_core/recipe/test_recipe_property.py tests/rlhf_core/preflight/test_model_folder_property.py \
	tests/rlhf_core/data/test_mutated_data.py

# KIT is a folder that `make kit` has filled: set-up takes all packages from it. The GPU checks run in PYTHON with its packages, and
# need no .venv.
CHECKS_PYTHON = $(if $(KIT),PYTHONPATH=$(KIT)/site $(PYTHON),$(BIN)/python)

# The extra `docs` of pyproject.toml.
DOCS_PACKAGES = $$(sed -n 's/^docs = \[\(.*\)\].*/\1/p' pyproject.toml | tr -d '"')

PYTEST := $(QUICK) $(BIN)/python -m pytest

.PHONY: help setup dist pages pictures docs demo unit test test-all endurance durations two-nodes slurm chaos kills orchestrators mutations mutants rl-matrix kit kit-site gpu-checks check fast format lint types up status down

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

setup:  ## make .venv with the tested versions; nothing to do when it is there; KIT=FOLDER where there is no network
	@$(PYTHON) -m deployments.setup $(KIT)

demo: setup  ## start the local stack and run the recipe `tiny` to its report
	@$(BIN)/alignment up
	@$(BIN)/alignment run tiny

unit: setup  ## pure functions and configuration: the tests of a commit
	@$(PYTEST) -q -n 2 -m unit --durations=0

test: setup  ## the tests of a push: unit, parts, system
	@$(PYTEST) -n 2 -m "not endurance"

test-all: setup  ## all tests, those of a night included
	@$(PYTEST) -n 2

endurance: setup  ## PART=chaos, two-nodes, rl-matrix, mutations, architectures or benchmarks: a part of the tests of a night
	@$(PYTEST) -n 2 -m endurance $(if $(PART),--part=$(PART))

durations: setup  ## refresh tests/durations.json, by which tests are ordered, from a run of all
	@$(PYTEST) -n 2 --store-durations

two-nodes: setup  ## RL on two Ray nodes that share no file system, killed and resumed; needs Linux and root
	@$(QUICK) $(BIN)/python -m tests.two_nodes

slurm: setup  ## a recipe on a Slurm of two nodes that reaches its time limit and resumes; needs slurm-wlm, munge, Linux and root
	@$(QUICK) $(BIN)/python -m tests.slurm

chaos: setup  ## every part of a run is killed once, as in the tests, and a loop has twenty rounds; CHAOS_ROUNDS=50
	@CHAOS_ROUNDS=$(or $(CHAOS_ROUNDS),20) $(QUICK) $(BIN)/python -m pytest -q tests/chaos

kills: setup  ## any part of a graph, a loop and an agent is killed or frozen at random moments; KILLS=100 SEED=0
	@$(QUICK) $(BIN)/python -m tests.kills --kills $(or $(KILLS),100) --seed $(or $(SEED),0)

orchestrators: setup  ## two orchestrators run one recipe at the same time, a hundred times; ROUNDS=100 SEED=0
	@$(QUICK) $(BIN)/python -m tests.kills.orchestrators --rounds $(or $(ROUNDS),100) --seed $(or $(SEED),0)

mutations: setup  ## mutated recipes, rows and model folders through what `alignment plan` does; ALIGNMENT_EXAMPLES=5000
	@ALIGNMENT_EXAMPLES=$(or $(ALIGNMENT_EXAMPLES),3000) $(QUICK) $(BIN)/python -m pytest -q -n 2 $(MUTATIONS)

mutants: setup  ## faults that the tests must find, planted one at a time; MUTANTS="kl-sign gate-open" for some
	@$(QUICK) $(BIN)/python -m tests.mutants $(MUTANTS)

rl-matrix: setup  ## RL on 2 ranks and 2 engines in all 25 combinations, killed and resumed; about an hour
	@$(QUICK) $(BIN)/python -m tests.rl_matrix

kit:  ## wheels for a machine without a network; FOR=cpu, gpu or gpu-checks, PYTHON=3.12 WITHOUT=torch,transformers PART_MB=60 KIT=kit
	@test -x $(BIN)/python || { echo "kit: run make setup first" >&2; exit 1; }
	@$(BIN)/python -m deployments.kit $(if $(filter-out file,$(origin PYTHON)),--python '$(PYTHON)') $(if $(FOR),--for '$(FOR)') \
		$(if $(WITHOUT),--without '$(WITHOUT)') $(if $(PART_MB),--part-mb '$(PART_MB)') '$(or $(KIT),kit)'

gpu-checks: $(if $(KIT),kit-site,setup)  ## what one GPU computes, against float64; KIT=FOLDER where there is no network
	@HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(CHECKS_PYTHON) -m pytest -q --tb=short --show-capture=no -p no:cacheprovider \
		--confcutdir=tests/gpu --durations=5 tests/gpu

kit-site:
	@wheels=$$($(PYTHON) -m deployments.kit_folder $(KIT) $(KIT)/joined) && \
		$(PYTHON) -m pip install -q --no-index --no-deps --no-compile --upgrade --target $(KIT)/site $$wheels

dist: setup  ## build the source distribution, and from it the wheel, into dist/
	@rm -rf dist && mkdir dist
	@$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')" > dist/build.log
	@$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist dist/*.tar.gz && rm dist/build.log && ls dist

pages: setup  ## write the generated pages of docs/reference again: settings, commands, Python API, licences, measurements
	@$(BIN)/python -m rlhf_core.recipe.settings_page docs/reference/settings
	@for page in commands api licences; do $(BIN)/python -m deployments.pages.$$page docs/reference/$$page.md || exit 1; done
	@$(BIN)/python -m benchmarks.report

docs:  ## build the documentation's site into build/site, strictly; its packages come into .venv-docs
	@test -x .venv-docs/bin/mkdocs || { $(PYTHON) -m venv .venv-docs && .venv-docs/bin/python -m pip install -q $(DOCS_PACKAGES); }
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build -q --strict

pictures: setup  ## the pictures of the documentation, of the newest run of `tiny` on the local stack; needs chromium
	@$(BIN)/python -m tests.pictures

check: lint types unit  ## what the pre-commit hook runs: format, lint, types, unit tests

format: setup  ## format the code
	@$(BIN)/ruff format $(wildcard $(LINTED))
	@$(BIN)/ruff check --fix $(wildcard $(LINTED))

lint: setup
	@$(BIN)/ruff format --check $(wildcard $(LINTED))
	@$(BIN)/ruff check $(wildcard $(LINTED))

types: setup
	@$(BIN)/mypy

up: setup  ## start the local stack
	@$(BIN)/alignment up

status: setup  ## show the local stack
	@$(BIN)/alignment status

down: setup  ## stop the local stack
	@$(BIN)/alignment down
