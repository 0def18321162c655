# "make demo" and "make test" are the commands to start with. The first run sets up .venv, later runs reuse it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY := $(VENV)/.ready
DOCS := $(VENV)/.docs-ready
EXAMPLES := $(VENV)/.examples-ready
THREADS ?= 1#          torch's threads in each process of the tests
MINUTES ?= 30#         duration of the soak test
OPTIONS ?=#            further options of pytest, such as --seed-offset 1
TESTS = OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -n auto --dist worksteal $(OPTIONS)
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs# without the notice about MkDocs 2

.PHONY: help demo test test-all test-fast test-models soak lint docs docs-serve pages bench sanitize test-hflayers test-oldest \
	test-nightly test-cuda clean

help:
	@echo "make demo           run the demo: prints a table, writes figures to out/"
	@echo "make test           run lint, type checks and the tests (5 minutes on two cores)"
	@echo "make test-all       the same with the tests marked full: wheels, every compile variant, two-process training"
	@echo "make test-fast      run the fast tests of the core only, without lint (a minute)"
	@echo "make test-models    adapt and check models of timm, transformers, diffusers and others, and export to ONNX (about an hour)"
	@echo "make lint           run ruff and mypy"
	@echo "make docs           build the documentation site into site/ (strict)"
	@echo "make docs-serve     serve the site with live reload"
	@echo "make pages          regenerate tables and plots of the site from benchmarks/results/"
	@echo "make bench          benchmark the kernels on this machine; rows go to benchmarks/results/"
	@echo "make test-cuda      run the CUDA kernels on the CPU, and compile them with NVRTC (no GPU needed)"
	@echo "make sanitize       run the CPU kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make test-hflayers  run the suite with the original hopfield-layers installed (HFLAYERS=path uses a checkout)"
	@echo "make test-oldest    run the suite with the oldest supported releases (Python 3.10 to 3.12)"
	@echo "make soak           run random checks against the reference for 30 minutes (MINUTES=10: for ten)"
	@echo "make test-nightly   run the suite with torch nightly"
	@echo "make clean          remove .venv, out/ and build products"

# Creates a virtual environment. Checks the Python version first, before anything is created or installed.
define venv
@$(or $(wildcard $(1)/bin/python),$(PYTHON)) -c "import sys; sys.version_info >= (3, 11) or sys.exit( \
	'expected Python 3.11 or newer for the versions of constraints.txt, got ' + sys.version.split()[0] \
	+ '; make clean, then name a newer one: make PYTHON=python3.12 ...')"
test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

PIP = $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt

# The site is built from the sources without importing the package, so it does not need torch.
$(DOCS): pyproject.toml constraints.txt Makefile
	@echo "==> setting up $(VENV) for the documentation"
	$(call venv,$(VENV))
	$(PIP) "pip>=25.1"
	$(PIP) --group docs
	touch $@

# Installs the package with extras $(1), and $(2). The kernel is compiled while pip installs everything else; setup.py then
# finds it built.
define install
$(PIP) "pip>=25.1" "setuptools>=77"
$(BIN)/python -c "import tomllib; \
	project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	extras = [project['optional-dependencies'][name] for name in '$(1)'.split()]; \
	print(*project['dependencies'], *sum(extras, []), sep='\n')" > $(VENV)/requirements.txt
$(BIN)/python setup.py -q build_ext --inplace & $(PIP) -r $(VENV)/requirements.txt $(2) && wait
$(PIP) --no-build-isolation --no-deps -e .
endef

# What the examples need. The tests add their own tools to the same environment.
$(EXAMPLES): pyproject.toml constraints.txt Makefile setup.py $(wildcard ahop_layers/ops/footprint*)
	@echo "==> setting up $(VENV) for the examples (first run: two minutes)"
	$(call venv,$(VENV))
	$(call install,examples)
	touch $@

# All cores compile Python modules, one of them would if pip did.
$(READY): pyproject.toml constraints.txt Makefile setup.py $(wildcard ahop_layers/ops/footprint*)
	@echo "==> setting up $(VENV) for the tests (first run: a few minutes)"
	$(call venv,$(VENV))
	$(call install,examples sklearn search dev,--group docs transformers)
	$(call frameworks,$(VENV))
	-$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib $(VENV)/vit
	touch $(DOCS) $(EXAMPLES) $@

# Libraries that only tests use are installed into a separate folder, which tests/frameworks.py adds to sys.path.
# A torchvision wheel fails to import with another build of torch, and Lightning imports torchvision if it is installed.
frameworks = $(1)/bin/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps --upgrade \
	--target $(1)/vit timm torchvision torchmil tensordict pyvers peft accelerate psutil

demo: $(EXAMPLES)
	@echo "==> running the demonstration"
	$(BIN)/python -m examples.demo

lint: $(READY)
	@echo "==> lint and types"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	@echo "==> tests"
	$(TESTS)

