# Two commands matter: `make demo` and `make test`. Everything else is a part of them or a longer form.
# `make check` is the part of `make test` that says within three minutes whether a change is sound.

SHELL := bash
.SHELLFLAGS := -o pipefail -c

VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --disable-pip-version-check --constraint constraints.txt
STAMP  := $(VENV)/.plait-setup
EXTRAS := spark,postgres,dev
SUITE  ?= all
# Processes that share the tests: more than two cores, as many tests wait for others.
WORKERS ?= 3
ARGS   ?=
# Memory that the tests' files may take.
ROOM_KIB := 8388608
PYTEST := $(PY) -m pytest --durations 40 --durations-min 5 --numprocesses $(WORKERS) --dist worksteal
# Hundreds of processes are started; each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo check test tests test-deep bench lint servers clean

setup: $(STAMP)

# Re-run only when what is to be installed has changed. A virtual environment whose interpreter is gone is made anew.
$(STAMP): pyproject.toml constraints.txt tools/find-python
	@python=$$(tools/find-python) || exit 1; \
	if ! $(PY) -m pip --version >/dev/null 2>&1; then \
		echo "setup 1/3: virtual environment with $$python"; \
		rm -rf $(VENV) && "$$python" -m venv $(VENV) || exit 1; \
	fi
	@echo "setup 2/3: installing plait[$(EXTRAS)] (about 500 MB the first time, one to three minutes)"
	@$(PIP) --quiet pip
	@$(PIP) --editable '.[$(EXTRAS)]' \
		| sed -u -n -e 's/^Collecting \([^ ]*\).*/  \1/p' -e 's/^Installing collected.*/  installing/p'
	@echo "setup 3/3: preparing Spark, so that it starts faster (once, half a minute or more)"
	@$(PY) -m plait.cli spark prepare || echo "setup: Spark starts slower, as it could not be prepared"
	@touch $(STAMP)
	@echo "setup: done"

demo: setup
	@$(PY) -m examples.demo $(ARGS)

lint: setup
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy --strict plait

# A server that the benchmarks' smoke run compares with, the meta server's database, and a browser for pages; where they
# cannot be installed their tests are skipped.
servers:
	@command -v redis-server >/dev/null 2>&1 || tools/debian-install redis-server >/dev/null || true
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null 2>&1 \
		|| tools/debian-install postgresql >/dev/null || true
	@command -v mariadbd >/dev/null 2>&1 || ls /usr/sbin/mariadbd >/dev/null 2>&1 \
		|| tools/debian-install mariadb-server >/dev/null || true
	@command -v chromium >/dev/null 2>&1 && command -v chromedriver >/dev/null 2>&1 \
		|| tools/debian-install chromium chromium-driver >/dev/null || true

check: lint
	$(PYTEST) -m "(unit or model) and not deep and not bench" $(ARGS)

# Side by side: checking types takes one core a minute, and tests wait now and then.
test: setup servers
	@$(MAKE) --no-print-directory --jobs 2 lint tests

# Temporary files are in memory where there is room for them: thousands of tests wait for a disk otherwise.
tests:
	@if [ -w /dev/shm ] && [ "$$(df -Pk /dev/shm | awk 'NR == 2 { print $$4 }')" -gt $(ROOM_KIB) ]; then \
		TMPDIR=$$(mktemp -d /dev/shm/plait-tests-XXXXXX) && export TMPDIR && chmod 755 "$$TMPDIR" || exit 1; \
		trap 'rm -rf "$$TMPDIR"' EXIT; \
	fi; \
	$(PYTEST) -m "not deep and not bench" $(ARGS)

# SUITE names what a test says in @pytest.mark.deep("..."); an interrupted run goes on where it stopped
# (state in .plait/deep.json, forgotten when the sources or PLAIT_SEED change).
test-deep: setup
	$(PY) -m pytest -m deep --suite "$(SUITE)" --timeout 0 $(ARGS)

bench: setup
	$(PY) -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .plait .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
