"""One process of ours on SmolLM2; prints one line of JSON.

The same path as `run_lite.py run_mode=predict`: command line, Hydra, checkpoint, tokenizer,
backend, token loop. Only the prompts come as token ids, so that both sides compute the same.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from measure import Measurement, mebibytes, peak_rss_mib, seconds_since_start

from lite_runner import environment, model_files, offline, progress, session
from lite_runner.backends.base import Row
from lite_runner.config.argv import parse
from lite_runner.config.compose import heads, resolve
from lite_runner.config.schema import RunConfig
from lite_runner.model_files import ModelFiles

NAMED = ("export.layout", "quant", "kv_cache")  # settings that an engine's name shows


def loaded(config: RunConfig, files: ModelFiles, job: session.Job) -> Path:
    """The checkpoint, or the exported model of the cache."""
    if config.backend != "mslite":
        assert files.path is not None
        return files.path
    want = offline.wanted_of_run(config, files, job.slots, job.length)
    return offline.folder_in_cache(files, config, want)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True, help="JSON: a list of ids a row")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="more settings, e.g. backend=mslite")
    arguments = parser.parse_args()
    prompts = json.loads(arguments.prompts.read_text())
    batch, length = len(prompts), len(prompts[0])

    overrides = [
        "model=smollm2_135m",
        f"max_new_tokens={arguments.new_tokens}",
        f"context.threads={arguments.threads}",
        "predict_data=ids",
        *arguments.overrides,
    ]
    config, _ = resolve(parse(overrides, heads()))
    progress.configure(verbosity=0)
    started = time.perf_counter()
    files = model_files.locate(config)
    tokenizer = model_files.tokenizer_of(config, files)
    job = session.Job(
        prompts=[],
        tokens=prompts,
        generation=config.generation(files.model),
        slots=batch,
        length=length + arguments.new_tokens,
    )
    device = environment.resolve_device(config.context.device_target)
    path = loaded(config, files, job)
    backend = session.load(config, files, device, job, tokenizer)
    load_s = time.perf_counter() - started

    backend.prepare()
    rows = [Row(slot, np.array(ids, np.int32), 0) for slot, ids in enumerate(prompts)]
    backend.forward(rows).argmax(-1)
    first_token_s = seconds_since_start()

    def step(tokens: np.ndarray, position: int) -> np.ndarray:
        ids = tokens[:, None].astype(np.int32)
        return backend.forward([Row(slot, ids[slot], position) for slot in range(batch)]).argmax(-1)

    step(np.zeros(batch), length)  # compiles; the prefill below starts over
    started = time.perf_counter()
    tokens = [backend.forward(rows).argmax(-1)]
    prefilled = time.perf_counter()
    for position in range(length, length + arguments.new_tokens - 1):
        tokens.append(step(tokens[-1], position))
    decoded = time.perf_counter()

    settings = (setting.partition("=") for setting in arguments.overrides)
    ways = [value for key, _, value in settings if key in NAMED]
    Measurement(
        engine=f"lite-runner ({', '.join([backend.engine, *ways])})",
        batch=batch,
        prompt_tokens=length,
        new_tokens=arguments.new_tokens,
        first_token_s=first_token_s,
        load_s=load_s,
        prefill_tok_s=batch * length / (prefilled - started),
        decode_tok_s=batch * (arguments.new_tokens - 1) / (decoded - prefilled),
        peak_rss_mib=peak_rss_mib(),
        disk_mib=mebibytes([path]),
        token_ids=np.stack(tokens, 1).tolist(),
    ).print()
    backend.close()


if __name__ == "__main__":
    main()
