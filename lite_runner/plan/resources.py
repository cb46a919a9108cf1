"""Resources of a run: its backend, memory, sizes that fit, and settings that would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from lite_runner import profiler, progress
from lite_runner.architectures import custom_network
from lite_runner.architectures.quantization import Quant
from lite_runner.backends import SMALLEST_CACHE, Backend, Completer, Growing, RunOptions, seat
from lite_runner.config.schema import BACKENDS, CompareOptions, GenerateOptions
from lite_runner.config.sections import (
    RANDOM,
    AscendSettings,
    Cluster,
    ComputeSettings,
    ModelSource,
    Precision,
    Ranks,
)
from lite_runner.errors import ConfigError, EnvironmentFault, RunnerError
from lite_runner.model import ModelFiles
from lite_runner.model.locate import locate, not_here
from lite_runner.plan import Job, Plan, described
from lite_runner.records import dataclass
from lite_runner.sizing import (
    ROOM,
    Memory,
    MemoryHint,
    cache_limit,
    check_memory,
    free_text,
    machine_memory,
    memory_remedy,
    parameter_count,
    shortage,
)
from lite_runner.system import environment, memory
from lite_runner.system.files import readable
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.weights.source import weights_to_fetch


def run_options(
    settings: ComputeSettings,
    job: Job,
    device: str,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
    tokenizer: Tokenizer | None = None,
) -> RunOptions:
    shared, draft = job.generation, None
    if settings.draft_model:
        from lite_runner.model.draft import draft_files

        draft = draft_files(settings.draft_model, settings.source)
    return RunOptions(
        settings=settings,
        device=device,
        slots=job.slots,
        length=job.length,
        ranks=ranks,
        width=max(shared.num_beams, shared.num_return_sequences),
        generation=job.options,
        prompts=job.tokens,
        draft=draft,
        prompt_logits=job.needs_prompt_logits,
        adapters=job.adapters,
        tokenizer=tokenizer,
    )


@dataclass(frozen=True)
class Choice:
    """The backend that computes a run."""

    name: str  # never "auto"
    why: str  # the engine, and the objections of the backends before it

    @property
    def note(self) -> str:
        return f"backend={self.name}: {self.why}"


def _in_order(device: str) -> list[str]:
    """The backends in the order in which backend=auto asks them."""
    return sorted(BACKENDS, key=lambda name: device != "CPU" and name != "ms")


def choose(files: ModelFiles, options: RunOptions) -> Choice:
    """The named backend, or for auto the first without an objection. Raises ConfigError with their
    objections if none can compute the run.
    """
    asked, device = options.settings.backend, options.device
    names = _in_order(device) if asked == "auto" else [asked]
    found: dict[str, list[str]] = {}
    for name in names:
        if not (reasons := _objections(name, files, options)):
            what = seat(name).describe(files, options)
            since = "; ".join(f"{one}: {', '.join(why)}" for one, why in found.items())
            return Choice(name, f"{what}{since and f' ({since})'}")
        found[name] = reasons
    if asked != "auto":
        raise ConfigError(
            f"backend={asked} cannot compute this run: {'; '.join(found[asked])}",
            _another(files, options, asked),
        )
    every = "; ".join(f"backend={name}: {', '.join(reasons)}" for name, reasons in found.items())
    raise ConfigError(f"no backend can compute this run: {every}")


def _objections(name: str, files: ModelFiles, options: RunOptions) -> list[str]:
    """The reasons why a backend cannot compute a run."""
    settings, found = options.settings, seat(name)
    reasons = found.unsupported(files, options)
    if settings.embeds and not found.hidden_states:
        reasons = [f"run_mode={settings.run_mode}: it gives no hidden states", *reasons]
    if settings.context.reproducible and not found.reproducible:
        reasons = ["context.reproducible=true needs backend=native", *reasons]
    return reasons


def _another(files: ModelFiles, options: RunOptions, name: str) -> str:
    """A remedy that names the first other backend that can compute the run; "" without one."""
    for other in _in_order(options.device):
        if other != name and not _objections(other, files, options):
            return f"backend={other} can compute it"
    return ""


def others(files: ModelFiles, options: RunOptions) -> str:
    """The other backends, each with its objections."""
    lines = []
    for name in _in_order(options.device):
        if name != options.settings.backend:
            try:
                reasons = _objections(name, files, options)
            except RunnerError as error:
                reasons = [error.message]
            lines.append(f"{name}: {', '.join(reasons) or 'supported'}")
    return "; ".join(lines)


def resolve_backend(files: ModelFiles, options: RunOptions, *, tell: bool = True) -> RunOptions:
    """The options with backend=auto resolved; notes the choice, unless with dry_run=true. Raises
    ConfigError as `choose`, and if the run is to be compared with the same backend.
    """
    choice, settings = choose(files, options), options.settings
    if settings.compare_backend == choice.name:
        raise ConfigError(
            f"compare_backend={choice.name}: backend={settings.backend} is {choice.name} here",
            _another(files, options, choice.name),
        )
    options = replace(options, settings=replace(settings, backend=choice.name))
    if tell and not settings.dry_run:
        progress.note(choice.note)
        if settings.verbosity > 1:
            progress.detail(f"other backends: {others(files, options)}")
    return options


def grow_backend(backend: Backend, files: ModelFiles, options: RunOptions) -> bool:
    """Enlarge the KV cache of a backend for a job, without reloading weights; False where it cannot
    grow: exported graphs, registered networks, and more adapters than it has slots for.

    Raises EnvironmentFault where the larger cache does not fit.
    """
    if not isinstance(backend, Growing) or custom_network(files.model):
        return False
    if backend.adapters is not None and backend.adapters.slots < options.adapter_slots:
        return False
    limit = None
    if options.device == "CPU":
        info, alone = backend.info, replace(options, ranks=Ranks())
        held = replace(alone, slots=info.slots, length=info.max_length)
        chosen = seat(options.settings.backend)
        now, then = (chosen.memory(files, one) for one in (held, alone))
        need = Memory(0, max(0, then.cache - now.cache), more_cache=then.more_cache)
        check_memory(need)
        if (limit := cache_limit(need)) is not None:
            limit += then.cache - need.cache
    backend.grow(options.slots, options.length, limit)
    return True


SHORTEST = 2048  # tokens: a shorter context is not chosen
WORTHWHILE = 0.95  # a hint must save 5 % at least


def with_resources(plan: Plan, share: Job) -> Plan:
    """The plan with its engine, dtype and memory; with dry_run=true also the lines to print.

    `share` is the largest job of a replica. Raises ConfigError where the backend, or that of
    compare_backend=, cannot compute the run, EnvironmentFault if one of them is not installed.
    """
    config = plan.config
    if config.dry_run:
        verdicts = others(plan.model, options_of(plan, share))
        plan = replace(plan, lines={**plan.lines, "others": verdicts})
    if isinstance(config, CompareOptions) and (other := config.compared) is not None:
        _check_comparison(replace(plan, config=other), share)
    return with_seat(plan, share)


def with_seat(plan: Plan, share: Job) -> Plan:
    """As `with_resources`, by the plan's own backend alone."""
    files, options = plan.model, options_of(plan, share)
    chosen, dry_run = seat(options.settings.backend), options.settings.dry_run
    chosen.check(files, options)
    # Not needed to open an exported model; counting would read the checkpoint's header.
    asked = files.exported is None or dry_run or plan.ranks.size > 1
    plan = replace(
        plan,
        why=chosen.describe(files, options),
        dtype=chosen.dtype(files, options) if dry_run else "",
        memory=chosen.memory(files, options) if asked else None,
    )
    if dry_run:
        hints = partial(memory_hints, files, options)
        plan = described(replace(plan, job=share), hints)
        return replace(plan, table=(*plan.table, *chosen.details(files, options)))
    return plan


