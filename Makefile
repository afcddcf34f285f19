# Aliases; the commands work without make.
.PHONY: job test lint types clean

job:
	python3 benchmarks/finetune/run.py

test:
	python3 tests/run.py

lint:
	python3 tests/run.py --only lint

types:
	python3 tests/run.py --only types

clean:
	rm -rf .venv .cache out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
