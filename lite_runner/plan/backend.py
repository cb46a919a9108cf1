"""Choosing the backend of a run, and growing a loaded one for a larger job."""

from __future__ import annotations

from dataclasses import replace

from lite_runner import progress
from lite_runner.architectures import custom_network
from lite_runner.backends.base import Backend, Growing
from lite_runner.config.options import Exported, GenerateOptions
from lite_runner.config.ranks import Ranks
from lite_runner.model.files import RANDOM, ModelFiles
from lite_runner.plan.capacity import adapter_slots_for
from lite_runner.plan.job import Job
from lite_runner.plan.memory import job_memory
from lite_runner.plan.operators import uses_native_operators
from lite_runner.sizing.need import Memory, check_memory


def resolve_backend(
    config: Exported,
    files: ModelFiles,
    job: Job,
    device: str,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
) -> Exported:
    """The config with backend=auto resolved."""
    if config.backend != "auto":
        return config
    if _takes_packed(config, files, device, ranks):
        progress.note("backend=auto: mslite, in engine=native")
        return replace(config, backend="mslite", engine="native")
    quantized = files.quantization.rounds and files.exported is None
    needs_prompt_logits = job.needs_prompt_logits and files.exported is None
    if job.adapters is not None or quantized or needs_prompt_logits:
        return replace(config, backend="ms")
    from lite_runner.export.cache import chosen_backend

    backend = chosen_backend(config, files, job.generation, slots=job.slots, length=job.length)
    return replace(config, backend=backend)


def runs_packed(config: Exported, files: ModelFiles, device: str, ranks: Ranks) -> bool:
    """Whether the native kernels compute the run from packed layers, without MindSpore."""
    if config.backend == "auto" and files.exported is None:
        return _takes_packed(config, files, device, ranks)
    if files.exported is not None:
        return files.exported.manifest.layout == "packed"
    return config.backend == "mslite" and config.takes_packed


def _takes_packed(config: Exported, files: ModelFiles, device: str, ranks: Ranks) -> bool:
    """Whether backend=auto means packed layers in the cache."""
    infer = config.infer
    graph = (
        infer.model_dir or infer.prefill_model_path or infer.infer_seq_length or infer.model_type
    )
    return (
        config.engine in ("auto", "native")
        and config.export.layout in ("auto", "packed")
        and not (graph or infer.enc_key or config.model.model_config.is_sample_acceleration)
        and files.held is None
        and files.source != RANDOM  # noise needs no place on a disk
        and ranks.size == 1
        and config.compute_dtype(device) == "float32"
        and uses_native_operators(config, files, device, ranks)
    )


def grow_backend(
    backend: Backend, config: GenerateOptions, files: ModelFiles, device: str, job: Job
) -> bool:
    """Enlarge the KV cache of a backend for a job, without reloading weights; False where it cannot
    grow: exported graphs, registered networks, and more adapters than it has slots for.

    Raises EnvironmentFault where the larger cache does not fit.
    """
    if not isinstance(backend, Growing) or custom_network(files.model):
        return False
    if backend.adapters is not None and backend.adapters.slots < adapter_slots_for(config, job):
        return False
    if device == "CPU":
        info = backend.info
        held = replace(job, slots=info.slots, length=info.max_length)
        now, then = (job_memory(config, files, one, device, Ranks()).cache for one in (held, job))
        check_memory(Memory(0, max(0, then - now)))
    backend.grow(job.slots, job.length)
    return True
