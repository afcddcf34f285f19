# Aliases; the commands work without make.
.PHONY: job test lint clean

job:
	python3 benchmarks/finetune/run.py

test:
	python3 tests/run.py

lint:
	python3 tests/run.py -- tests/packaging/test_source.py

clean:
	rm -rf .venv .cache out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
