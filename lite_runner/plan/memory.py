"""Memory estimates: of a job, settings that reduce it, and checks before anything is fetched."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from lite_runner.backends.seat import RunOptions, seat
from lite_runner.backends.step_sizes import SMALLEST_CACHE
from lite_runner.config.parallel import Ranks, cluster_of, ranks_of
from lite_runner.config.schema import (
    ComputeOptions,
    GenerateOptions,
    RunConfig,
    SamplingOptions,
    SessionOptions,
)
from lite_runner.errors import EnvironmentFault, RunnerError
from lite_runner.model.exported_model import exported_model
from lite_runner.model.files import ModelFiles
from lite_runner.model.locate import locate
from lite_runner.plan.backend import choose, run_options
from lite_runner.plan.job import Job, share
from lite_runner.plan.plan import Plan
from lite_runner.records import dataclass
from lite_runner.sizing.memory import (
    Memory,
    MemoryHint,
    check_memory,
    free_text,
    machine_memory,
    memory_remedy,
    parameter_count,
    readable,
    shortage,
)
from lite_runner.system import environment, memory
from lite_runner.weights.source import weights_to_fetch

ROOM = 0.9  # of the free memory, for what a run with chosen sizes holds
SHORTEST = 2048  # tokens: a shorter context is not chosen
WORTHWHILE = 0.95  # a hint must save 5 % at least


def job_memory(files: ModelFiles, options: RunOptions) -> Memory:
    """Memory of one rank by the backend that computes the run: on CPU of its process, else on its
    device."""
    return seat(choose(files, options).name).memory(files, options)


@dataclass(frozen=True)
class _Change:
    """A setting that may reduce memory, and the run with it."""

    setting: str
    files: ModelFiles
    options: RunOptions


def memory_hints(
    config: ComputeOptions,
    files: ModelFiles,
    job: Job,
    device: str,
    ranks: Ranks,
) -> list[MemoryHint]:
    """Settings with which the job needs less memory, the most effective first."""
    now = job_memory(files, run_options(config, job, device, ranks)).total
    found = []
    run = config, files, job, device, ranks
    for change in (*_cheaper(*run), *_smaller(*run)):
        try:
            then = job_memory(change.files, change.options)
        except RunnerError:  # the backend cannot do that, or quant_group does not divide a matrix
            continue
        if then.total < WORTHWHILE * now:
            found.append(MemoryHint(change.setting, then))
    return sorted(found, key=lambda hint: hint.need.total)


def _cheaper(
    config: ComputeOptions, files: ModelFiles, job: Job, device: str, ranks: Ranks
) -> Iterator[_Change]:
    """Settings with which weights and cache are of fewer bits."""
    changed: list[tuple[str, ComputeOptions]] = []
    if files.exported is None and not files.quantization.rounds:
        for quant in ("a16w8", "a16w4"):
            changed.append((f"quant={quant}", replace(config, quant=quant)))
        if config.rounded_dtype("CPU") == "float32":
            settings = replace(config.model.model_config, compute_dtype="float16")
            half = replace(config, model=replace(config.model, model_config=settings))
            changed.append(("model.model_config.compute_dtype=float16", half))
    if config.kv_cache != "int8":
        changed.append(("kv_cache=int8", replace(config, kv_cache="int8")))
    for setting, one in changed:
        quantized = replace(files, quantization=one.quantization)
        as_asked = files if one.quant == config.quant else quantized
        yield _Change(setting, as_asked, run_options(one, job, device, ranks))


def _smaller(
    config: ComputeOptions, files: ModelFiles, job: Job, device: str, ranks: Ranks
) -> Iterator[_Change]:
    """Settings with which the job is smaller."""

    def change(setting: str, slots: int, length: int) -> _Change:
        sized = replace(job, slots=slots, length=length)
        return _Change(setting, files, run_options(config, sized, device, ranks))

    if isinstance(config, SessionOptions):  # both together, as auto chooses them
        slots = range(1, job.slots + 1) if config.batch_key else [job.slots]
        chosen = fitted(config, files, job, device, slots, lengths_of(job.length))
        settings = " ".join(f"{key}={size}" for key, size in _sizes(config, chosen).items())
        yield change(settings, chosen.slots, chosen.length)
        return
    width = max(job.generation.num_beams, job.generation.num_return_sequences)
    if job.slots > width and config.batch_key:
        yield change(f"{config.batch_key}=1", width, job.length)
    half, prompt = job.length // 2, max(map(len, job.tokens), default=0)
    if half < SMALLEST_CACHE or half <= prompt or not config.length_key:
        return
    setting = f"{config.length_key}={half}"
    if isinstance(config, SamplingOptions) and config.max_new_tokens is not None:
        setting = f"max_new_tokens={half - prompt}"  # it wins over max_length
    yield change(setting, job.slots, half)


def fitted(
    config: ComputeOptions,
    files: ModelFiles,
    job: Job,
    device: str,
    slots: Sequence[int],
    lengths: Sequence[int],
    least: int = 1,
) -> Job:
    """The job with the sizes, of those allowed, that fit the free memory. See `choose_sizes`."""
    most = replace(job, slots=slots[-1], length=lengths[0])
    if device != "CPU" or len(slots) * len(lengths) == 1:
        return most
    options = run_options(config, most, device)
    chosen = seat(choose(files, options).name)
    if not chosen.elastic:
        return most

    def fits(rows: int, length: int) -> bool:
        need = chosen.memory(files, replace(options, slots=rows, length=length))
        lasting = replace(need, loading=0)
        return shortage(need) is None and shortage(lasting, room=ROOM) is None

    rows, length = choose_sizes(fits, slots, lengths, least)
    return replace(job, slots=rows, length=length)


def choose_sizes(
    fits: Callable[[int, int], bool], slots: Sequence[int], lengths: Sequence[int], least: int = 1
) -> tuple[int, int]:
    """The longest of `lengths` that fits with `least` rows, or with fewer where none does; and of
    `slots` the most rows that fit then. The least of both where nothing fits.

    `slots` ascends, `lengths` descends; what is smaller fits where more does.
    """
    if fits(slots[-1], lengths[0]):
        return slots[-1], lengths[0]
    enough = next((rows for rows in slots if rows >= least), slots[-1])
    for rows in dict.fromkeys((enough, slots[0])):
        for length in lengths:
            if fits(rows, length):
                fitting = bisect_left(slots, True, key=partial(_lacks, fits, length))
                return slots[fitting - 1], length
    return slots[0], lengths[-1]


def _lacks(fits: Callable[[int, int], bool], length: int, rows: int) -> bool:
    return not fits(rows, length)


def lengths_of(longest: int, shortest: int = SHORTEST) -> list[int]:
    """`longest`, and the powers of two below, by which caches grow."""
    powers = (1 << n for n in reversed(range(longest.bit_length())))
    return [longest, *(power for power in powers if shortest <= power < longest)]


def fitted_text(config: ComputeOptions, job: Job, wanted: Job) -> str:
    """The sizes chosen for a job that is `wanted` larger, as text."""
    pairs = zip(_sizes(config, job).items(), _sizes(config, wanted).values(), strict=True)
    less = [f"{key}={size} instead of {most}" for (key, size), most in pairs if size < most]
    return f"{', '.join(less)}: what fits in {free_text()}"


def _sizes(config: ComputeOptions, job: Job) -> dict[str, int]:
    """The settings that mean the sizes of a job."""
    width = max(job.generation.num_beams, job.generation.num_return_sequences)
    sizes = {config.batch_key: job.slots // width, config.length_key: job.length}
    return {key: size for key, size in sizes.items() if key}


ENOUGH_BYTES = 3.0  # of a parameter, on the average, for it to be a float32; below ...
HALF_BYTES = 1.5  # ... it has 16 bits, and below this fewer


def files_to_fetch(config: ComputeOptions) -> ModelFiles | None:
    """The model as a run would fetch it from the hub; None where it is here, or its size is not
    known. Of a model that no description is here of, config.json and tokenizer are fetched.
    """
    source = config.checkpoint_source
    if config.dry_run or config.in_mindformers or exported_model(config) is not None:
        return None
    if (size := weights_to_fetch(source)) is None:
        return None
    model = config.model_config() or locate(config, weights=False).model
    each = size / parameter_count(model)
    if each < HALF_BYTES:
        return None
    return ModelFiles(
        source,
        None,
        model,
        config.checkpoint_seed,
        quantization=config.quantization,
        stored="F16" if each < ENOUGH_BYTES else "F32",
    )


def check_before_fetching(config: ComputeOptions) -> ModelFiles | None:
    """As `files_to_fetch`. Raises EnvironmentFault where the memory does not suffice for the
    weights and one token."""
    if (files := files_to_fetch(config)) is None:
        return None
    device, ranks = environment.resolve_device(config.context.device_target), ranks_of(config)
    if device == "CPU":
        job = Job.without_prompts(1, 1)
        need = job_memory(files, run_options(config, job, device, ranks))
        hints = partial(memory_hints, config, files, job, device, ranks)
        if ranks.size > 1:
            check_machine(config, need, hints)
        else:
            check_memory(need, hints)
    return files


def check_ranks_fit(plan: Plan) -> None:
    """Raises EnvironmentFault where this machine cannot hold its ranks of a plan."""
    config, need, ranks = plan.config, plan.memory, plan.ranks
    assert need is not None
    if config.in_mindformers:
        check_machine(config, need)
    elif isinstance(config, GenerateOptions):
        first = share(config, plan.work, ranks)  # the first replica has the most prompts
        hints = partial(memory_hints, config, plan.model, first, plan.device, ranks)
        check_machine(config, need, hints)


def check_machine(
    config: RunConfig, rank: Memory, hints: Callable[[], Sequence[MemoryHint]] = list
) -> None:
    """Raises EnvironmentFault for too few devices or, on CPU, too little memory; `hints` is called
    only then."""
    device = environment.resolve_device(config.context.device_target)
    if device != "CPU":
        count, devices = cluster_of(config).local_worker_num, environment.ascend_devices()
        if count > devices:
            raise EnvironmentFault(
                f"{count} ranks on this machine need {count} Ascend devices, and it has {devices}",
                "a smaller parallel group, or more machines: parallel.local_worker_num=",
            )
        return
    need, free = machine_memory(config, rank), memory.free_memory()
    if need.total > free:
        raise EnvironmentFault(
            f"memory: {need}, need {readable(need.total)}, but {readable(free)} is free",
            memory_remedy(hints()),
        )
    if (found := shortage(rank)) is not None:  # a rank's own limit, of its address space
        raise EnvironmentFault(f"memory: each rank {found}", memory_remedy(hints()))