test-all: lint
	@echo "==> all tests"
	$(TESTS) --full

test-fast: $(READY)
	@echo "==> fast tests of the core"
	$(TESTS) -m "not slow and not gpu" tests

# Without a GPU: the CUDA kernels run on the CPU, and NVRTC compiles them.
test-cuda: $(READY)
	@echo "==> CUDA kernels"
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --upgrade --target $(VENV)/nvrtc nvidia-cuda-nvrtc-cu12
	PYTHONPATH=$(VENV)/nvrtc $(BIN)/python -m pytest tests/test_cuda.py

# The rows go to a folder of their own. "python -m tests.models" replaces those of the documentation.
test-models: $(READY)
	@echo "==> models of other libraries"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps --upgrade --target $(VENV)/models \
		diffusers importlib_metadata zipp open_clip_torch ftfy wcwidth segment-anything \
		onnx onnxscript onnx_ir onnxruntime ml_dtypes protobuf flatbuffers
	PYTHONPATH=$(VENV)/models OMP_NUM_THREADS=1 $(BIN)/python -m pytest --full tests/test_onnx.py
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.models --path $(VENV)/models --results build/models

soak: $(READY)
	@echo "==> $(MINUTES) minutes of random checks"
	PYTHONMALLOC=malloc $(BIN)/python -m tests.soak --minutes $(MINUTES)

docs: $(DOCS)
	@echo "==> building the site"
	$(MKDOCS) build --strict
	@echo "open site/index.html"

docs-serve: $(DOCS)
	$(MKDOCS) serve --strict

pages: $(READY)
	$(BIN)/python -m benchmarks.harness.pages

bench: $(READY)
	$(BIN)/python -m benchmarks.kernels

# Without leak detection, since the interpreter itself leaks.
sanitize: $(READY)
	AHOP_CFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover" $(BIN)/python setup.py -q build_ext --force \
		--build-lib build/sanitize --build-temp build/sanitize/temp
	ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		AHOP_CPU_LIBRARY=build/sanitize/ahop_layers/ops/_footprint.so $(BIN)/python -m pytest \
		tests/test_cpu.py tests/test_ops.py tests/test_blocks.py -k "cpu or operators or test_blocks and not compile"

# Installs the original hopfield-layers from its repository, or from a checkout with HFLAYERS=path.
test-hflayers:
	@echo "==> setting up $(VENV)-hflayers"
	$(call venv,$(VENV)-hflayers)
	$(VENV)-hflayers/bin/python -m pip install --disable-pip-version-check -c constraints.txt "pip>=25.1" "setuptools>=77"
	$(VENV)-hflayers/bin/python -m pip install --disable-pip-version-check -c constraints.txt --no-build-isolation \
		-e ".[examples,sklearn,search,dev]" transformers
	$(call frameworks,$(VENV)-hflayers)
	$(VENV)-hflayers/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation \
		$(if $(HFLAYERS),"$(HFLAYERS)",--group hflayers)
	$(VENV)-hflayers/bin/python -c "import hflayers"
	OMP_NUM_THREADS=1 $(VENV)-hflayers/bin/python -m pytest -n auto --dist worksteal

# Tests the lower bounds of pyproject.toml. The oldest releases have wheels for Python 3.10 to 3.12 only. Does not use
# constraints.txt.
test-oldest:
	@echo "==> setting up $(VENV)-oldest"
	test -x $(VENV)-oldest/bin/python || $(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --disable-pip-version-check "pip>=25.1" "setuptools>=77"
	$(VENV)-oldest/bin/python -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e .
	$(VENV)-oldest/bin/python -m pip install --disable-pip-version-check \
		pytest pytest-xdist hypothesis pandas entmax $$($(VENV)-oldest/bin/python tests/oldest.py)
	OMP_NUM_THREADS=1 $(VENV)-oldest/bin/python -m pytest -n auto --dist worksteal

# The newest releases instead of constraints.txt, with the CPU build of torch nightly.
test-nightly:
	@echo "==> setting up $(VENV)-nightly"
	test -x $(VENV)-nightly/bin/python || $(PYTHON) -m venv $(VENV)-nightly
	$(VENV)-nightly/bin/python -m pip install --disable-pip-version-check "pip>=25.1" "setuptools>=77"
	$(VENV)-nightly/bin/python -m pip install --disable-pip-version-check --upgrade --pre torch \
		--index-url https://download.pytorch.org/whl/nightly/cpu
	$(VENV)-nightly/bin/python -m pip install --disable-pip-version-check --no-build-isolation \
		-e ".[examples,sklearn,search,dev]" transformers
	$(call frameworks,$(VENV)-nightly)
	OMP_NUM_THREADS=1 $(VENV)-nightly/bin/python -m pytest -n auto --dist worksteal

clean:
	rm -rf $(VENV) $(VENV)-* out site build dist *.egg-info ahop_layers/ops/_footprint.*
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
