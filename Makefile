# Each target sets up what it needs: `make train` on a fresh machine with Python 3.11 or newer is enough.
PYTHON ?= python3
VENV ?= .venv
THREADS ?= 2
RUN = OMP_NUM_THREADS=$(THREADS) $(VENV)/bin/python
TEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(THREADS) --dist loadfile
TRAIN = $(VENV)/bin/torchrun --standalone --nproc_per_node=1 -m torchtitan.train --job.config_file

.PHONY: train compare lint check test lowest bench clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q "pip>=25.1"  # dependency groups
	$(VENV)/bin/pip install -q -c constraints.txt torch
	$(VENV)/bin/pip install -q -c constraints.txt -e ".[titan]" --group dev
	touch $@

train: $(VENV)/.installed
	OMP_NUM_THREADS=$(THREADS) $(TRAIN) titan_configs/harmonic_debug.toml
	$(RUN) -m fla_harmonic.titan.export --checkpoint outputs/harmonic_debug/checkpoint \
		--config_file titan_configs/harmonic_debug.toml --out outputs/harmonic_debug/hf
	$(RUN) -m eval.score --model outputs/harmonic_debug/hf
	$(RUN) -m eval.sample --model outputs/harmonic_debug/hf --out outputs/harmonic_debug/sample.txt

compare: $(VENV)/.installed
	$(RUN) -m eval.crossover --preset compare --stages shared --out outputs/compare

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# the fast loop: no test that starts a process
check: lint
	$(TEST) -m "not processes and not slow"

test: lint
	$(TEST)

lowest: $(VENV)/.installed
	$(VENV)/bin/nox -s lowest

bench: $(VENV)/.installed
	mkdir -p outputs/scan
	$(RUN) -m benchmarks.scan --threads $(THREADS) --rounds 9 --csv outputs/scan/scan.csv --png outputs/scan/scan.png

clean:
	rm -rf $(VENV) outputs
