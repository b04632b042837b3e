# Every target sets up .venv first, from nothing if need be; the second time that costs nothing.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; \
	done || echo python3)
RUN := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help set-up demo recording demo-ray test test-unit test-long test-models test-api-servers test-v2 test-trainers test-clients mutants soak coverage check docs format ledger matrix bench-suite bench-verify bench-models bench-mutants bench-trainers bench-fetch bench-policies bench-manager bench-queue bench-routing bench-scale bench-kernels-cpu bench-access bench-faults bench-flood bench-live bench-front-ends bench-kernels-aot bench-real wheel release-check release clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

set-up: ## make .venv with an engine that this machine can run
	@$(PYTHON) tools/set_up.py

demo: set-up ## unknown model names become served adapters, on a real vllm serve
	@$(RUN) -m examples.demo

recording: set-up ## record make demo as a terminal shows it; writes docs/images/demo.svg (3 minutes)
	@.venv/bin/uv run --quiet --no-project --with pyte python -m tools.record_demo

demo-ray: set-up ## two replicas on Ray Serve, ours against Ray's routing (5 minutes)
	@$(RUN) -m benchmarks.routing.ray_serve

# Tests start hundreds of processes, and each would compile the same modules.
unexport PYTHONDONTWRITEBYTECODE

# Tests of one server, or of one file, run in one process, in the order of tests/conftest.py. Two more processes than
# cores: servers, time limits and other processes are waited for.
WORKERS ?= $(shell expr $$(nproc 2>/dev/null || echo 2) + 2)
PARALLEL := -n $(WORKERS) --maxprocesses=8 --dist loadfile --no-loadscope-reorder
# The processes are forked from one that has imported all tests.
FORKED := -p tests.forked_workers $(PARALLEL)

test: set-up ## all tests, the real engine included; what fails runs once more, alone
	@$(RUN) -m pytest -p tests.once_more $(FORKED)

test-unit: set-up ## the tests that need no engine
	@$(RUN) -m pytest $(FORKED) -m "not e2e"

test-models: set-up ## every architecture of testbed/architectures.py on the real engine (15 minutes)
	@$(RUN) -m pytest tests/models -m "nightly or not nightly"

test-long: set-up ## all tests, nightly ones too, with as many examples and repetitions as before a release
	@LONG_TESTS=1 $(RUN) -m pytest $(FORKED)

OF_API_SERVERS := access admin by_path chat damaged_and_full_stores digests in_flight push restart
API_SERVERS = 2
test-api-servers: set-up ## what must hold with several API servers too: admin, pushes, swaps, damage, restarts (API_SERVERS=4)
	@API_SERVERS=$(API_SERVERS) $(RUN) -m pytest $(OF_API_SERVERS:%=tests/e2e/test_%.py)
	@$(RUN) -m pytest tests/front_ends -m "nightly or not nightly"

ONLY =
ON_V2 := admission answers by_path digests finite_answers hostile in_flight manager mixtures pause push refusals restart
test-v2: set-up ## the end-to-end files that say most, on Model Runner V2 with asynchronous scheduling, as on CUDA (10 minutes)
	@RUNNER=v2 $(RUN) -m pytest $(PARALLEL) tests/v2_runner $(ON_V2:%=tests/e2e/test_%.py) -m "nightly or not nightly"

test-trainers: set-up ## RL frameworks' own programs, unchanged: TRL, verl, ART, SkyRL, on stock and with ours (20 minutes)
	@$(RUN) -m benchmarks.frameworks

test-clients: set-up ## programs that ask servers like OpenAI's, unchanged, for cold adapters by name (20 minutes)
	@$(RUN) -m benchmarks.clients

mutants: set-up ## mistakes in the product that its tests must catch, each in a copy of the tree (10 minutes; ONLY="its name")
	@$(RUN) -m tests.mutants $(if $(ONLY),--only "$(ONLY)")

SECONDS = 1800
SEED =
soak: set-up ## 200 adapters that change while they are asked for, on the real engine (30 minutes; SECONDS, SEED, RUNNER=v2)
	@$(RUN) -m soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(filter v2,$(RUNNER)),--v2)

coverage: set-up ## the tests that need no engine, and which lines they leave out
	@$(RUN) -m pytest $(PARALLEL) -m "not e2e" --cov=lora_plugins --cov-report=term-missing:skip-covered

check: set-up ## lint, format, types, the direction of imports, words, generated pages, the site and its links
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@.venv/bin/lint-imports
	@$(RUN) tools/write_settings_doc.py --check
	@$(RUN) tools/write_cli_doc.py --check
	@$(RUN) tools/write_support_doc.py --check
	@$(RUN) tools/check_words.py
	@$(RUN) tools/check_links.py
	@$(SITE) --quiet
	@$(RUN) tools/check_manifests.py
	@.venv/bin/hadolint examples/docker/Dockerfile*
	@$(RUN) tools/figures.py --static
	@! git log -10 --format=%s | grep -E '^.{73}' || { echo 'a subject of more than 72 characters'; exit 1; }
	@! git grep -nE '^(<{7}|>{7}) ' || { echo 'marks of an unfinished merge'; exit 1; }