def _check_comparison(plan: Plan, share: Job) -> None:
    """Check that the backend of compare_backend= can compute its run. Raises ConfigError."""
    options = options_of(plan, share)
    name = options.settings.backend
    other = seat(name)
    # The checkpoint of an exported model is not located yet.
    if plan.model.exported is None and (why := other.unsupported(plan.model, options)):
        raise ConfigError(f"compare_backend={name}: {'; '.join(why)}")
    other.check(plan.model, options)


def options_of(plan: Plan, job: Job | None = None) -> RunOptions:
    """The options of a backend for the plan's job, or a replica's share of it."""
    return run_options(plan.settings, job or plan.work, plan.device, plan.ranks, plan.tokenizer)


def open_planned(plan: Plan) -> Backend:
    """The backend with its weights. Raises RunnerError."""
    return open_backend(plan.model, options_of(plan), plan.memory)


def open_run(plan: Plan, job: Job, folder: Path) -> Backend | Completer:
    """The backend with its weights, for a replica's share of the plan's job, or what takes its
    place; `folder`: of the run, for files of an engine. Raises RunnerError."""
    return _open(plan.model, replace(options_of(plan, job), folder=folder), plan.memory)


def open_backend(files: ModelFiles, options: RunOptions, need: Memory | None = None) -> Backend:
    """As `_open`, for a run whose rows a scheduler chooses."""
    opened = _open(files, options, need)
    assert not isinstance(opened, Completer), "see Seat.unsupported"
    return opened


