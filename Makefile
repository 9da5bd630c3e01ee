# `make image` and `make test` do all the set-up themselves; `make help` lists the rest.
MATRIX ?= cu130-next
PYTHON ?= python3
BOOTSTRAP := $(PYTHON) builder/bootstrap.py
BIN := .venv/bin

.PHONY: help image test lint types unit processes index images standin gpu gpu-prepare engine engine-stop tools venv bench requirements schemas clean clean-tools

help:
	@echo "make image [MATRIX=cu130-next]   build, prove and tag the image of a matrix"
	@echo "make test                        linters, types, unit, index and image tests"
	@echo "make lint types unit processes index images   one part of them"
	@echo "make engine | engine-stop        use the running Docker Engine or set one up in .tools | stop ours"
	@echo "make tools                       what the tests need, from the distribution's archive into .tools"
	@echo "make standin                     the whole path of cu130, with stand-ins for the wheels that cannot be reached"
	@echo "make gpu-prepare gpu             what runs on two GPUs: docs/gpu.md"
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

# Not in CI, which has time and disk for one whole stack: `cu130`'s path with stand-ins for what cannot be reached.
standin: venv engine
	@$(BIN)/python -m tests.standin

# docs/gpu.md: the first here, the second where there are two GPUs, torch and nvcc.
gpu-prepare: venv
	$(BIN)/python -m tests.gpu.prepare .carry

gpu:
	$(PYTHON) -m tests.gpu --wheels .carry --out "$${OUT:-build/gpu}"

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
