# Everything runs in a virtual environment of its own, $(VENV), which is made when it is missing; but
# what needs a GPU runs offline, with the Python that has torch for it: make test-gpu PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
C_FILES = $(wildcard csrc/*/*.[ch] csrc/py/*/*.[ch] cuda/*.cu cuda/*.h tests/c/*.[ch] tests/cuda/*.c tests/cuda/*.h tests/cuda/*.cu)
C_TESTS := $(MAKE) -f tests/c/Makefile
# The tests in parts, the longest first. `rest` is what the others do not name.
TEST_PARTS := ranks rest steps data devices programs kernels
PART_ranks := tests/sharding tests/zero
PART_steps := tests/optim tests/accumulate tests/amp tests/clip
PART_data := tests/data
PART_programs := tests/leaks tests/cli tests/benchmarks
PART_devices := tests/device tests/gpu
PART_kernels := -rs tests/test_cuda_build.py tests/test_cuda_machine_code.py tests/test_cuda_subset.py
PART_rest := $(patsubst tests/%,--ignore=tests/%,$(filter tests/%,$(foreach part,$(TEST_PARTS),$(PART_$(part)))))
# The loops in each layout, type and chain, for each lower instruction set. That whole runs have the same bits
# there is shown by tests/optim/test_concurrency.py.
LEVEL_TESTS := tests/optim/test_runner.py tests/amp/test_unscale.py tests/clip/test_clip_grad.py tests/clip/test_total_norm.py \
    tests/accumulate/test_pass.py tests/data/test_converted.py
# Hundreds of programs of tests import the package: what one has compiled of it is there for the others.
unexport PYTHONDONTWRITEBYTECODE
# What runs the loops: these tests are repeated under the sanitizers.
LOOP_TESTS := tests/optim tests/amp tests/clip tests/accumulate/test_pass.py tests/accumulate/test_sums.py \
    tests/data/test_converted.py
# What goes from Python to the kernels, on a machine that claims to have CUDA devices.
DEVICE_TESTS := $(addprefix tests/device/test_,amp.py graphs.py lists.py steps.py) \
    $(addprefix tests/gpu/test_,amp.py bits.py graphs.py lists.py)
# Of the loader, what starts no process: a lock of AddressSanitizer may be held while its owner forks.
LOADER_TESTS := tests/test_abi.py $(addprefix tests/data/test_,datasets.py formats_arrays.py lifetime.py \
    orders.py::test_is_a_permutation orders.py::test_ranks_share_the_samples transforms.py \
    $(addprefix formats_tfrecord.py::test_,any_damage_is_a_clear_error noise_is_no_record))
SANITIZE := address,undefined
# libstdc++ too: AddressSanitizer looks for the C++ runtime before Python has loaded torch.
PRELOAD = $(shell $(CC) -print-file-name=libasan.so) $(shell $(CC) -print-file-name=libstdc++.so)
UNDER_ASAN = LD_PRELOAD="$(PRELOAD)" PYTHONPATH=build/asan/lib
# Stacks through CPython and torch need the slow unwinder, and LeakSanitizer does not see pymalloc's arenas.
WITH_LEAKS = PYTHONMALLOC=malloc LSAN_OPTIONS=suppressions=tests/leaks/lsan.supp:print_suppressions=0 \
    ASAN_OPTIONS=detect_leaks=1:fast_unwind_on_malloc=0:malloc_context_size=16
ASAN_TESTS ?= $(LOOP_TESTS)
FUZZ_ASAN := detect_leaks=0:allocator_may_return_null=1
SECONDS ?= 600
# ThreadSanitizer wants its addresses unshuffled; not every container lets a program ask for that.
UNSHUFFLED = $(shell setarch -R true 2>/dev/null && echo setarch -R)
DEMO ?= --output build/demo.png
# The extra with what the benchmarks compare with.
RIVALS ?= bench
# Options of pytest.
ARGS ?=
# For the targets with a GPU: a wheel to take instead of a build on the spot, and one for a build that fails;
# the files to run, first the bits, then the figures, by PARTS="bits race" some of them; seconds for each and
# for all; and where logs and figures go.
GPU_FIRST := bits lists amp graphs streams
GPU_BENCH := cuda_works cuda_cases cuda_loops
GPU_REST := training few_bits loops losses kernels quick_math memory state_dict loader transforms sharded race sanitizer counters
WHEEL ?=
CUDA12 ?=
SPARE ?= $(firstword $(wildcard dist/*.whl))
PARTS ?=
LIMIT ?= 180
BUDGET ?= 1700
RESULTS ?= build/gpu
# For `make matrix`: versions of torch and CPython, all if not given, and the page with the table, none if empty.
TORCH ?=
PYTHONS ?=
PAGE ?= docs/compatibility.md
ITS_PYTHON = $(if $(findstring /,$(PYTHON)),$(abspath $(PYTHON)),$(PYTHON))

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s  %s\n", $$1, $$2}' Makefile
	@echo 'gpu, test-gpu and bench-gpu make no environment and download nothing: they run $$(PYTHON), python3 if'
	@echo 'not given, with torch, pytest and numpy, on a build in place or on what WHEEL=dist/NAME.whl holds. They'
	@echo 'take PARTS="bits race" for some files, and RESULTS=FOLDER for their logs and figures.'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Installs the package beside its sources, with the extras of pyproject.toml that are named last.
COMMA := ,
$(BIN)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing faststep[$*] and what it needs into $(VENV)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $(addprefix $(BIN)/.installed-,$(subst $(COMMA), ,$*))

build: $(BIN)/.installed-test ## install for development, and compile what has changed; FASTSTEP_CUDA=1: for all GPUs
	$(BIN)/python setup.py -q build_ext --inplace

demo: build ## train three small models, with plain torch and under run; plot in build/demo.png
	$(BIN)/python -m faststep demo $(DEMO)

test: build ## run all tests on all cores, those of the CPU loops over elements on each lower instruction set, too
	@echo 'The tests run in parts, side by side: $(TEST_PARTS) levels. Each prints when it has ended.'
	+@OMP_WAIT_POLICY=passive $(MAKE) --no-print-directory -o build -k -O -j$$(nproc) $(TEST_PARTS:%=test-%) levels

tests: build ## run all tests one after another on the best instruction set; ARGS are options of pytest
	$(BIN)/python -m pytest -q $(ARGS)

test-%: build ## run one part of the tests: data, say; ARGS are options of pytest
	$(if $(PART_$*),,$(error there is no part $* of the tests: $(TEST_PARTS)))
	$(BIN)/python -m pytest -q $(PART_$*) $(ARGS)

levels: build ## run the tests of the loops on each lower instruction set
	@set -e; for level in $$($(BIN)/python -c \
	    'from faststep import _C; print(*_C.cpu_info()["supported"][:-1])'); do \
	    echo "FASTSTEP_CPU=$$level"; FASTSTEP_CPU=$$level $(BIN)/python -m pytest -q $(LEVEL_TESTS); \
	done

# Without what timm depends on: torchvision comes with another build of torch.
frameworks: build $(BIN)/.installed-frameworks ## test inside accelerate, Lightning, Trainer, timm and PEFT
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps timm==1.0.31
	$(BIN)/python -m pytest -q -rs tests/frameworks tests/oracle $(ARGS)

test-c: ## run the core's tests in C: no Python, no torch
	+$(C_TESTS)

build-asan: $(BIN)/.installed-test ## compile with AddressSanitizer and UBSan into build/asan
	FASTSTEP_CUDA=0 FASTSTEP_SANITIZE=$(SANITIZE) $(BIN)/python setup.py -q build -b build/asan --build-lib build/asan/lib \
	    --build-temp build/asan/objects

asan: asan-c asan-python ## run the C tests, and a part of those in Python, under AddressSanitizer and UBSan

asan-c: build-asan ## run the C tests under AddressSanitizer and UBSan
	+$(C_TESTS) SANITIZE=$(SANITIZE) BUILT=build/asan/objects

# What they find depends on the path to an element, not on its value: a part of the cases takes all paths. Two
# billion elements take minutes, and one that is not reached fails the test without a sanitizer.
asan-python: build-asan ## run one in 24 cases of the tests of loops, devices and the loader under them
	FASTSTEP_EVERY=24 $(UNDER_ASAN) ASAN_OPTIONS=detect_leaks=0 \
	    $(BIN)/python -m pytest -q --capture=sys $(LOOP_TESTS) $(DEVICE_TESTS) $(LOADER_TESTS) \
	    --deselect tests/optim/test_big.py::test_more_than_2_to_the_31_elements

# First a program that leaks, which must be reported; some of the options cost five times the time.
asan-all: build-asan ## run all of the loops' tests under them, and look for leaks; takes an hour or two
	! $(UNDER_ASAN) $(WITH_LEAKS) $(BIN)/python tests/leaks/leak_on_purpose.py 2>build/asan/leaked.log
	grep -q 'leak of \(9\|10\)000 byte' build/asan/leaked.log && grep -q _PyBytes_FromSize build/asan/leaked.log
	$(UNDER_ASAN) $(WITH_LEAKS) $(BIN)/python -m pytest -q --capture=sys $(ASAN_TESTS)

tsan: ## run the C tests of threads under ThreadSanitizer
	+$(C_TESTS) SANITIZE=thread TESTS='test_threads* test_gpu_threads' RUN='$(UNSHUFFLED)'

leaks: build ## call every function of the extension many times and look at the memory
	$(BIN)/python -m pytest -q tests/leaks

fuzz: build $(if $(ASAN),build-asan) ## call the extension with hostile arguments; SECONDS=600, SEED=1, ASAN=1
	$(if $(ASAN),$(UNDER_ASAN):tests ASAN_OPTIONS=$(FUZZ_ASAN),PYTHONPATH=tests) $(BIN)/python -m fuzz \
	    --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

lint: build $(BIN)/.installed-dev ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)

fix: $(BIN)/.installed-dev ## mend what lint can mend by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

# Anew each time: Sphinx says nothing of a page that it has read before.
docs: build $(BIN)/.installed-docs ## make HTML of the guides, with a reference, in build/docs
	$(BIN)/python -m sphinx -q -E -W --keep-going -n -c docs -d build/doctrees . build/docs

bench: build $(BIN)/.installed-$(RIVALS) ## measure against torch and other libraries: table and plot
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest benchmarks

bench-whole: build ## measure whole training steps, ARGS=--quick for half of them; TCMALLOC=LIBRARY is a rival
	$(BIN)/python benchmarks/whole/compare.py $(if $(TCMALLOC),--tcmalloc $(TCMALLOC)) $(ARGS)

# Nothing but the standard library, a C compiler and valgrind; of a program that `make test-c` builds too.
count: ## count instructions of the passes under Callgrind, against the expected
	+@$(C_TESTS) TESTS=count_passes RUN=true
	python3 benchmarks/instructions.py $(RENEW)

count-renew: RENEW := --renew
count-renew: count ## count, and expect these from now on

# Without pyproject.toml, which setuptools older than 77 refuse: the system's is what it is. The file
# build/package says where what was built lies.
unpack = rm -rf build/wheel && $(PYTHON) -m zipfile -e $(1) build/wheel && echo build/wheel >build/package
build-gpu: ## compile beside the sources, or unpack WHEEL, offline; where that fails unpack SPARE=dist/NAME.whl
	@mkdir -p build/bare
ifneq ($(WHEEL),)
	$(call unpack,$(WHEEL))
else
	@ln -sfn $(CURDIR)/setup.py $(CURDIR)/csrc $(CURDIR)/cuda $(CURDIR)/python/faststep build/bare
	@(cd build/bare && FASTSTEP_CUDA=1 $(ITS_PYTHON) setup.py -q build_ext --inplace) && echo python >build/package || \
	    { echo 'nothing could be built$(if $(SPARE),: taking $(SPARE),$(COMMA) and there is no wheel in dist)'; \
	    $(if $(SPARE),$(call unpack,$(SPARE)),false); }
endif

# Each file in a process of its own with a time limit; see tests/gpu/each_file.
files_of = $(foreach part,$(filter $(or $(PARTS),%),$(2)),$(1)/test_$(part).py)
ON_GPU = PYTHON=$(ITS_PYTHON) PACKAGE=$$(cat build/package) RESULTS=$(RESULTS) LIMIT=$(LIMIT) BUDGET=$(BUDGET) \
    tests/gpu/each_file
AS_ASKED = $(if $(ARGS),-- $(ARGS))

gpu: build-gpu ## test and measure on a CUDA device; logs and figures in RESULTS=build/gpu
	$(ON_GPU) $(call files_of,tests/gpu,$(GPU_FIRST)) $(call files_of,benchmarks/gpu,$(GPU_BENCH)) \
	    $(call files_of,tests/gpu,$(GPU_REST)) $(AS_ASKED)

test-gpu: build-gpu ## only test on the CUDA devices of this machine
	$(ON_GPU) $(call files_of,tests/gpu,$(GPU_FIRST) $(GPU_REST)) $(AS_ASKED)

bench-gpu: build-gpu ## only measure on a CUDA device
	$(ON_GPU) $(call files_of,benchmarks/gpu,$(GPU_BENCH)) $(AS_ASKED)

wheel: $(BIN)/.installed-dev ## build dist/ with kernels for all GPUs, with CUDA12=1 for drivers of CUDA 12 too; check the wheel
	PATH="$(BIN):$$PATH" PYTHON=$(BIN)/python CUDA12=$(CUDA12) .ci/release

matrix: | $(BIN)/python ## test the wheel beside each torch and CPython; TORCH="2.10 2.15" PYTHONS=3.12 for some
ifeq ($(WHEEL),)
	rm -rf build/matrix/dist
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps -w build/matrix/dist .
endif
	$(BIN)/python tests/matrix/pairs.py --wheel $(or $(WHEEL),build/matrix/dist/*.whl) \
	    $(if $(TORCH),--torch "$(TORCH)") --pythons "$(PYTHONS)" $(if $(PAGE),--page $(PAGE)) $(ARGS)

ci: ## what the project's CI runs, in a fresh environment
	.ci/run

clean: ## remove what was built, but not the environment
	rm -rf build dist python/*.egg-info python/faststep/*.so python/faststep/*.fatbin
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.DEFAULT_GOAL := help
.PHONY: help build build-asan demo test tests levels frameworks test-c asan asan-c asan-python asan-all tsan leaks fuzz lint \
    fix docs bench bench-whole count count-renew build-gpu gpu test-gpu bench-gpu wheel matrix ci clean
