# Thin wrapper: CMake and pip do the work. `make help` lists the targets.
#   TORCH=2.11.0       which torch to build and test with; each has its own environment
#   PYTHON=python3.12  which Python makes that environment (3.10 to 3.13)
#   JOBS=4             how many compilers or tests run at once
#
# build/core holds kernels and C++ tests for every torch, build/torch-<version> hooks and bindings; `make demo` on a fresh
# clone builds for the CPU alone, and `make setup` adds the rest. Stamps remember what is done; long output is in build/*.log.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
JOBS ?= $(shell nproc)
newest_torch := $(if $(shell $(PYTHON) --version | grep ' 3\.10'),2.14.1,2.15.0)
TORCH ?= $(newest_torch)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
# Kernels for the GPUs of this machine; where it has none, PTX alone: machine code takes minutes for each kind.
export CUDAARCHS := $(or $(CUDAARCHS),$(if $(shell nvidia-smi -L 2>/dev/null),native,90-virtual))

venv := $(if $(filter $(newest_torch),$(TORCH)),.venv,.venv-torch$(TORCH))
bin := $(venv)/bin
hosts := $(venv)-hosts
package_build := build/torch-$(TORCH)
quiet := tools/quiet.sh
pip := -m pip install --disable-pip-version-check --progress-bar off

