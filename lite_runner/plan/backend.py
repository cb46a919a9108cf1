"""The backend of a run: choosing it, and growing a loaded one for a larger job."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from lite_runner import progress
from lite_runner.architectures import custom_network
from lite_runner.backends.base import Backend, Growing
from lite_runner.backends.seat import RunOptions, draft_of, seat
from lite_runner.config.parallel import Ranks
from lite_runner.config.schema import CompareOptions, ComputeOptions, asked_by_auto
from lite_runner.errors import ConfigError, RunnerError
from lite_runner.model.draft import draft_files
from lite_runner.model.files import ModelFiles
from lite_runner.plan.job import Job
from lite_runner.records import dataclass
from lite_runner.sizing.memory import Memory, cache_limit, check_memory
from lite_runner.text.tokenizer import Tokenizer

Computing = TypeVar("Computing", bound=ComputeOptions)


def run_options(
    config: ComputeOptions,
    job: Job,
    device: str,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
    tokenizer: Tokenizer | None = None,
) -> RunOptions:
    """The options of a backend for a job."""
    shared = job.generation
    return RunOptions(
        config=config,
        device=device,
        slots=job.slots,
        length=job.length,
        ranks=ranks,
        width=max(shared.num_beams, shared.num_return_sequences),
        generation=job.options,
        prompts=job.tokens,
        draft=draft_files(name, config.source) if (name := draft_of(config)) else None,
        prompt_logits=job.needs_prompt_logits,
        adapters=job.adapters,
        tokenizer=tokenizer,
    )


@dataclass(frozen=True)
class Choice:
    """The backend that computes a run."""

    name: str  # never "auto"
    why: str  # what computes, and what the backends before it object to

    @property
    def note(self) -> str:
        return f"backend={self.name}: {self.why}"


def choose(files: ModelFiles, options: RunOptions) -> Choice:
    """The backend that the config names; of auto the first without an objection.

    Raises ConfigError with what they object to where none can compute the run.
    """
    asked, device = options.config.backend, options.device
    names = asked_by_auto(device) if asked == "auto" else [asked]
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
    found = seat(name).unsupported(files, options)
    if options.config.context.reproducible and name != "native":
        return ["context.reproducible=true is of backend=native", *found]
    return found


def _another(files: ModelFiles, options: RunOptions, name: str) -> str:
    """The first other backend that can compute the run, as a remedy; empty: there is none."""
    for other in asked_by_auto(options.device):
        if other != name and not _objections(other, files, options):
            return f"backend={other} can"
    return ""


def others(files: ModelFiles, options: RunOptions) -> str:
    """The backends that the config does not name, each with what it objects to."""
    said = []
    for name in asked_by_auto(options.device):
        if name != options.config.backend:
            try:
                reasons = _objections(name, files, options)
            except RunnerError as error:
                reasons = [error.message]
            said.append(f"{name}: {', '.join(reasons) or 'could too'}")
    return "; ".join(said)


def resolve_backend(
    config: Computing, files: ModelFiles, options: RunOptions, *, tell: bool = True
) -> Computing:
    """The config with backend=auto resolved; unless with dry_run=true it is said what computes.

    Raises ConfigError as `choose`, and where the run is to be compared with the same backend.
    """
    choice = choose(files, options)
    if isinstance(config, CompareOptions) and config.compare_backend == choice.name:
        raise ConfigError(
            f"compare_backend={choice.name}: backend={config.backend} is {choice.name} here",
            _another(files, options, choice.name),
        )
    config = replace(config, backend=choice.name)
    if tell and not config.dry_run:
        progress.note(choice.note)
        if config.verbosity > 1:
            progress.detail(f"other backends: {others(files, replace(options, config=config))}")
    return config


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
        chosen = seat(options.config.backend)
        now, then = (chosen.memory(files, one) for one in (held, alone))
        need = Memory(0, max(0, then.cache - now.cache), more_cache=then.more_cache)
        check_memory(need)
        if (limit := cache_limit(need)) is not None:
            limit += then.cache - need.cache
    backend.grow(options.slots, options.length, limit)
    return True