def _open(
    files: ModelFiles, options: RunOptions, need: Memory | None = None
) -> Backend | Completer:
    """The backend that the settings name, not auto, with its weights.

    `need`: the memory of the run, if known. Several ranks must have joined; the launcher has
    checked that they fit together. Raises RunnerError.
    """
    ascend = AscendSettings.of(options.settings.context)
    if options.ranks.rank == 0 and (note := ascend.no_effect(options.device)):
        progress.note(note)
    if files.source == RANDOM and files.exported is None and files.held is None:
        progress.note("load_checkpoint=random: the weights are noise, and so is the text")
    chosen = seat(options.settings.backend)
    if chosen.elastic and options.device == "CPU" and options.ranks.size == 1:
        hints = partial(memory_hints, files, options)
        need = need or chosen.memory(files, options)
        check_memory(need, hints)
        options = replace(options, cache_bytes=cache_limit(need))
    with profiler.phase("read"):
        return chosen.open(files, options)


def job_memory(files: ModelFiles, options: RunOptions) -> Memory:
    """Memory of one rank by the backend that computes the run: on CPU of its process, else on its
    device."""
    return seat(choose(files, options).name).memory(files, options)


def memory_hints(files: ModelFiles, options: RunOptions) -> list[MemoryHint]:
    """Settings that would reduce the memory of a run, the most effective first."""
    now = job_memory(files, options).total
    found = []
    for setting, changed, asked in (*_cheaper(files, options), *_smaller(files, options)):
        try:
            then = job_memory(changed, asked)
        except RunnerError:  # the backend cannot do that, or quant_group does not divide a matrix
            continue
        if then.total < WORTHWHILE * now:
            found.append(MemoryHint(setting, then))
    return sorted(found, key=lambda hint: hint.need.total)


# A setting that may reduce memory, and the run with it.
_Change = tuple[str, ModelFiles, RunOptions]


def _cheaper(files: ModelFiles, options: RunOptions) -> Iterator[_Change]:
    """Settings for weights and cache of fewer bits."""
    settings = options.settings
    if files.exported is None and not files.quantization.rounds:
        quants: tuple[Quant, ...] = ("a16w8", "a16w4")
        for quant in quants:
            source = replace(settings.source, quant=quant)
            quantized = replace(files, quantization=source.quantization)
            changed = replace(settings, source=source)
            yield f"quant={quant}", quantized, replace(options, settings=changed)
        if settings.precision.rounded("CPU") == "float32":
            half = replace(settings, precision=Precision("float16"))
            key = "model.model_config.compute_dtype"
            yield f"{key}=float16", files, replace(options, settings=half)
    if settings.kv_cache != "int8":
        narrow = replace(settings, kv_cache="int8")
        yield "kv_cache=int8", files, replace(options, settings=narrow)


def _smaller(files: ModelFiles, options: RunOptions) -> Iterator[_Change]:
    """Settings for fewer rows or a shorter length."""
    asked, width = options.settings, options.width
    if asked.sizes_itself:
        slots = range(1, options.slots + 1) if asked.batch_key else [options.slots]
        chosen = fitted(files, options, slots, lengths_of(options.length))
        both = " ".join(f"{key}={size}" for key, size in _sizes(chosen).items())
        yield both, files, chosen
        return
    if options.slots > width and asked.batch_key:
        yield f"{asked.batch_key}=1", files, replace(options, slots=width)
    half, prompt = options.length // 2, max(map(len, options.prompts), default=0)
    if half < SMALLEST_CACHE or half <= prompt or not asked.length_key:
        return
    setting = f"{asked.length_key}={half}"
    if asked.max_new_tokens is not None:
        setting = f"max_new_tokens={half - prompt}"  # it wins over max_length
    yield setting, files, replace(options, length=half)


def fitted(
    files: ModelFiles,
    options: RunOptions,
    slots: Sequence[int],
    lengths: Sequence[int],
    least: int = 1,
) -> RunOptions:
    """The options with the largest of the allowed sizes that fit the free memory. See
    `choose_sizes`."""
    most = replace(options, slots=slots[-1], length=lengths[0])
    if options.device != "CPU" or len(slots) * len(lengths) == 1:
        return most
    chosen = seat(choose(files, most).name)
    if not chosen.elastic:
        return most

    def fits(rows: int, length: int) -> bool:
        need = chosen.memory(files, replace(options, slots=rows, length=length))
        lasting = replace(need, loading=0)
        return shortage(need) is None and shortage(lasting, room=ROOM) is None

    rows, length = choose_sizes(fits, slots, lengths, least)
    return replace(options, slots=rows, length=length)


