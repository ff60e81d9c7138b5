PYTHON ?= python3
BIN := .venv/bin
# Written last, so that an interrupted setup is not taken for a finished one.
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup drill test lint demo bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## Install everything into .venv (Python 3.11 or newer)

drill: $(READY) ## Kill each process at each stop point and show what was lost: nothing
	@$(BIN)/python manage.py run_recovery_drill

test: $(READY) ## Run the tests on a real PostgreSQL and a real Valkey
	@$(BIN)/python -m pytest

lint: $(READY) ## Check style, types, migrations and settings
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python manage.py makemigrations --check --dry-run
	@$(BIN)/python manage.py check

demo: $(READY) ## Run the example shop with its servers, worker and beat; Ctrl-C ends it
	@$(BIN)/python -m shop.demo

bench: $(READY) ## Measure against plain Celery and other outboxes
	@$(BIN)/python -m benchmarks

clean: ## Remove .venv, .run and all caches
	@rm -rf .venv .run dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	@rm -f $@
	@name_one="celery-outbox needs Python 3.11 or newer; name one: make setup PYTHON=python3.12"; \
	found=$$($(PYTHON) -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])') \
		&& [ -n "$$found" ] || { echo "$(PYTHON) cannot be run. $$name_one" >&2; exit 1; }; \
	case $$found in \
		3.1[1-9].*|3.[2-9][0-9].*|[4-9].*) ;; \
		*) echo "$(PYTHON) is version $$found. $$name_one" >&2; exit 1;; \
	esac
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv || { \
		echo "$(PYTHON) cannot make a virtual environment: install its venv package" \
			"(Debian and Ubuntu: apt install python3-venv)" >&2; \
		exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
