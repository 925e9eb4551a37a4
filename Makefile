# One command each; every one sets up what it needs first and is quick when there is nothing to do.
#   make setup   install what is missing          make demo   the first process, end to end
#   make test    every check                      make bench  figures, as ratios (ARGS="mailbox", "launch", "calls",
#                                                            "state", "verify" or "recovery")
#   make faults  every write boundary: kills, power cuts, failures, broken variants (hours; ARGS="--quick" for minutes)
#   make kit     dist/report.zip: the report project with its clients packed beside it
.PHONY: setup demo test bench faults kit

setup:
	@.ci/setup

demo: setup
	@.ci/demo

test: setup
	@.ci/test $(ARGS)

bench: setup
	@[ "$(ARGS)" != calls ] || .ci/pinned-venv build/dbos .ci/bench-dbos.txt
	@[ "$(ARGS)" != launch ] || .ci/peers
	@.venv/bin/python -m tests.bench $(or $(ARGS),mailbox)

faults: setup
	@.venv/bin/python -m tests.faults $(ARGS)

kit: setup
	@.ci/kit
