"""What backend=mindformers cannot do, by name: the real MindFormers generates by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lite_runner.config.cluster import ranks_of
from lite_runner.config.fields import Fault, fault
from lite_runner.config.options import AdapterOptions, ComputeOptions, GenerateOptions
from lite_runner.config.schema import RunConfig

KEY = "backend"


def mindformers_available_faults(config: RunConfig) -> Iterator[Fault]:
    """Run modes that backend=mindformers does not have."""
    if config.backend == "mindformers" and not config.runs_mindformers:
        yield fault(
            ("backend", "run_mode"),
            f"backend=mindformers is not available with run_mode={config.run_mode}; expected"
            " run_mode=predict, eval or export, or backend=ms",
        )


def without_mindformers(release: str) -> Fault:
    """A release of MindFormers, which does not compute."""
    key = "mindformers.release"
    return fault((key, KEY), f"{key}={release} has an effect only with backend=mindformers")


def mindformers_model_faults(config: ComputeOptions) -> Iterator[Fault]:
    """Of computing with a model, what MindFormers lacks."""
    if config.backend != "mindformers" or not config.runs_mindformers:
        return
    adapter = isinstance(config, AdapterOptions) and config.adapter_path
    exports = not isinstance(config, GenerateOptions)
    refused = {
        "parallel_config.model_parallel": (
            exports and ranks_of(config).tensor > 1,
            "ranks that share a model to export",
        ),
        "adapter_path": (adapter, "adapters of each prompt"),
        "model.model_config.pet_config": (config.merges_adapter, "an adapter in the checkpoint"),
        "quant": (config.quant not in (None, "none"), "quantized weights"),
        "kv_cache": (config.kv_cache != "fp32", "a cache of another type"),
        "context.mode": (config.context.mode == 1, "pynative mode"),
        "model.model_config.compute_dtype": (
            config.weights_dtype("CPU") == "bfloat16",
            "bfloat16",
        ),
    }
    yield from _refused(refused)


def mindformers_run_faults(config: GenerateOptions) -> Iterator[Fault]:
    """Options of a run that MindFormers lacks."""
    if config.backend != "mindformers" or not config.runs_mindformers:
        return
    options = config.generation()
    past = "model.model_config.use_past"
    refused = {
        "stop": (options.stop, "stop strings"),
        "logprobs": (options.logprobs is not None, "log-probabilities"),
        "prompt_logprobs": (options.prompt_logprobs is not None, "log-probabilities"),
        "min_p": (options.min_p > 0, "min_p"),
        "min_new_tokens": (options.min_new_tokens > 0, "min_new_tokens"),
        "num_return_sequences": (options.num_return_sequences > 1, "several texts of a prompt"),
        "length_penalty": (options.length_penalty != 1, "a length penalty"),
    }
    yield from mindformers_model_faults(config)
    yield from _refused(refused)
    if options.num_beams > 1 and config.use_past:
        yield fault(
            ("num_beams", past, KEY),
            f"num_beams={options.num_beams}: MindFormers' beam search has no cache; add"
            f" {past}=false",
        )


def _refused(refused: Mapping[str, tuple[object, str]]) -> Iterator[Fault]:
    """Keys that ask for something, and what that is."""
    for key, (asked, what) in refused.items():
        if asked:
            yield fault(
                (key, KEY), f"{key}: backend=mindformers has no {what}; backend=ms does this"
            )
