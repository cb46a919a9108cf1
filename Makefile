# `make help` lists the targets. PYTHON=... chooses the interpreter of a new environment.
SHELL_FILES := .ci/run $(wildcard scripts/*.sh)

.PHONY: help run mindspore test lite mindformers clients cluster lint docs wheel bundle reference reference-mindformers compare-llama-cpp bench bench-bfloat16 bench-scaling bench-offline bench-shard bench-parallel bench-slora bench-experts bench-gguf bench-stall bench-prefix bench-serve bench-loop bench-prefill soak chaos calls fuzz mutants lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-21s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

run:  ## set up without MindSpore, then predict with a real model; ARGS="max_new_tokens=64" adds overrides
	@scripts/setup.sh run
	@.venv/bin/python run_lite.py run_mode=predict model=smollm2_135m predict_data='The capital of France is' $(ARGS)

# Three more than there are processors, five at most: each takes a gigabyte or two.
WORKERS := from lite_runner.system.environment import cores; print(min(5, cores() + 3))

test:  ## set up, then lint, types, shell check and all tests
	@scripts/setup.sh lite --optional
	@$(MAKE) --no-print-directory lint
	@# Hundreds of child processes import the package: with bytecode each takes a third less.
	@# A file's fixtures, such as jobs of several ranks, are made once; the last files are short.
	@# More workers than cores: four of them leave a sixth of two cores idle, while they wait for
	@# ranks, servers and time-outs.
	@# One that crashes ends the run, as a failure: pytest-xdist starts another, then waits forever.
	@# NumPy's threads would spin for their next product, as in start_quickly of lite_runner/app.py.
	@# In huge pages MindSpore compiles a graph in four fifths of the time, on a slow memory in two
	@# thirds: its nodes lie all over the heap.
	@PYTHONDONTWRITEBYTECODE= OPENBLAS_THREAD_TIMEOUT=16 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
	.venv/bin/python -m pytest -n $$(.venv/bin/python -c "$(WORKERS)") \
	--dist loadfile --no-loadscope-reorder --max-worker-restart=0

mindspore:  ## set up MindSpore too: backend=ms, several ranks, exports
	@scripts/setup.sh mindspore

lite:  ## set up .venv-lite with MindSpore Lite, and its Python 3.7; PYTHON37=... chooses one
	@scripts/setup.sh lite

mindformers:  ## set up MindFormers 1.0.2, with its Python 3.9, and 1.9.0; PYTHON39=... chooses one
	@scripts/setup.sh mindformers
	@scripts/setup.sh mindspore
	@scripts/setup.sh mindformers-1.9

clients:  ## set up .venv-clients, whose programs the tests of the server speak through
	@scripts/setup.sh clients

cluster:  ## set up .venv-cluster, with the launchers of --multirun that the tests run
	@scripts/setup.sh run
	@scripts/setup.sh cluster

lint:  ## set up, then lint, types and shell check
	@scripts/setup.sh dev
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy
	.venv/bin/shellcheck $(SHELL_FILES)

docs:  ## set up, take the pictures, then build the documentation site in build/site; ARGS=serve shows it while you write
	@scripts/setup.sh run
	@scripts/setup.sh docs
	@.venv/bin/python -m scripts.pictures build/pictures
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs $(or $(ARGS),build --quiet) --strict
	@echo build/site/index.html

wheel:  ## set up, then build dist/*.whl, which installs without a compiler; PLATFORM=aarch64 crosses
	@scripts/setup.sh dev
	@$(if $(PLATFORM),CXX=$(PLATFORM)-linux-gnu-g++) .venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@for wheel in dist/*.whl; do .venv/bin/python scripts/sbom.py "$$wheel" >"$${wheel%.whl}.cdx.json"; done
	@ls dist/*.whl dist/*.cdx.json

bundle:  ## a folder that installs and runs a model without a network; ARGS="FOLDER model=... quant=..."
	@scripts/setup.sh dev
	@scripts/bundle.sh $(or $(ARGS),dist/bundle model=smollm2_135m)

reference:  ## make the references of the tests anew with torch and transformers, and compare
	@scripts/setup.sh peers
	@scripts/setup.sh mindspore
	@scripts/compare_fixtures.sh "$$(.venv/bin/python scripts/model_path.py smollm2_135m)"

reference-mindformers:  ## as reference, with the real MindFormers 1.0.2; it loads what is written here
	@scripts/setup.sh mindformers
	@scripts/setup.sh mindspore
	@scripts/compare_mindformers.sh

compare-llama-cpp:  ## compare logits of tiny GGUF files of every family with llama.cpp's; ARGS="qwen3 gemma" a few
	@scripts/setup.sh run
	@scripts/setup.sh peers
	@.venv-bench/bin/python -W ignore scripts/compare_llama_cpp.py $(ARGS)

# What bench and bench-scaling share: command templates, and the model as peers read it.
SIZES := --prompts {prompts} --new-tokens {new_tokens} --threads {threads}
FAST_OURS := .venv/bin/python benchmarks/ours.py $(SIZES)
LLAMA_CPP = .venv-bench/bin/python benchmarks/peer_llama_cpp.py --gguf '$$model' \
	--made build/gguf $(SIZES) --type
IK_LLAMA_CPP = $(LLAMA_CPP:--type=--fork --type)
GENAI := .venv-bench/bin/python benchmarks/peer_genai.py --huggingface build/genai/smollm2_135m \
	--made build/genai $(SIZES) --type

build/genai/smollm2_135m:
	@scripts/setup.sh run
	@.venv/bin/python run_lite.py run_mode=convert model=smollm2_135m \
	convert_format=huggingface convert_output=$@

bench: build/genai/smollm2_135m  ## measure float32, 8 and 4 bits against llama.cpp and others; draw docs/performance.svg
	@scripts/setup.sh run
	@scripts/setup.sh peers
	@mkdir -p build/bench
	@set -e; model=$$(.venv/bin/python scripts/model_path.py smollm2_135m); \
	table() { \
	  echo; name=$$1; shift; .venv/bin/python benchmarks/bench.py --ours "$$@" \
	    --json "build/bench/$$name-$${sizes%% *}.json" --prompt-tokens $$sizes $(ARGS); }; \
	for sizes in '128 --new-tokens 128 --batches 1 32' '512 --new-tokens 16 --batches 1' \
	  '2048 --new-tokens 16 --batches 1'; do \
	  table float32 "$(FAST_OURS) quant=none" --peer "$(LLAMA_CPP) F32" --peer "$(GENAI) fp32" \
	    --peer ".venv-bench/bin/python benchmarks/peer_transformers.py --gguf '$$model' $(SIZES)"; \
	  table 8-bits "$(FAST_OURS) quant=a16w8" --peer "$(FAST_OURS) quant=a8w8" \
	    --peer "$(LLAMA_CPP) Q8_0" --peer "$(IK_LLAMA_CPP) Q8_0"; \
	  table 4-bits "$(FAST_OURS) quant=a16w4" \
	    --peer "$(LLAMA_CPP) Q4_0" --peer "$(IK_LLAMA_CPP) Q4_0" --peer "$(GENAI) int4"; \
	done
	@.venv/bin/python benchmarks/picture.py docs/performance.svg \
	  build/bench/float32-128.json build/bench/8-bits-128.json build/bench/4-bits-128.json

bench-bfloat16: SHORT = quant=none model.model_config.compute_dtype=bfloat16
bench-bfloat16:  ## measure bfloat16 against llama.cpp and OpenVINO
	@scripts/setup.sh run
	@scripts/setup.sh peers
	@set -e; model=$$(.venv/bin/python scripts/model_path.py smollm2_135m); \
	for sizes in '128 --new-tokens 128' '512 --new-tokens 16' '2048 --new-tokens 16'; do \
	  echo; .venv/bin/python benchmarks/bench.py --ours "$(FAST_OURS) $(SHORT)" \
	    --peer "$(LLAMA_CPP) F16" --peer "$(LLAMA_CPP) BF16" \
	    --peer ".venv-bench/bin/python benchmarks/peer_openvino.py --gguf '$$model' \
	      --made build/gguf $(SIZES) --type bf16" \
	    --batches 1 --prompt-tokens $$sizes $(ARGS); \
	done

bench-scaling:  ## measure over batch and context, and draw docs/scaling.svg
	@scripts/setup.sh run
	@scripts/setup.sh peers
	@mkdir -p build docs
	@model=$$(.venv/bin/python scripts/model_path.py smollm2_135m) && \
	.venv/bin/python benchmarks/scaling.py --json build/scaling.json --svg docs/scaling.svg \
	--engine "$(FAST_OURS) quant=none" --engine "$(FAST_OURS) quant=a16w8" \
	--engine "$(LLAMA_CPP) F32" --engine "$(LLAMA_CPP) Q8_0" $(ARGS)

bench-offline: OURS = $(FAST_OURS) quant=none
bench-offline:  ## measure MindSpore Lite against the other engines and onnxruntime
	@scripts/setup.sh mindspore
	@scripts/setup.sh lite
	@scripts/setup.sh peers
	@.venv/bin/python benchmarks/bench.py --ours "$(OURS) backend=mslite engine=lite-worker" \
	--peer "$(OURS) backend=ms" \
	--peer ".venv-bench/bin/python benchmarks/peer_onnxruntime.py --onnx build/onnx --export-python \
	.venv/bin/python --prompts {prompts} --new-tokens {new_tokens} --threads {threads}" \
	--peer "$(OURS) backend=mslite engine=graph-cell export.layout=static_pair" $(ARGS)

bench-shard:  ## measure cutting and merging of checkpoints against MindSpore's own
	@scripts/setup.sh mindspore
	@.venv/bin/python benchmarks/shard.py $(ARGS)

bench-parallel:  ## measure two ranks that share a model, and one process
	@scripts/setup.sh mindspore
	@.venv/bin/python benchmarks/parallel.py $(ARGS)

bench-slora:  ## measure mixed LoRA adapters against the base, and against peft
	@scripts/setup.sh run
	@scripts/setup.sh peers
	@.venv/bin/python benchmarks/slora.py --peer ".venv-bench/bin/python benchmarks/peer_peft.py" \
	$(ARGS)

bench-experts: LLAMA_CPP = .venv-bench/bin/python benchmarks/peer_llama_cpp.py --made build/gguf \
	$(SIZES) --type file --gguf build/experts
bench-experts:  ## measure a mixture of experts and a dense model of its active size against llama.cpp
	@scripts/setup.sh dev
	@scripts/setup.sh peers
	@.venv/bin/python benchmarks/experts.py build/experts $(MODEL)
	@.venv/bin/python benchmarks/bench.py --batches 1 \
	--ours "$(FAST_OURS) model=build/experts/sparse.gguf" \
	--peer "$(FAST_OURS) model=build/experts/dense.gguf" \
	--peer "$(LLAMA_CPP)/sparse.gguf" --peer "$(LLAMA_CPP)/dense.gguf" $(ARGS)

bench-gguf: FILE = build/published/$$size-Q4_K_M.gguf
bench-gguf:  ## measure Q4_K_M files of published sizes, random weights, against llama.cpp
	@scripts/setup.sh run
	@scripts/setup.sh peers
	@.venv/bin/python benchmarks/published.py build/published
	@set -e; for size in qwen2.5_0.5b llama_7b; do \
	  .venv/bin/python benchmarks/bench.py --batches 1 --new-tokens 32 --vocabulary 32000 \
	    --ours "$(FAST_OURS) model=$(FILE)" \
	    --peer "$(FAST_OURS) model=$(FILE) quant=a16" \
	    --peer ".venv-bench/bin/python benchmarks/peer_llama_cpp.py --gguf $(FILE) \
	    --made build/gguf $(SIZES) --type file" $(ARGS); done

bench-stall:  ## measure how long others wait while a prompt of 4,000 tokens is read
	@scripts/setup.sh run
	@set -e; for quant in none a16w8; do \
	  .venv/bin/python benchmarks/stall.py quant=$$quant $(ARGS); done

bench-prefix:  ## measure 64 prompts that begin alike, with the prefix cache and without
	@scripts/setup.sh run
	@set -e; for quant in none a16w8; do \
	  .venv/bin/python benchmarks/prefix.py quant=$$quant $(ARGS); done

SERVE = .venv/bin/python run_lite.py run_mode=serve model={gguf} serve.port={port} seed=1 \
	context.threads={threads} serve.max_length=1024 serve.max_queue=1024 prefix_cache=auto
LLAMA_SERVER = build/llama.cpp/bin/llama-server --model {gguf} --port {port} --threads {threads} \
	--parallel 8 --ctx-size 8192
bench-serve:  ## measure the server under load against llama.cpp's and OpenVINO GenAI, and draw it
	@scripts/setup.sh dev
	@scripts/setup.sh peers
	@scripts/llama_server.sh
	@gguf=$$(.venv/bin/python scripts/model_path.py smollm2_135m) && \
	.venv/bin/python benchmarks/serve.py --gguf "$$gguf" --adapters 0 1 8 --prefixes own shared \
	  --json build/serve.json --page docs/performance.md --chart docs/serving_load \
	  --server "lite-runner=$(SERVE)" --server "lite-runner a16=$(SERVE) quant=a16" \
	  --server "llama.cpp=$(LLAMA_SERVER)" \
	  --server "OpenVINO=.venv-bench/bin/python benchmarks/openvino_server.py --gguf {gguf} \
	    --port {port} --threads {threads}" \
	  --server "lite-runner=$(SERVE) adapter_path={adapters}" \
	  --server "llama.cpp=$(LLAMA_SERVER) --lora-init-without-apply --lora {ggufs}" $(ARGS)

bench-loop:  ## measure what choosing the tokens costs, without a model
	@scripts/setup.sh run
	@.venv/bin/python benchmarks/token_loop.py $(ARGS)

bench-prefill:  ## measure prefill's share of the machine's peak, and attention's of its time
	@scripts/setup.sh run
	@.venv/bin/python benchmarks/prefill.py $(ARGS)

soak:  ## 20,000 requests to a server, many of them ill-behaved; its memory must stay flat
	@scripts/setup.sh dev
	@.venv/bin/python -m tests.serving.soak $(ARGS)

chaos:  ## stop, kill, starve a server and replicas on Ray under load, swap adapters; ARGS="--seconds 60 --seed 7"
	@scripts/setup.sh dev
	@scripts/setup.sh ray
	@.venv/bin/python -m fuzz.chaos $(ARGS)

calls:  ## force 10,000 tool calls of random schemas, of all families, and read them; ARGS=500 fewer
	@scripts/setup.sh dev
	@.venv/bin/python -m tests.serving.test_tool_formats $(or $(ARGS),10000)

fuzz:  ## read damaged files of every format for SECONDS=120; ARGS="--seed 7" repeats one
	@scripts/setup.sh dev
	@.venv/bin/python -m fuzz --seconds $(or $(SECONDS),120) $(ARGS)

mutants:  ## put 160 faults into a copy, one at a time, and say which the tests notice
	@scripts/setup.sh dev
	@.venv/bin/python scripts/mutants.py $(ARGS)

lock:  ## resolve requirements/lock.txt anew from setup.cfg
	@scripts/lock.sh

clean:  ## remove environments, caches and build folders; outputs/ stays
	rm -rf .venv .venv-bench .venv-clients .venv-cluster .venv-docs .venv-lite .venv-mindformers .venv-mindformers-1.9 .venv-ray .python3.* build dist *.egg-info lite_runner/native/operators.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