# Its makers announce the end of Material for MkDocs with each build.
SITE := NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
docs: set-up ## build the site into .cache/site, without a network; `.venv/bin/mkdocs serve` shows it while you write
	@$(SITE)

format: set-up ## format the code, and write generated pages
	@$(RUN) -m ruff check --fix-only .
	@$(RUN) -m ruff format .
	@$(RUN) tools/write_settings_doc.py
	@$(RUN) tools/write_cli_doc.py
	@$(RUN) tools/write_support_doc.py

ledger: set-up ## print what we touch in vLLM, and compare it with the installed one
	@$(RUN) tools/check_ledger.py

matrix: set-up ## every deployment that runs here; writes docs/reference/deployments.md (CELLS=tensor,pipeline: only these)
	@$(RUN) -m benchmarks.deployments --cells "$(CELLS)"

bench-suite: set-up ## what make test costs, and the order in which its files begin (RUNS=10, LOAD=8)
	@$(RUN) -m benchmarks.suite $(if $(RUNS),--runs $(RUNS)) $(if $(LOAD),--load $(LOAD))

bench-verify: set-up ## what verification costs, by adapter size, and what an event loop notices of it
	@$(RUN) -m benchmarks.verify_cost
	@$(RUN) -m benchmarks.verify_cost --loop

bench-models: set-up ## adapters of every kind on each architecture of the testbed; writes docs/reference/models.md (10 minutes)
	@$(RUN) -m benchmarks.models.architectures

bench-mutants: set-up ## adapters with a fault: refused, caught, or silent (4 minutes)
	@$(RUN) -m benchmarks.models.mutants
	@$(RUN) -m benchmarks.models.architectures --page

bench-trainers: set-up ## adapters as 24 trainers write them, on stock vLLM and with our plugins (4 minutes)
	@$(RUN) -m benchmarks.models.trainers
	@$(RUN) -m benchmarks.models.architectures --page

bench-fetch: set-up ## cold fetches against others (10 minutes)
	@$(RUN) -m benchmarks.fetch

bench-policies: set-up ## eviction policies on replayed traces, against Belady's optimum
	@$(RUN) -m benchmarks.policies

bench-manager: set-up ## what running streams notice of a cold adapter, vLLM's manager against ours
	@$(RUN) -m benchmarks.manager.stall

bench-queue: set-up ## waits under overload and the cost of a step, in vLLM's scheduler alone and with ours (1 minute)
	@VLLM_PLUGINS= $(RUN) -m benchmarks.manager.queue

bench-routing: set-up ## routing policies, simulated: 100,000 adapters on 1,000 replicas (3 minutes)
	@$(RUN) -m benchmarks.routing.simulated

bench-scale: set-up ## 100,000 names and 50,000 stored adapters: what the event loop notices, start-up, fetches (5 minutes)
	@$(RUN) -m benchmarks.scale

bench-kernels-cpu: set-up ## adapters against the base model on the CPU, vLLM's kernels and ours (20 minutes)
	@$(RUN) -m benchmarks.kernels_cpu

bench-access: set-up ## whether response times reveal an adapter that a key may not use
	@$(RUN) -m benchmarks.access

bench-faults: set-up ## random faults of processes, disks, clock and sources under load; takedowns, outages (7 minutes; SEED)
	@$(RUN) -m benchmarks.faults.measure $(if $(SEED),--seed $(SEED))

bench-flood: set-up ## a hot adapter beside 1,000 unknown names a second, with ours and with vLLM alone (4 minutes)
	@$(RUN) -m benchmarks.fetch.flood

bench-live: set-up ## pushes: what one costs, what streams notice, 1,000 under load (10 minutes)
	@$(RUN) -m benchmarks.pushes

bench-front-ends: set-up ## answers per second of four API servers against one (10 minutes)
	@$(RUN) -m benchmarks.front_ends

bench-kernels-aot: set-up ## what the GPU kernels compile to, without a GPU: registers, spills, shared memory
	@$(RUN) -m benchmarks.gpu.aot

PARTS =
bench-real: set-up ## adapters on SmolLM2-135M-Instruct: speed, first tokens, swaps, 1,000 of them (20 minutes; PARTS="decode cold", QUICK=1)
	@$(RUN) -m benchmarks.real $(PARTS) $(if $(QUICK),--quick)

wheel: set-up ## build dist/*.whl with CPU kernels for x86-64 and aarch64 (needs gcc-aarch64-linux-gnu)
	@$(RUN) tools/build_wheel.py

DIST =
release-check: set-up ## all of a release that runs without its index: build, metadata, new environments, serving (8 minutes; DIST=)
	@$(RUN) -m tools.release_check $(if $(DIST),--dist $(DIST))

VERSION =
release: set-up ## write the version into the package and CHANGELOG.md, ready to commit and tag (VERSION=0.2.0)
	@$(RUN) tools/prepare_release.py $(VERSION)

clean: ## remove .venv and caches
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
