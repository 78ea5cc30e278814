# `make demo` and `make test` set up the environment in VENV when it is not there: demo what it needs itself, test the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SITE ?= site
INSTALL := $(BIN)/pip install --disable-pip-version-check $(PIP_FLAGS) -q -c constraints.txt -e
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo

.PHONY: demo test check bench load browser docs dist clean

demo: $(DEMO)
	$(BIN)/bitgraft demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# About half an hour on two idle cores; ROWS=switch,files runs some of it, ROUNDS=5 less often.
bench: $(READY)
	$(INSTALL) ".[bench]"
	OMP_NUM_THREADS=$$(nproc) $(BIN)/python -m benchmarks $(if $(ROWS),--rows $(ROWS)) $(if $(ROUNDS),--rounds $(ROUNDS))

# About ten minutes on two idle cores: servers under traffic, in turns; then 1,000 tasks that come and go.
load: $(READY)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e ".[load]"
	$(BIN)/python -m benchmarks.load $(if $(ROUNDS),--rounds $(ROUNDS))
	$(BIN)/python -m benchmarks.churn

# The page in Debian's chromium (apt install chromium).
browser: $(READY)
	$(INSTALL) ".[browser]"
	$(BIN)/python -m benchmarks.browser $(if $(SHOTS),--shots $(SHOTS))

# The site, in SITE; anything that mkdocs warns of is an error. ruff sets the signatures of the API in short lines.
docs:
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt mkdocs-material "mkdocstrings[python]" ruff
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir $(abspath $(SITE))

# An sdist and a wheel in dist/; with TAG=v1.2.3, only if the version is 1.2.3 and the changelog has a section for it.
dist:
	$(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/pip install --disable-pip-version-check -q -c constraints.txt build
	$(VENV)-release/bin/python .ci/check_release.py $(TAG)
	$(VENV)-release/bin/python -m build

$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing what the demo needs; torch with CUDA is most of it (about 6 GB on Linux)"
	$(INSTALL) ".[demo]"
	@du -sh $(VENV)
	touch $(DEMO)

$(READY): $(DEMO)
	$(INSTALL) ".[test,check]"
	@du -sh $(VENV)
	touch $(READY)

clean:
	rm -rf $(VENV) $(VENV)-release dist
