# The same commands as in README.md and .ci/run.

.PHONY: demo test lint docs interop

demo:
	pip install -c constraints.txt . && specdec generate "Write a short story about a lighthouse keeper."

test:
	pip install -c constraints.txt '.[test]' && pytest

lint:
	pip install -c constraints.txt '.[lint]'
	ruff check
	ruff format --check
	mypy specdec

docs:
	pip install -c constraints.txt '.[docs]'
	mkdocs build --strict

interop:
	sh tests/interop/check_speculators.sh