# Folders are listed too, for they change when a file goes away; of tests in Python, which leave caches, none.
files = $(shell find $(1) $(2) -not -name '*.pyc' -not -name __pycache__)
inputs := $(call files,CMakeLists.txt CMakePresets.json pyproject.toml README.md cmake include kernels hooks \
    python_bindings benchmarks/*.* benchmarks/gradferry_lab examples/cpp) \
    $(filter-out %.py,$(call files,tests/engine tests/faults tests/fuzz tests/kernels tests/reducer,-type f))

core_ready := build/core/.installed
venv_ready := $(venv)/.torch-$(TORCH)
package_ready := $(venv)/.gradferry
demo_ready := $(or $(wildcard $(package_ready)),$(venv)/.gradferry-demo)

# A preset of CMake; what it gives, and how long that usually takes; options of its configuration and of its build.
cmake = $(quiet) build/$(1).log --title "build/$(1): $(2)" bash -ec 'cmake --preset $(1) $(3); cmake --build --preset $(1) $(4)'
of_this_python = -DPython_EXECUTABLE=$(abspath $(bin))/python
ctest = $(quiet) build/ctest_$(1).log --show 'launches,|tests passed|Total Test time' \
    ctest $(2) --output-on-failure --no-tests=error -j $(JOBS)
test_core = $(call ctest,core,--preset core)
test_hooks = $(call ctest,hooks,--test-dir $(package_build)/*)
# A file's tests stay together: they share fixtures. Beyond four, worlds of processes need much memory.
pytest = $(bin)/python -m pytest -q -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Brings stamps up to date, two at a time: torch is on its way while kernels are compiled. Goals given together come
# one after the other, so that no two of these run at once.
prepare = @+$(MAKE) -s -j2
ifeq ($(MAKELEVEL),0)
.NOTPARALLEL:
endif

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*## .*/\1/p' Makefile)

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
setup:  ## the environment, with gradferry and all that tests need built and installed
	$(prepare) $(package_ready)
demo:  ## two ranks on this machine: what compression changes, with a picture; 6 minutes the first time
	$(prepare) $(demo_ready)
	@$(bin)/gradferry demo

# --- packages, and what is measured
wheel: $(venv_ready)  ## dist/gradferry-*.whl for TORCH= and PYTHON=, with kernels for every processor and every GPU
	@$(call cmake,release,kernels for every processor and GPU (usually 1 min or 30 with nvcc),,--target install)
	@tools/wheel.sh $(venv) $(PYTHON) $(TORCH)
docs: .venv-docs/.docs  ## the documentation as build/site/index.html; a link that leads nowhere is an error
	@$(quiet) build/docs.log env NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
gpu-check:  ## what a GPU makes of it: kernels, sanitizers, training; results in build/gpu/gpu.json
	@$(PYTHON) tools/gpu_check.py
gpu-tune:  ## times the kernels with other bounds on their registers
	@$(PYTHON) tools/gpu_check.py --tune

# --- tests
test:  ## all fast tests
	$(prepare) $(package_ready)
	@$(MAKE) -s sim WORLDS=8000
	@$(test_core) -LE slow
	@$(test_hooks) -LE slow
	@$(pytest) -m "not slow"
test-full: test test-slow  ## all tests
test-slow: build/.system_valgrind  ## what `make test` leaves out: slow tests, sanitizers, trainers, kernels for every GPU
	$(prepare) $(package_ready)
	@$(test_core) -L slow -V
	@$(test_hooks) -L slow
	@$(pytest) -m slow
	@$(MAKE) -s sim FIRST=8000
	@$(MAKE) -s -j1 test-hosts test-sanitized sim-threads fuzz FUZZ_SECONDS=20
	@$(MAKE) lint
	@unset CUDAARCHS; $(call cmake,all_gpus,kernels for every kind of GPU)
	@$(call ctest,all_gpus,--preset all_gpus -V)
test-hosts:  ## gradferry in accelerate, Lightning, transformers, Ray and torchft
	$(prepare) $(package_ready) $(hosts)/.hosts
	@$(hosts)/bin/python -m pytest -q tests/hosts
test-sanitized: $(package_ready)  ## C++ tests and a part of the Python tests under ASan and UBSan
	@tools/test_sanitized.sh $(venv) $(JOBS)
test-torch-core:  ## what must hold on every torch; use with TORCH=
	$(prepare) $(package_ready)
	@$(test_hooks) -LE slow
	@$(pytest) -m "torch_core and not slow"
sim: $(package_ready)  ## worlds of engines in one thread, with faults: WORLDS=20000 of them, from FIRST=0 on
	@$(package_build)/*/tests/faults/sim/gradferry_sim --worlds $(or $(WORLDS),20000) --first $(or $(FIRST),0) --jobs $(JOBS)
# A world that fails on real threads need not fail again, so none is made smaller.
sim-threads: $(package_ready)  ## THREAD_WORLDS=300 on real threads and sockets, under ThreadSanitizer
	@$(call cmake,tsan,engines on threads,$(of_this_python))
	@TSAN_OPTIONS=halt_on_error=1:suppressions=$(CURDIR)/tests/faults/sim/tsan_suppressions.txt OMP_NUM_THREADS=1 \
	    $(quiet) build/tsan_worlds.log --show 'all held' build/tsan/tests/faults/sim/gradferry_threads --tries 0 \
	    --worlds $(or $(THREAD_WORLDS),300) --first $(or $(FIRST),0) --jobs $(JOBS)
fuzz: build/.system_fuzz  ## fuzz targets with clang's libFuzzer, each for FUZZ_SECONDS=60
	@$(call cmake,fuzz,kernels and fuzz targets (usually 3 min))
	@tools/fuzz.sh build/fuzz $(or $(FUZZ_SECONDS),60) $(JOBS)

# --- lint
cpp_files := $(filter %.h %.cuh %.cpp %.cu,$(call files,include kernels hooks python_bindings benchmarks tests examples/cpp))
tidy = $(quiet) $@.log $(bin)/run-clang-tidy.py -quiet -j $(JOBS) -clang-tidy-binary $(bin)/clang-tidy -extra-arg=-Wno-unknown-warning-option

lint: $(package_ready) $(venv)/.lint  ## formatting, static analysis, types, stubs, dependency laws
	@$(bin)/clang-format --dry-run --Werror $(cpp_files)
	@$(bin)/ruff check --quiet . && $(bin)/ruff format --check --quiet .
	@$(quiet) build/imports.log --show 'Contracts: ' env PYTHONPATH=python_bindings:benchmarks $(bin)/lint-imports --no-cache
	@$(bin)/python tests/lint/check_includes.py
	@$(quiet) build/mypy.log --show Success $(bin)/mypy
	@$(quiet) build/stubtest.log --show Success $(bin)/python -m mypy.stubtest gradferry._native \
	    --mypy-config-file pyproject.toml --allowlist tests/lint/native_stub_allowlist.txt
	@$(MAKE) -s -k build/lint/torch-$(TORCH).tidy build/lint/core.tidy
	@echo "lint: all clean"
clean:  ## remove all that git ignores: what was built, and environments
	@git clean -qfdX
format: $(venv)/.lint  ## rewrite what `make lint` would complain about
	@$(bin)/clang-format -i $(cpp_files) && $(bin)/ruff check --quiet --fix . && $(bin)/ruff format --quiet .
# Sources that have changed; all, where a header of ours has. Of those that include torch, a target's as one.
build/lint/core.tidy: .clang-tidy $(cpp_files) | $(core_ready) $(venv)/.lint
	@$(tidy) -p build/core $(if $(filter-out %.cpp,$?),'\.cpp$$',$(filter %.cpp,$?)) && touch $@
build/lint/torch-$(TORCH).tidy: CMakePresets.json .clang-tidy $(cpp_files) | $(package_ready) $(venv)/.lint
	@$(quiet) $@.cmake.log cmake --preset tidy $(of_this_python)
	@$(tidy) -p build/tidy -checks=-bugprone-suspicious-include && touch $@

# --- set-up. How long a step usually takes is for two cores and 100 MB/s, the first time.
build/.system_%: tools/system_packages.sh
	@$(quiet) build/system_$*.log $< $(PYTHON) $* && touch $@
build/.system_tests build/.system_fuzz build/.system_valgrind: | build/.system_package
$(venv_ready): requirements/build.txt requirements/run.txt | build/.system_package
	@test -x $(bin)/python || $(PYTHON) -m venv $(venv)
	@$(quiet) build/pip_$(TORCH).log --title "$(venv): torch $(TORCH), 3 GB (usually 2 min)" \
	    $(bin)/python $(pip) torch==$(TORCH) $(^:%=-r %) && touch $@
$(venv)/.test $(venv)/.lint: $(venv)/.%: requirements/%.txt | $(venv_ready)
	@$(quiet) build/pip_$*.log --title "$(venv): requirements/$*.txt" $(bin)/python $(pip) -r $< && touch $@
$(venv)/.lint: | $(venv)/.test
# Sources are read, not imported: no torch.
.venv-docs/.docs: requirements/docs.txt
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	@$(quiet) build/pip_docs.log .venv-docs/bin/python $(pip) -r $< && touch $@
# An environment on top of the other, whose torch and gradferry it has: trainers bring thirty packages, none of which
# may become necessary unnoticed.
site_of = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
$(hosts)/.hosts: requirements/hosts.txt | $(venv)/.test
	@$(PYTHON) -m venv $(hosts)
	@echo "import site; site.addsitedir('$(call site_of,$(venv))')" > "$(call site_of,$(hosts))/below.pth"
	@$(quiet) build/pip_hosts.log --title "$(hosts): trainers" \
	    $(hosts)/bin/python $(pip) -r $< -c requirements/run.txt -c requirements/test.txt && touch $@
build/core/.kernels: $(inputs) | build/.system_package
	@rm -f $(core_ready)  # what stands there is without tests from now on
	@$(call cmake,demo,kernels (usually 1 min),,--target install) && touch $@
$(core_ready): $(inputs) | build/.system_tests
	@$(call cmake,core,kernels and C++ tests (usually 8 min),,--target install) && touch $@
# ON with what tests load beside the package, else OFF.
define install_package
	@$(quiet) build/package_$(TORCH).log --title "$(package_build): hooks and bindings (usually 1 min, with tests 4)" \
	    env PYTHONDONTWRITEBYTECODE=1 $(bin)/python $(pip) --no-build-isolation --no-deps -v --config-settings=build-dir='$(package_build)/{wheel_tag}' \
	    --config-settings=cmake.define.GRADFERRY_PREBUILT_KERNELS=$(CURDIR)/build/core/install \
	    --config-settings=cmake.define.GRADFERRY_WERROR=ON --config-settings=cmake.define.GRADFERRY_TESTS=$(1) \
	    --config-settings=install.components='python$(if $(filter ON,$(1)),;tests)' . && touch $@
endef
$(venv)/.gradferry-demo: build/core/.kernels $(venv_ready)
	$(call install_package,OFF)
$(package_ready): $(core_ready) $(venv_ready) | $(venv)/.test
	$(call install_package,ON)
