# `make image` and `make test` do all the set-up themselves; `make help` lists the rest.
MATRIX ?= cu130-next
PYTHON ?= python3
BOOTSTRAP := $(PYTHON) builder/bootstrap.py
BIN := .venv/bin

.PHONY: loads help image test lint types unit processes index images push pull bake standin doctor gpu gpu-prepare gpu-kernels gpu-kernels-prepare gpu-container gpu-container-prepare engine engine-stop tools venv bench requirements schemas clean clean-tools

help:
	@echo "make image [MATRIX=cu130-next]   build, prove and tag the image of a matrix"
	@echo "make test                        linters, types, unit, index and image tests"
	@echo "make lint types unit processes index images   one part of them"
	@echo "make engine | engine-stop        use the running Docker Engine or set one up in .tools | stop ours"
	@echo "make tools                       what the tests need, from the distribution's archive into .tools"
	@echo "make push [MATRIX=] TO=REGISTRY/NAME [KEY=cosign.key]   the image into a registry, signed: docs/registry.md"
	@echo "make pull [MATRIX=] FROM=REGISTRY/NAME [HOSTS='ssh://gpu1 local'] [PUB=cosign.pub]   onto hosts: docs/hosts.md"
	@echo "make bake [MATRICES='cu128 cu130-next']   several images in one run: docs/bake.md"
	@echo "make standin                     the whole path of cu130, with stand-ins for the wheels that cannot be reached"
	@echo "make gpu-prepare gpu             what runs on two GPUs: docs/gpu.md"
	@echo "make gpu-kernels-prepare gpu-kernels   sglang-kernel's own extensions on a GPU: docs/gpu-kernels-h200.md"
	@echo "make gpu-container-prepare gpu-container   the builder, an engine and a GPU on one machine: docs/gpu.md"
	@echo "make doctor [MATRIX=cu130]       what this host can run, or whether it runs the image of a matrix: docs/doctor.md"
	@echo "make loads                       verdicts of abi beside what the loader says of the same wheels, installed"
	@echo "make bench                       the measurements in docs/measurements.md, made again"
	@echo "make requirements schemas        write the pinned requirements and the JSON Schemas again"
	@echo "make clean-tools                 stop our engine, remove .tools with everything it holds, images included"
	@echo "ENGINE=none forbids to set up an engine, ENGINE=own uses one in .tools beside an installed one that is stopped"
	@echo "PYTHON=… names another Python (3.11 or newer)"

image: venv engine
	@$(BIN)/builder build $(MATRIX)

test: venv lint types unit processes index images

venv:
	@$(BOOTSTRAP) venv

engine:
	@$(BOOTSTRAP) engine >/dev/null

engine-stop:
	@$(BOOTSTRAP) stop

tools:
	@$(BOOTSTRAP) tools

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

unit: venv
	$(BIN)/pytest tests/unit -q -n auto -m "not processes"

# Of the unit tests those that start processes and servers: the patched code, compiled files, loopback indexes.
processes: venv
	$(BIN)/pytest tests/unit tests/gpu -q -n auto -m processes

index: venv
	$(BIN)/pytest tests/index -q -m index

images: venv tools engine
	$(BIN)/pytest tests/image -q -m image --durations=20

push: venv
	@$(BIN)/builder push $(MATRIX) $(if $(TO),--to $(TO)) $(if $(KEY),--key $(KEY))

pull: venv
	@$(BIN)/builder pull $(MATRIX) $(if $(FROM),--from $(FROM)) $(if $(PUB),--pub $(PUB)) $(foreach host,$(HOSTS),--host $(host))

bake: venv engine
	@$(BIN)/builder bake $(MATRICES)

# Not in CI, which has time and disk for one whole stack: `cu130`'s path with stand-ins for what cannot be reached.
standin: venv engine
	@$(BIN)/python -m tests.standin

# docs/gpu.md: the first here, the second where there are two GPUs, torch and nvcc.
gpu-prepare: venv
	$(BIN)/python -m tests.gpu.prepare .carry

gpu:
	$(PYTHON) -m tests.gpu --wheels .carry --out "$${OUT:-build/gpu}"

# docs/gpu-kernels-h200.md: the first here, the second where there are GPUs, torch and nvcc.
gpu-kernels-prepare: venv
	$(BIN)/python -m tests.gpu_kernels.prepare build/kernels

gpu-kernels:
	$(PYTHON) -m tests.gpu_kernels --compile --carry build/kernels --out "$${OUT:-build/gpu-kernels}"

# docs/gpu.md, In containers: the first here, the second as root where there are a GPU, torch and nvcc.
gpu-container-prepare: venv
	$(BIN)/python -m tests.gpu_container.prepare build/container

gpu-container:
	$(PYTHON) -m tests.gpu_container --carry build/container --out "$${OUT:-build/gpu-container}"

# Without MATRIX: the host by itself, and which stacks it runs.
doctor: venv
	@$(BIN)/builder doctor $(if $(filter command line environment,$(origin MATRIX)),$(MATRIX))

# Ten verdicts of `builder abi` and what the loader says of the same wheels, installed: docs/loads.md.
loads: venv
	$(BIN)/python -m tests.loads

bench: venv tools
	$(BIN)/python tests/bench/join.py

# Exact versions with hashes, for every Python and platform that the builder runs on.
requirements: venv
	$(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command "make requirements" -q -o requirements/run.txt
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command "make requirements" -q -o requirements/dev.txt

schemas: venv
	$(BIN)/python -m builder.schemas

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis

clean-tools:
	@$(BOOTSTRAP) clean
