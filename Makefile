# `make demo` and `make test` are all a newcomer needs; both make the virtual environment first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# On Linux, PyTorch's CPU builds lie on PyTorch's own index (PyPI's build brings gigabytes of CUDA). It is asked only when no
# configured index or folder has one. With a GPU: make demo TORCH=torch==2.13.0
TORCH  ?= $(if $(filter Linux,$(shell uname)),torch==2.13.0+cpu,torch==2.13.0)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Most tests run in two processes side by side, those of one group in the same one: all that start a Ray, so that there is one
# at a time. Two teams of OpenMP threads that wait actively would take the cores from each other.
# Processes that tests start would compile our modules anew each time where containers keep Python from writing what it compiles.
TOGETHER := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE=
IN_TWO := -n 2 --dist loadgroup --durations 15

# Where `make proto` writes.
STUBS ?= sdk

.PHONY: help demo gpu-check gpu-bench test test-all test-rest test-fast test-quick test-exhaustive test-alone test-k8s test-k8s-api test-image test-clients test-tritons simulate page-browser train-smoke site bench bench-smoke check fix types imports proto proto-fresh sdk-client install clean

help:  ## List what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: install  ## An edit written twice, drafts that lie, a verifier killed in mid-answer: a minute
	@$(BIN)/python -m cli.demo

gpu-check:  ## The first checks on a GPU: ten gates, under nine minutes; PYTHON needs torch, triton and transformers only
	@$(PYTHON) -m benchmarks.gpu_check

gpu-bench: install  ## How fast a GPU is: passes, and tokens per second beside transformers and vLLM; under an hour
	@$(BIN)/python -m benchmarks.gpu_bench

test:  ## Before a commit: all that a change breaks in the ordinary way; seven minutes on two fast cores, fifteen on slow ones
	@MAKE="$(MAKE)" .ci/parts install test-quick+check+bench-smoke

test-all: page-browser test test-rest  ## Everything: `test`, then all that takes longer; about an hour

test-rest:  ## What `test` leaves out: every architecture and layout, chaos, faults, deployments, the real model on all kernels
	@MAKE="$(MAKE)" .ci/parts install test-exhaustive test-alone

test-fast: install  ## Units, the import law and the idea's exact enumerations: two minutes
	@$(TOGETHER) $(BIN)/pytest $(IN_TWO) -m "not slow and not exhaustive" tests/unit tests/architecture tests/lossless/test_enumeration.py

test-quick: install  ## The tests of `test`
	@$(TOGETHER) BIN=$(BIN) .ci/tests $(IN_TWO) -m "not exhaustive and not alone"

test-exhaustive: install page-browser
	@$(TOGETHER) BIN=$(BIN) .ci/tests $(IN_TWO) -m "exhaustive and not alone"

test-alone: install  ## Tests that want the machine to themselves: the real model
	@BIN=$(BIN) .ci/tests -m "alone and not image"

test-clients: install  ## Other people's clients in environments of their own, pinned, against a server: docs/clients.md; half an hour, gigabytes; CLIENTS="openai ai"
	@$(BIN)/python -m tests.clients $(CLIENTS)

test-tritons: install  ## Kernels for GPUs, compiled by the Tritons of a bare GPU machine and of the image, in environments of their own; ten minutes
	@for version in 3.6.0 3.7.1; do at=build/triton-$$version; where='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  test -x $$at/bin/python || $(BIN)/python -m venv $$at || exit 1; \
	  $$at/bin/pip install -q --no-deps triton==$$version || exit 1; \
	  $(BIN)/python -c "$$where" > "$$($$at/bin/python -c "$$where")/others.pth"; \
	  $$at/bin/python -m pytest tests/unit/verifier/kernels/test_triton_compiles.py || exit 1; done

simulate: install  ## The whole service on a virtual clock, 10^6 seeds by default, hours; SIMULATE="--seeds 10000 --first 1"
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.simulation $(SIMULATE)

page-browser:  ## A Chromium for the tests of the page at /, from Debian's package, as root; part of test-all
	@tests/page/install-browser || [ $$? = 75 ]

test-k8s: install  ## The chart: rendered, validated, and deployed on a Ray of several nodes; part of test-all
	@$(BIN)/pytest tests/k8s -m "not image"

test-k8s-api: install  ## Apply what the chart makes to a real API server, made from Debian's packages; ten minutes at first
	@tests/k8s/api_server/build || [ $$? = 75 ]
	@$(BIN)/pytest -rs tests/k8s/test_real_api.py

test-image: install  ## Build the image and serve in it; as root, with Debian's buildah, runc and mmdebstrap; ten minutes at first
	@$(BIN)/pytest -m image

train-smoke: install  ## Data, training, export and drafting on a tiny target: two minutes; part of test-all
	@$(BIN)/pytest tests/e2e/test_train_smoke.py

site: install  ## Build the documentation's site into build/site
	@$(BIN)/python -m typer cli.main utils docs --name outrider --title "Command line" > docs/cli.md
	@$(BIN)/zensical build --strict --clean

bench: install  ## The full table on this machine, peers that are installed included: under an hour
	@$(BIN)/outrider bench --per-task 2 --max-tokens 80 --concurrency 1,4,16 --repeats 3 \
	  --peers hf,hf_prompt_lookup,vllm,vllm_ngram,llamacpp,llamacpp_q8_0,llamacpp_f32

bench-smoke: install  ## Check the benchmark itself, not the speed: a minute
	@rm -rf build/bench-smoke && mkdir -p build
	@$(TOGETHER) $(BIN)/outrider bench --strategies auto,prompt_lookup --per-task 1 --max-tokens 8 --repeats 1 --out build/bench-smoke

check: install proto-fresh types imports  ## Style, types, import law, fresh stubs
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

fix: install  ## Format and repair what can be repaired
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

types: install  ## mypy, strict
	@$(BIN)/mypy

imports: install  ## The import law
	@$(BIN)/lint-imports --no-cache

sdk-client: install  ## Make the SDK's blocking client of its asyncio one
	@$(BIN)/python sdk/unasync.py

proto: install  ## Generate the stubs from protos/
	@$(BIN)/buf lint protos
	@$(BIN)/python -m grpc_tools.protoc -Iprotos --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --python_out=$(STUBS) --mypy_out=quiet:$(STUBS) \
	  --grpc_python_out=$(STUBS) --mypy_grpc_out=quiet:$(STUBS) $$(cd protos && find outrider -name '*.proto' | sort)

proto-fresh: install  ## Fail if the committed stubs differ from what protos/ gives
	@rm -rf build/stubs && mkdir -p build/stubs && $(MAKE) --no-print-directory -s proto STUBS=build/stubs
	@diff -r -x '__pycache__' -x '__init__.py' build/stubs/outrider/internal sdk/outrider/internal
	@diff -r -x '__pycache__' -x '__init__.py' build/stubs/outrider/v1 sdk/outrider/v1

install: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml sdk/pyproject.toml
	@echo "Installing into $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install -q "$(TORCH)" 2>/dev/null \
	  || $(BIN)/pip install -q --extra-index-url $(TORCH_INDEX) "$(TORCH)"
	@$(BIN)/pip install -q -e sdk -e '.[dev]'
	@touch $@

clean:  ## Remove what was built, the virtual environment too
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