def choose_sizes(
    fits: Callable[[int, int], bool], slots: Sequence[int], lengths: Sequence[int], least: int = 1
) -> tuple[int, int]:
    """The longest of `lengths` that fits with `least` rows, or else with fewer; and the largest of
    `slots` that fits then. The smallest of both if nothing fits.

    `slots` ascends, `lengths` descends; a smaller size fits wherever a larger one does.
    """
    if fits(slots[-1], lengths[0]):
        return slots[-1], lengths[0]
    enough = next((rows for rows in slots if rows >= least), slots[-1])
    for rows in dict.fromkeys((enough, slots[0])):
        for length in lengths:
            if fits(rows, length):
                return max(one for one in slots if fits(one, length)), length
    return slots[0], lengths[-1]


def lengths_of(longest: int, shortest: int = SHORTEST) -> list[int]:
    """`longest`, and the powers of two below it, in which caches grow."""
    powers = (1 << n for n in reversed(range(longest.bit_length())))
    return [longest, *(power for power in powers if shortest <= power < longest)]


def fitted_text(options: RunOptions, wanted: RunOptions) -> str:
    """The sizes chosen in place of the larger ones `wanted`, as text."""
    pairs = zip(_sizes(options).items(), _sizes(wanted).values(), strict=True)
    less = [f"{key}={size} instead of {most}" for (key, size), most in pairs if size < most]
    return f"{', '.join(less)} to fit in {free_text()}"


def _sizes(options: RunOptions) -> dict[str, int]:
    """The sizes of a run by their config keys."""
    batch, length = options.settings.batch_key, options.settings.length_key
    sizes = {batch: options.slots // options.width, length: options.length}
    return {key: size for key, size in sizes.items() if key}


ENOUGH_BYTES = 3.0  # average bytes of a parameter from which it counts as float32; below ...
HALF_BYTES = 1.5  # ... it has 16 bits, and below this fewer


def files_to_fetch(source: ModelSource) -> ModelFiles | None:
    """The model as a run would fetch it from the hub; None if it is here or its size is unknown.
    Fetches config.json and tokenizer of a model whose sizes are not known.
    """
    if source.dry_run or source.exported is not None:
        return None
    if (size := weights_to_fetch(source.checkpoint)) is None:
        return None
    model = source.model or locate(source, weights=False).model
    each = size / parameter_count(model)
    if each < HALF_BYTES:
        return None
    return replace(not_here(source, model), stored="F16" if each < ENOUGH_BYTES else "F32")


def check_before_fetching(
    settings: ComputeSettings,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
    cluster: Cluster | None = None,
) -> ModelFiles | None:
    """As `files_to_fetch`. Raises EnvironmentFault if the memory does not suffice for the weights
    and one token; `cluster`: of several ranks."""
    if settings.in_mindformers or (files := files_to_fetch(settings.source)) is None:
        return None
    device = environment.resolve_device(settings.context.device_target)
    if device == "CPU":
        options = run_options(settings, Job.without_prompts(1, 1), device, ranks)
        need, hints = job_memory(files, options), partial(memory_hints, files, options)
        if cluster is not None:
            check_machine(cluster, device, need, hints)
        else:
            check_memory(need, hints)
    return files


def check_ranks_fit(plan: Plan) -> None:
    """Raises EnvironmentFault if this machine cannot hold its ranks of a plan."""
    config, need = plan.config, plan.memory
    assert need is not None
    hints: Callable[[], Sequence[MemoryHint]] = list
    if isinstance(config, GenerateOptions) and not config.in_mindformers:
        first = plan.work.share(plan.ranks)  # the first replica has the most prompts
        hints = partial(memory_hints, plan.model, options_of(plan, first))
    elif not config.in_mindformers and config.run_mode != "finetune":
        return
    device = environment.resolve_device(config.context.device_target)
    check_machine(config.cluster, device, need, hints)


def check_machine(
    cluster: Cluster, device: str, rank: Memory, hints: Callable[[], Sequence[MemoryHint]] = list
) -> None:
    """Raises EnvironmentFault for too few devices or, on CPU, too little memory; only then `hints`
    is called."""
    if device != "CPU":
        count, devices = cluster.local_worker_num, environment.ascend_devices()
        if count > devices:
            raise EnvironmentFault(
                f"{count} ranks on this machine need {count} Ascend devices, and it has {devices}",
                "a smaller parallel group, or more machines: parallel.local_worker_num=",
            )
        return
    need, free = machine_memory(cluster, rank), memory.free_memory()
    if need.total > free:
        raise EnvironmentFault(
            f"memory: {need}, need {readable(need.total)}, but {readable(free)} is free",
            memory_remedy(hints()),
        )
    if (found := shortage(rank)) is not None:  # a rank's own limit, of its address space
        raise EnvironmentFault(f"memory: each rank {found}", memory_remedy(hints()))
