# One command each. `check` is what CI runs; `nightly` is everything.
VENV ?= .venv
PY := $(VENV)/bin/python
JOBS ?= 2

.PHONY: setup build test test-rdma bench lint docs check nightly wheel sanitize cpp-test e2e fuzz clean

setup:
	python3 -m venv $(VENV)
	$(PY) -m pip install -q -U pip
	$(PY) -m pip install -c constraints-cpu.txt ".[dev]"
	$(PY) -m pip install -q "cmake>=3.26" ninja pybind11

# Release build of the core with its C++ tests; the extension lands beside the Python sources.
build:
	$(VENV)/bin/cmake --preset release -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir) -DPython_EXECUTABLE=$(abspath $(PY)) -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja
	$(VENV)/bin/cmake --build --preset release -j $(JOBS)
	$(VENV)/bin/cmake --install build/release --prefix python

cpp-test: build
	$(VENV)/bin/ctest --preset release

test: cpp-test
	$(VENV)/bin/pytest

# RDMA over Soft-RoCE in QEMU guests; the Debian packages are those of tests/rdma/vm/packages.txt.
# Writes tests/rdma/results/guests.json.
test-rdma: build
	$(VENV)/bin/pytest -m nightly --timeout 900 tests/rdma

bench:
	PYTHONPATH=python $(PY) benchmarks/run.py

lint:
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check python tests benchmarks examples
	$(VENV)/bin/mypy

docs:
	$(PY) docs/make_api.py

# CHECK_OPTIONS=--without-guest where QEMU cannot run.
check:
	bash .ci/run $(CHECK_OPTIONS)

# ASan+UBSan and TSan over the C++ tests; a report fails the run.
sanitize:
	for preset in asan tsan; do \
	  $(VENV)/bin/cmake --preset $$preset -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja && \
	  $(VENV)/bin/cmake --build --preset $$preset -j $(JOBS) && \
	  $(VENV)/bin/ctest --preset $$preset || exit 1; done

# libFuzzer over every decoder of bytes from outside (clang), FUZZ_SECONDS each.
FUZZ_SECONDS ?= 300
fuzz:
	PATH=$(abspath $(VENV))/bin:$$PATH bash .ci/fuzz $(FUZZ_SECONDS)

nightly: cpp-test sanitize fuzz wheel
	STREAM_SEEDS=100000 build/release/tests/cpp/stream/test_stream_simulation
	$(VENV)/bin/pytest -m "nightly or not nightly" --timeout 3600
	PYTHONPATH=python $(PY) benchmarks/run.py --save benchmarks/results

wheel:
	bash .ci/wheel

clean:
	rm -rf build dist python/kvcore/_core*.so
