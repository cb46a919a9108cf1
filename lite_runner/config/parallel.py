"""Validation errors of the parallel group: how it divides a model and its prompts."""

from __future__ import annotations

from collections.abc import Iterator

from lite_runner.architectures import custom_network
from lite_runner.architectures.spec import Decoder
from lite_runner.config.cluster import cluster_faults, ranks_of
from lite_runner.config.fields import Fault, raise_faults
from lite_runner.config.options import GenerateOptions
from lite_runner.config.prompts import STANDARD_INPUT, prompt_count, prompt_file
from lite_runner.config.schema import RunConfig

_KEYS = ("parallel_config.model_parallel", "parallel", "use_parallel")
_ONE_REPLICA = {  # backends without several replicas of a model that ranks share
    "mslite": "graphs sharded over ranks are of one replica",
    "mindformers": "MindFormers shares one replica of a model over ranks",
}
DATA_KEYS = ("parallel_config.data_parallel", "parallel", "use_parallel")


def parallel_faults(config: RunConfig) -> Iterator[Fault]:
    """Validation errors of the parallel group and of its machines, whatever the model."""
    yield from _size_faults(config)
    yield from cluster_faults(config)


def _size_faults(config: RunConfig) -> Iterator[Fault]:
    asked = config.parallel_config
    if asked.pipeline_stage != 1:
        yield Fault(
            ("parallel_config.pipeline_stage", "parallel"),
            f"parallel_config.pipeline_stage: got {asked.pipeline_stage}, expected 1: layers are"
            " cut (model_parallel), not dealt out to stages",
        )
    sizes = {"data_parallel": asked.data_parallel, "model_parallel": asked.model_parallel}
    more = ", ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)
    if not config.use_parallel:
        if more:
            yield Fault(
                ("parallel", "use_parallel"),
                f"parallel_config: got {more} with use_parallel=false; expected 1 each, or"
                " use_parallel=true",
            )
        return
    if not config.takes_parallel:
        yield Fault(
            ("parallel", "use_parallel", "run_mode"),
            f"use_parallel=true has no effect with run_mode={config.run_mode}",
        )


def replica_faults(config: GenerateOptions) -> Iterator[Fault]:
    """Validation errors of the parallel group with the backend and the prompts."""
    asked = config.parallel_config
    if not config.use_parallel:
        return
    why = _ONE_REPLICA.get(config.backend)
    if why and min(asked.data_parallel, asked.model_parallel) > 1:
        yield Fault(
            ("parallel", "use_parallel", "backend"),
            "parallel_config: data_parallel and model_parallel above 1 together need"
            f" backend=ms: {why}",
        )
    if not config.only_save_strategy:
        yield from _prompts(config)


def _prompts(config: GenerateOptions) -> Iterator[Fault]:
    replicas, batch = config.parallel_config.data_parallel, config.predict_batch_size
    if batch and batch % replicas:
        yield Fault(
            (*DATA_KEYS, "predict_batch_size"),
            f"predict_batch_size: got {batch}, expected a multiple of data_parallel={replicas}:"
            " replicas divide the batch",
        )
    data = config.predict_data
    if not data or data == STANDARD_INPUT or prompt_file(data) is not None:
        return
    prompts = 1 if isinstance(data, str) else prompt_count(data)
    if replicas > prompts:
        yield Fault(
            (*DATA_KEYS, "predict_data"),
            f"parallel_config.data_parallel: got {replicas}, expected at most the {prompts}"
            f" {'prompt' if prompts == 1 else 'prompts'} of predict_data, which it divides;"
            " use_parallel=false runs one process",
        )


def division_faults(config: RunConfig, model: Decoder) -> Iterator[Fault]:
    """Sizes of a model that model_parallel does not divide; the text names the degrees that do."""
    ranks, whole_vocabulary = ranks_of(config).tensor, not config.vocab_parallel
    if ranks > 1 and custom_network(model):
        yield Fault(
            (*_KEYS, "model"),
            f"parallel_config.model_parallel: got {ranks}, expected 1: how the tensors of"
            f" {model.architecture}, which is registered, are sharded is not known",
        )
        return
    if ranks > 1 and not model.attention.qk_norm_by_head:
        yield Fault(
            (*_KEYS, "model"),
            f"parallel_config.model_parallel: got {ranks}, expected 1: {model.architecture} norms"
            " queries and keys over all heads, which ranks share",
        )
        return
    wrong = not_divided(model, ranks, whole_vocabulary)
    if not wrong:
        return
    degrees = [
        str(degree)
        for degree in range(1, model.num_heads + 1)
        if not not_divided(model, degree, whole_vocabulary)
    ]
    hint = ""
    if "vocab_size" in wrong:
        hint = "; parallel_config.vocab_emb_dp=true leaves the vocabulary whole on every rank"
    named = ", ".join(f"{name}={getattr(model, name)}" for name in wrong)
    yield Fault(
        (*_KEYS, "model"),
        f"parallel_config.model_parallel: got {ranks}, which does not divide {named}; expected one"
        f" of {', '.join(degrees)}{hint}",
    )


def check_divides(config: RunConfig, model: Decoder) -> None:
    """Raises ConfigError with the `division_faults`."""
    raise_faults(list(division_faults(config, model)))


def not_divided(model: Decoder, ranks: int, whole_vocabulary: bool) -> list[str]:
    """The sizes of a model that `ranks` cannot share evenly."""
    sizes = ("num_heads", "intermediate_size", "moe_intermediate_size")
    wrong = [name for name in sizes if (getattr(model, name) or 0) % ranks]
    # Key/value heads are fewer: several ranks may hold the same one.
    if model.n_kv_heads % ranks and ranks % model.n_kv_heads:
        wrong.append("n_kv_heads")
    if model.vocab_size % ranks and not whole_vocabulary:
        wrong.append("vocab_size")
    return wrong
