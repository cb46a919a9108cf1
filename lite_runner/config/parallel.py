"""Ranks: how a job is divided, which machine starts which, and the validation errors of that."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from lite_runner.architectures import custom_network, undivided
from lite_runner.architectures.spec import Decoder
from lite_runner.config import Invalid, raise_errors
from lite_runner.config.prompts import STANDARD_INPUT, prompt_count, prompt_file
from lite_runner.config.schema import GenerateOptions, RunConfig, SaveStrategyOptions
from lite_runner.config.sections import Context
from lite_runner.records import dataclass
from lite_runner.system import environment

TABLE_VARIABLE = "RANK_TABLE_FILE"  # of Ascend, set by Kubernetes operators
SOCKET_VARIABLE = "LITE_RUNNER_EVENTS"  # path of our launcher's socket, if that started the rank


@dataclass(frozen=True)
class Ranks:
    """One rank among `data * tensor`; neighbours hold the shards of one replica of the model."""

    rank: int = 0
    data: int = 1  # replicas of the model, each with its own prompts (data parallel)
    tensor: int = 1  # ranks that share a replica (tensor parallel)

    @property
    def size(self) -> int:
        return self.data * self.tensor

    @property
    def data_index(self) -> int:
        return self.rank // self.tensor

    @property
    def tensor_index(self) -> int:
        return self.rank % self.tensor


@dataclass(frozen=True)
class Cluster:
    """The ranks of a job over machines (nodes) with the same number of ranks each."""

    worker_num: int  # ranks on all machines
    local_worker_num: int  # ranks on this one
    master_addr: str = "127.0.0.1"  # the machine with node_rank 0
    master_port: int | None = None  # None: a free one of this machine
    node_rank: int = 0

    @property
    def local_ranks(self) -> range:
        """The ranks that this machine starts."""
        first = self.node_rank * self.local_worker_num
        return range(first, first + self.local_worker_num)

    @property
    def is_master(self) -> bool:
        """True if rank 0, which prints and writes the results, is on this machine."""
        return self.node_rank == 0


def ranks_of(config: RunConfig) -> Ranks:
    """The config's ranks, seen from rank 0; one rank with use_parallel=false."""
    if not config.use_parallel:
        return Ranks()
    asked = config.parallel_config
    return Ranks(data=asked.data_parallel, tensor=asked.model_parallel)


def cluster_of(config: RunConfig) -> Cluster:
    """The ranks of a config that passed `cluster_errors`."""
    parallel, size = config.parallel, ranks_of(config).size
    return Cluster(
        worker_num=size,
        local_worker_num=parallel.local_worker_num or size,
        master_addr=parallel.master_addr,
        master_port=parallel.master_port,
        node_rank=parallel.node_rank,
    )


def starts_ranks(config: RunConfig) -> bool:
    """True if several ranks do the work."""
    several = config.on_ranks and ranks_of(config).size > 1
    alone = isinstance(config, SaveStrategyOptions) and config.only_save_strategy
    return several and not alone


def started_by_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """True if this process may be a rank: see `membership`, which is for those alone. A RANK_ID
    without a rank table or other ranks is left over."""
    several = TABLE_VARIABLE in environ or environ.get("RANK_SIZE", "1") != "1"
    return "MS_ROLE" in environ or ("RANK_ID" in environ and several)


def placed(context: Context, device: str, device_id: int, local_ranks: int) -> Context:
    """The section with this rank's device and, on CPU, its share of this machine's processors."""
    threads = context.threads
    if device == "CPU" and threads is None:
        threads = environment.cores(local_ranks)
    return replace(context, device_id=device_id, threads=threads)


def threads_beyond(config: RunConfig) -> str:
    """A note where what computes here has more threads than this process may use CPUs; ""
    elsewhere."""
    if not config.computes_here:
        return ""
    ranks = cluster_of(config).local_worker_num if starts_ranks(config) else 1
    threads, cores = config.context.threads, environment.cores()
    if threads is None or threads * ranks <= cores:
        return ""
    of_ranks = f" of each of {ranks} ranks" if ranks > 1 else ""
    return (
        f"context.threads={threads}{of_ranks}: this process may use {cores} CPU(s), by its affinity"
        " and the CPU quota of its cgroup; more threads than that wait for each other"
        f"\n  -> context.threads={environment.cores(ranks)}, or leave it out"
    )


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
    size = ranks_of(config).size
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
    "mslite": "graphs sharded over ranks are of one replica",
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
    ranks, whole_vocabulary = ranks_of(config).tensor, not config.vocab_parallel
    own = custom_network(model)
    if ranks > 1 and own and all(one.split == "none" for one in own.tensors(model)):
        yield Invalid(
            (*_KEYS, "model"),
            f"parallel_config.model_parallel: got {ranks}, expected 1: how the tensors of"
            f" {model.architecture}, which is registered, are sharded is not known;"
            " lite_runner.register(..., shard=) says it",
        )
        return
    if ranks > 1 and (why := undivided(model)):
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
