# From nothing to a trained model: `make train`. Everything lands in .venv and ~/.cache/tfdist.
#
# Another TensorFlow or Python of the supported range, beside the pinned one:
#   make test VENV=.venv-2.18 PINS= TF="tensorflow-cpu==2.18.*" PYTHON=python3.12

PYTHON ?= python3
VENV   ?= .venv
PINS   ?= -c requirements/constraints.txt
TF     ?=
# PLOT= draws the picture of the convergence, for which matplotlib has to be there.
PLOT   ?= --without-plot
# The environment of `make check-gpu-build`, and its TensorFlow; CUDA_HOME names a toolkit of CUDA 12 where there is one.
GPU_VENV ?= .venv-gpu
GPU_TF   ?= tensorflow==2.21.*
# Arguments for pytest, such as ARGS="tests/unit -k buckets".
ARGS   ?=

BIN      := $(VENV)/bin
PACKAGES := $(VENV)/.stamps/packages
HOROVOD  := $(VENV)/.stamps/horovod

# Programs that tests and examples start by name (horovodrun) are the environment's own.
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help setup train test lint bench check-gpu-build pins clean

help:
	@echo "make setup   .venv with the pinned packages, and Horovod built for its TensorFlow"
	@echo "make train   the example on two processes"
	@echo "make test    the whole test suite; ARGS=... goes to pytest"
	@echo "make lint    ruff, mypy, import rules"
	@echo "make bench   the benchmarks' tables"
	@echo "make check-gpu-build   Horovod with NCCL compiled, linked and loaded, without a GPU; downloads 1.2 GB"
	@echo "make pins    resolve requirements/constraints.txt anew"
	@echo "make clean   remove .venv; built wheels stay in the cache"

setup: $(HOROVOD)

train: $(HOROVOD)
	$(BIN)/tfdist run -np 2 examples/ring.py

test: $(HOROVOD)
	$(BIN)/python -m pytest $(ARGS)

lint: $(PACKAGES)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(HOROVOD)
	$(BIN)/python benchmarks/ring.py
	$(BIN)/python benchmarks/allreduce.py
	$(BIN)/python benchmarks/parameter_server.py
	$(BIN)/python benchmarks/ps_convergence.py $(PLOT)
	$(BIN)/python benchmarks/model_parallel.py

check-gpu-build:
	$(PYTHON) tests/gpu_build/check.py $(GPU_VENV) "$(GPU_TF)"

pins: $(PACKAGES)
	$(BIN)/python requirements/pin.py

clean:
	rm -rf $(VENV)

$(PACKAGES): setup.cfg pyproject.toml requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14) and \
	  "$(PYTHON) is Python %d.%d; tfdist needs 3.10 to 3.13: make PYTHON=python3.13 ..." % sys.version_info[:2])'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(PINS) -e '.[cpu,dev]' $(TF)
	@mkdir -p $(@D) && touch $@

# Again whenever what it builds may have changed; it takes seconds where the wheel is in the cache.
$(HOROVOD): $(PACKAGES) $(wildcard tfdist/build/*.py)
	$(BIN)/tfdist build-horovod
	@mkdir -p $(@D) && touch $@
