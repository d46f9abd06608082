PYTHON ?= python3
BIN := .venv/bin
# Transformers 5.17 with what it needs that the newest does not.
OLDEST := transformers==5.17.0 'huggingface-hub<2' httpx httpcore h11 anyio certifi idna
OLDEST_TESTS := $(addprefix tests/model/test_,cache.py config.py files.py generate.py)

.PHONY: reproduce test lint test-oldest bench clean

reproduce: .venv/ready
	$(BIN)/qed reproduce --preset laptop

# Two processes of one thread each: small tensors gain nothing from more.
test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Caches, generation and files once more on the oldest Transformers that pyproject.toml admits, laid over the same environment.
test-oldest: .venv/oldest/ready
	OMP_NUM_THREADS=1 PYTHONPATH=.venv/oldest $(BIN)/python -m pytest -n 2 $(OLDEST_TESTS)

bench: .venv/ready
	$(BIN)/python benchmarks/cpu.py

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[dev]'
	touch $@

.venv/oldest/ready: .venv/ready
	rm -rf .venv/oldest
	$(BIN)/pip install -q --no-deps --no-compile --target .venv/oldest $(OLDEST)
	touch $@

clean:
	rm -rf .venv runs build dist
