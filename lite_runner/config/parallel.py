"""Ranks: how a job is divided, which machine starts which, and the validation errors of that."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from lite_runner.architectures import custom_network, unshardable
from lite_runner.architectures.spec import Decoder
from lite_runner.config import Invalid, raise_errors
from lite_runner.config.prompts import STANDARD_INPUT, prompt_count, prompt_file
from lite_runner.config.schema import GenerateOptions, RunConfig

TABLE_VARIABLE = "RANK_TABLE_FILE"  # of Ascend, set by Kubernetes operators
SOCKET_VARIABLE = "LITE_RUNNER_EVENTS"  # path of our launcher's socket, if that started the rank


def started_by_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """True if this process may be a rank; only then ask `membership`. A RANK_ID without a rank
    table or other ranks is left over."""
    several = TABLE_VARIABLE in environ or environ.get("RANK_SIZE", "1") != "1"
    return "MS_ROLE" in environ or ("RANK_ID" in environ and several)


def cluster_errors(config: RunConfig) -> Iterator[Invalid]:
    """Validation errors of the numbers of ranks and machines."""
    parallel = config.parallel
    given = {
        "worker_num": parallel.worker_num,
        "local_worker_num": parallel.local_worker_num,
        "master_port": parallel.master_port,
        "node_rank": parallel.node_rank,
        "log_dir": parallel.log_dir,
        "timeout": parallel.timeout,
    }
    if not config.use_parallel:
        for name, value in given.items():
            if value:
                yield _error(name, f"={value} {without_ranks(config)}")
        if parallel.rank_table_file:
            yield _error("rank_table_file", f" {without_ranks(config)}")
        return
    size = config.ranks.size
    asked = config.parallel_config
    if parallel.worker_num not in (None, size):
        yield _error(
            "worker_num",
            f": got {parallel.worker_num}, expected data_parallel={asked.data_parallel}"
            f" * model_parallel={asked.model_parallel} = {size}",
        )
        return
    local = parallel.local_worker_num or size
    if size % local:
        yield _error(
            "local_worker_num",
            f": got {local}, expected a divisor of the {size} ranks: every machine has as many",
        )
        return
    if parallel.node_rank >= size // local:
        machines = "the only machine" if size == local else f"{size // local} machines"
        yield _error(
            "node_rank",
            f": got {parallel.node_rank}, expected less than {size // local}: {size} ranks with"
            f" parallel.local_worker_num={local} are {machines}",
        )
    elif local < size and parallel.master_port is None:
        yield _error(
            "master_port",
            f" is missing: {size // local} machines must agree on one, e.g."
            " parallel.master_port=8118",
        )


def without_ranks(config: RunConfig) -> str:
    """The end of the error for a multi-rank setting in a run of one process."""
    if config.takes_parallel:
        return "has an effect only with use_parallel=true"
    return f"has no effect with run_mode={config.run_mode}, which is one process"


def _error(name: str, text: str) -> Invalid:
    return Invalid((f"parallel.{name}", "use_parallel", "parallel"), f"parallel.{name}{text}")


_KEYS = ("parallel_config.model_parallel", "parallel", "use_parallel")
_ONE_REPLICA = {  # backends without several replicas of a model that ranks share
    "mslite": "graphs sharded over ranks have one replica",
    "mindformers": "MindFormers shares one replica of a model over ranks",
}
DATA_KEYS = ("parallel_config.data_parallel", "parallel", "use_parallel")


def parallel_errors(config: RunConfig) -> Iterator[Invalid]:
    """Validation errors of the parallel group and of its machines, whatever the model."""
    yield from _size_errors(config)
    yield from cluster_errors(config)


def _size_errors(config: RunConfig) -> Iterator[Invalid]:
    asked = config.parallel_config
    sizes = {"data_parallel": asked.data_parallel, "model_parallel": asked.model_parallel}
    more = ", ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)
    if not config.use_parallel:
        if more:
            otherwise = ", or use_parallel=true" if config.takes_parallel else ""
            yield Invalid(
                ("parallel", "use_parallel"),
                f"parallel_config: got {more} with use_parallel=false; expected 1 each{otherwise}",
            )
        return
    if not config.takes_parallel:
        yield Invalid(
            ("parallel", "use_parallel", "run_mode"),
            f"use_parallel=true has no effect with run_mode={config.run_mode}",
        )


def replica_errors(config: GenerateOptions) -> Iterator[Invalid]:
    """Validation errors of the parallel group with the backend and the prompts."""
    asked = config.parallel_config
    if not config.use_parallel:
        return
    why = _ONE_REPLICA.get(config.backend)
    if why and min(asked.data_parallel, asked.model_parallel) > 1:
        yield Invalid(
            ("parallel", "use_parallel", "backend"),
            "parallel_config: data_parallel and model_parallel above 1 together need"
            f" backend=ms: {why}",
        )
    if not config.only_save_strategy:
        yield from _prompts(config)


def _prompts(config: GenerateOptions) -> Iterator[Invalid]:
    replicas, batch = config.parallel_config.data_parallel, config.predict_batch_size
    if batch and batch % replicas:
        yield Invalid(
            (*DATA_KEYS, "predict_batch_size"),
            f"predict_batch_size: got {batch}, expected a multiple of data_parallel={replicas}:"
            " replicas divide the batch",
        )
    data = config.predict_data
    if not data or data == STANDARD_INPUT or prompt_file(data) is not None:
        return
    prompts = 1 if isinstance(data, str) else prompt_count(data)
    if replicas > prompts:
        yield Invalid(
            (*DATA_KEYS, "predict_data"),
            f"parallel_config.data_parallel: got {replicas}, expected at most the {prompts}"
            f" {'prompt' if prompts == 1 else 'prompts'} of predict_data, which it divides;"
            " use_parallel=false runs one process",
        )


def division_errors(config: RunConfig, model: Decoder) -> Iterator[Invalid]:
    """Sizes of a model that model_parallel does not divide; the text names the degrees that do."""
    ranks, whole_vocabulary = config.ranks.tensor, not config.vocab_parallel
    own = custom_network(model)
    if ranks > 1 and own and all(one.split == "none" for one in own.tensors(model)):
        yield Invalid(
            (*_KEYS, "model"),
            f"parallel_config.model_parallel: got {ranks}, expected 1: how the tensors of"
            f" {model.architecture}, which is registered, are sharded is not known;"
            " lite_runner.register(..., shard=) says it",
        )
        return
    if ranks > 1 and (why := unshardable(model)):
        yield Invalid(
            (*_KEYS, "model"),
            f"parallel_config.model_parallel: got {ranks}, expected 1: {model.architecture} {why}",
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
    yield Invalid(
        (*_KEYS, "model"),
        f"parallel_config.model_parallel: got {ranks}, which does not divide {named}; expected one"
        f" of {', '.join(degrees)}{hint}",
    )


def check_divides(config: RunConfig, model: Decoder) -> None:
    """Raises ConfigError with the `division_errors`."""
    raise_errors(list(division_errors(config, model)))


def not_divided(model: Decoder, ranks: int, whole_vocabulary: bool) -> list[str]:
    """The sizes of a model that `ranks` cannot share evenly."""
    sizes = ("num_heads", "intermediate_size", "moe_intermediate_size")
    wrong = [name for name in sizes if (getattr(model, name) or 0) % ranks]
    # There are fewer key/value heads: several ranks may hold the same one.
    if model.n_kv_heads % ranks and ranks % model.n_kv_heads:
        wrong.append("n_kv_heads")
    if model.vocab_size % ranks and not whole_vocabulary:
        wrong.append("vocab_size")
    return wrong
