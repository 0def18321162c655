# Two commands for newcomers: "make demo" and "make test". Each sets up .venv on its first run and reuses it after.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DOCS   := $(VENV)/.docs-ready
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs# without the theme's advertisement for its successor

.PHONY: help demo test lint docs docs-serve pages bench sanitize test-hflayers test-oldest clean

help:
	@echo "make demo           run the demonstration: a table on the screen, pictures under out/"
	@echo "make test           lint, types and the whole test suite"
	@echo "make lint           ruff and mypy alone"
	@echo "make docs           build the documentation site into site/, strictly"
	@echo "make docs-serve     show the site while you write it"
	@echo "make pages          write tables and plots of the site anew from benchmarks/results/"
	@echo "make bench          time the kernels on this machine, rows into benchmarks/results/"
	@echo "make sanitize       the CPU kernel's tests under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make test-hflayers  the suite beside the real hopfield-layers (HFLAYERS=path for a checkout of it)"
	@echo "make test-oldest    the suite with the oldest releases that users may have (on Python 3.10 to 3.12)"
	@echo "make clean          remove .venv, out/ and what was built"

# An environment in a folder, by a Python that the pinned versions run on. Said before anything is made or installed.
define venv
@$(or $(wildcard $(1)/bin/python),$(PYTHON)) -c "import sys; sys.version_info >= (3, 11) or sys.exit( \
	'expected Python 3.11 or newer for the versions of constraints.txt, got ' + sys.version.split()[0] \
	+ '; make clean, then name a newer one: make PYTHON=python3.12 ...')"
test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

# The site reads the package and does not import it: a bare clone builds it with these alone, without torch.
$(DOCS): pyproject.toml constraints.txt Makefile
	@echo "==> setting up $(VENV) for the documentation"
	$(call venv,$(VENV))
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt "pip>=25.1"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --group docs
	touch $@

$(READY): $(DOCS) setup.py ahop_layers/ops/footprint.c
	@echo "==> setting up $(VENV) (first run: a few minutes)"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt "setuptools>=77"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --no-build-isolation \
		-e ".[examples,tabular,dev]" transformers
	$(call frameworks,$(VENV))
	touch $@

# Libraries that only tests use lie in a folder of their own, which those tests add to their path (tests/frameworks.py).
# torchvision is built for one build of torch: beside another it fails to import, and Lightning would import it.
frameworks = $(1)/bin/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps --upgrade \
	--target $(1)/vit timm torchvision torchmil tensordict pyvers

demo: $(READY)
	@echo "==> running the demonstration"
	$(BIN)/python -m examples.demo --overwrite

lint: $(READY)
	@echo "==> lint and types"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	@echo "==> tests"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

docs: $(DOCS)
	@echo "==> building the site"
	$(MKDOCS) build --strict
	@echo "open site/index.html"

docs-serve: $(DOCS)
	$(MKDOCS) serve --strict

pages: $(READY)
	$(BIN)/python -m benchmarks.pages

bench: $(READY)
	$(BIN)/python -m benchmarks.kernels

# Leaks are not looked for: the interpreter's own would drown them.
sanitize: $(READY)
	AHOP_CFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover" $(BIN)/python setup.py -q build_ext --force \
		--build-lib build/sanitize --build-temp build/sanitize/temp
	ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		AHOP_CPU_LIBRARY=build/sanitize/ahop_layers/ops/_footprint.so $(BIN)/python -m pytest tests/test_cpu.py

# The whole suite beside the real hopfield-layers, from its repository or from a checkout: HFLAYERS=path.
test-hflayers:
	@echo "==> setting up $(VENV)-hflayers"
	$(call venv,$(VENV)-hflayers)
	$(VENV)-hflayers/bin/python -m pip install --disable-pip-version-check -c constraints.txt "pip>=25.1" "setuptools>=77"
	$(VENV)-hflayers/bin/python -m pip install --disable-pip-version-check -c constraints.txt --no-build-isolation \
		-e ".[examples,tabular,dev]" transformers
	$(call frameworks,$(VENV)-hflayers)
	$(VENV)-hflayers/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation \
		$(if $(HFLAYERS),"$(HFLAYERS)",--group hflayers)
	$(VENV)-hflayers/bin/python -c "import hflayers"
	OMP_NUM_THREADS=1 $(VENV)-hflayers/bin/python -m pytest -n auto

# The lower bounds of pyproject.toml, kept true, on Python 3.10 to 3.12: for newer ones the oldest releases have no wheels.
# constraints.txt has no say here. No Triton is asked for: its new releases do not work with an old torch.
test-oldest:
	@echo "==> setting up $(VENV)-oldest"
	test -x $(VENV)-oldest/bin/python || $(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --disable-pip-version-check "pip>=25.1" "setuptools>=77"
	$(VENV)-oldest/bin/python -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e .
	$(VENV)-oldest/bin/python -m pip install --disable-pip-version-check \
		pytest pytest-xdist hypothesis pandas entmax $$($(VENV)-oldest/bin/python tests/oldest.py)
	OMP_NUM_THREADS=1 $(VENV)-oldest/bin/python -m pytest -n auto

clean:
	rm -rf $(VENV) $(VENV)-* out site build dist *.egg-info ahop_layers/ops/_footprint.*
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
