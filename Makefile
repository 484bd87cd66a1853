# One target for each thing a contributor does. `make ci` is what runs before a merge.
.PHONY: install lint types floors deps test completions docs ci

install:  ## this checkout, editable, with everything the other targets need
	pip install -e ".[test,dev,plots]"

lint:  ## style and format
	ruff check .
	ruff format --check .

types:  ## strict types
	mypy

floors:  ## a room imports from lower floors only
	lint-imports

deps:  ## declared dependencies are the imported ones
	deptry .

test:  ## the tests of this machine
	pytest

completions:  ## write completions/ anew
	python -m rlctl.cli.completion

docs:  ## write the help blocks of README.md and docs/cli.md, the key reference and the JSON Schema anew
	python -m rlctl.cli.help_blocks
	python -m rlctl.config.reference

ci:  ## all of it, in an environment of its own
	.ci/run
