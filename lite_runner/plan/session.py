"""From a checked config to a backend that is ready: what every way to generate has in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lite_runner import progress
from lite_runner.architectures import custom_network
from lite_runner.architectures.spec import Decoder
from lite_runner.backends import ascend_context
from lite_runner.backends.base import Backend, Growing
from lite_runner.backends.likelihood import rows_at_once
from lite_runner.backends.step_sizes import step_capacity
from lite_runner.config.ascend import AscendSettings
from lite_runner.config.checks import fits_model
from lite_runner.config.fields import raise_faults
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.options import (
    AdapterSlotOptions,
    BatchOptions,
    ComputeOptions,
    Exported,
    ExportedOptions,
    GenerateOptions,
)
from lite_runner.config.prompt import Request
from lite_runner.config.ranks import Ranks
from lite_runner.generation import Request as GenerationRequest
from lite_runner.generation import check_lengths, longest_prompt, longest_sequence
from lite_runner.model import model_files
from lite_runner.model.adapters import AdapterJob, check_values, open_wanted, pieces_of, pool_bytes
from lite_runner.model.model_files import RANDOM, ModelFiles
from lite_runner.native.lora_pool import pool_size
from lite_runner.plan import footprint
from lite_runner.plan.operators import kernels_serve, open_backend, own_operators
from lite_runner.sizing.need import Lever, Memory, check_memory
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.weights.lora.adapter import Adapter
from lite_runner.weights.quantization.quantize import describe

PROMPTS_AT_ONCE = 32  # where predict_batch_size leaves it open


@dataclass(frozen=True)
class Job:
    """All that is known before a weight is read."""

    requests: Sequence[Request]  # none where the prompts came as tokens
    tokens: Sequence[Sequence[int]]  # of each prompt
    generation: GenerationConfig
    slots: int
    length: int  # tokens of the longest sequence, prompt and new ones
    first: int = 0  # index of the first prompt, where these are one copy's share
    adapters: AdapterJob | None = None  # None: the base model alone
    scores: bool = False  # logits after every token are wanted, not only after the last

    @property
    def each(self) -> list[GenerationConfig]:
        """The options of each prompt."""
        return options_of(self.generation, self.requests, len(self.tokens))

    @property
    def scored(self) -> bool:
        """Whether logits after tokens of prompts are wanted, not only after their last ones."""
        return self.scores or any(one.prompt_logprobs is not None for one in self.each)

    def asked(self, *, keep_logits: bool = False) -> list[GenerationRequest]:
        """The prompts as the scheduler takes them. One with a seed of its own draws as if it were
        the only one."""
        own = [request.seed is not None for request in self.requests] or [False] * len(self.tokens)
        return [
            GenerationRequest(
                np.array(tokens, np.int32),
                options,
                None if self.adapters is None else self.adapters.name(place),
                (options.seed, 0 if own[place] else self.first + place),
                priority=(self.requests[place].priority or 0) if self.requests else 0,
                keep_logits=keep_logits,
                name=f"prompt {self.first + place}",
            )
            for place, (tokens, options) in enumerate(zip(self.tokens, self.each, strict=True))
        ]

    def adapter_name(self, prompt_index: int) -> str | None:
        """Of a prompt's adapter; None: the base model."""
        return None if self.adapters is None else self.adapters.name(prompt_index - self.first)


def prepare(
    config: GenerateOptions,
    files: ModelFiles,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
) -> Job:
    """Encode the prompts and check that everything fits.

    Raises ConfigError, and ArtifactError for an adapter.
    """
    adapters = open_wanted(config, files.model, [request.adapter for request in requests])
    if config.chat:
        tokens = [tokenizer.encode_chat(request.chat(config.system)) for request in requests]
    else:
        tokens = [tokenizer.encode(request.text) for request in requests]
    job = fit(config, files, tokenizer, tokens, requests)
    if adapters is not None:
        check_values(adapters, files)
    return replace(job, adapters=adapters)


def fit(
    config: GenerateOptions,
    files: ModelFiles,
    tokenizer: Tokenizer | None,
    tokens: Sequence[list[int]],
    requests: Sequence[Request] = (),
) -> Job:
    """The job for prompts in token ids; without a tokenizer only the model says what ends a text.

    Raises ConfigError where something does not fit.
    """
    if config.model_config() is None:  # model=auto: checked only now that its sizes are known
        raise_faults(list(fits_model(config, files.model)))
    generation = config.generation(files.model)
    if config.eos_token_id is None and tokenizer is not None:
        ends = model_files.end_tokens(files.model, tokenizer)
        generation = replace(generation, eos_token_id=ends)
    context = files.model.seq_length
    each = options_of(generation, requests, len(tokens))
    if config.truncate == "left":
        bos = files.model.bos_token_id if tokenizer is None else tokenizer.bos_token_id
        longest = [longest_prompt(mine, context) for mine in each]
        cut = [truncated(ids, most, bos) for ids, most in zip(tokens, longest, strict=True)]
        if cut != tokens:
            progress.note(f"truncate=left: prompts cut to their last {min(longest)} tokens")
        tokens = cut
    check_lengths([len(ids) for ids in tokens], each, context)
    length = longest_of([len(ids) for ids in tokens], each, context)
    return Job(requests, tokens, generation, slots_for(config, generation, len(tokens)), length)


def estimate(config: GenerateOptions, files: ModelFiles, requests: Sequence[Request]) -> Job:
    """The job for prompts whose tokens are not known: as many as they have bytes, at most."""
    model = files.model
    generation = config.generation(model)
    sizes = [request.size(config.system) for request in requests]
    each = options_of(generation, requests, len(requests))
    length = min(model.seq_length, longest_of(sizes, each, model.seq_length))
    slots = slots_for(config, generation, len(requests))
    adapters = open_wanted(config, model, [request.adapter for request in requests])
    return Job(requests, [()] * len(requests), generation, slots, length, adapters=adapters)


def with_seed_of(job: Job, config: GenerateOptions) -> Job:
    """The job with the seed of the run, which another machine may have drawn."""
    return replace(job, generation=replace(job.generation, seed=config.seed or 0))


def truncated(ids: list[int], longest: int, bos: int | None) -> list[int]:
    """The last `longest` tokens of a prompt; a leading bos stays."""
    if len(ids) <= longest or longest < 2:
        return ids
    return [ids[0], *ids[1 - longest :]] if ids[0] == bos else ids[-longest:]


def options_of(
    shared: GenerationConfig, requests: Sequence[Request], prompts: int
) -> list[GenerationConfig]:
    """The options of each of so many prompts; those that came as tokens have none of their own."""
    return [request.options(shared) for request in requests] or [shared] * prompts


def longest_of(prompts: Sequence[int], each: Sequence[GenerationConfig], context: int) -> int:
    """Tokens of the longest sequence, of prompts of so many tokens with options of their own."""
    pairs = zip(prompts, each, strict=True)
    return max(longest_sequence(prompt, mine, context) for prompt, mine in pairs)


def slots_for(
    config: BatchOptions, generation: GenerationConfig, prompts: int, copies: int = 1
) -> int:
    """Sequences that one of the copies of the model computes at once."""
    width = max(generation.num_beams, generation.num_return_sequences)
    batch = config.predict_batch_size
    return min(prompts, batch // copies if batch else PROMPTS_AT_ONCE) * width


def share(config: GenerateOptions, job: Job, ranks: Ranks) -> Job:
    """The prompts of this rank's copy of the model: neighbours, as many as of the others or one
    more. The length stays that of the whole job, so that all copies compute alike."""
    copy, count = ranks.data_index, len(job.tokens)
    first, end = -(-count * copy // ranks.data), -(-count * (copy + 1) // ranks.data)
    return replace(
        job,
        requests=job.requests[first:end],
        tokens=job.tokens[first:end],
        slots=slots_for(config, job.generation, end - first, ranks.data),
        first=first,
        adapters=job.adapters and job.adapters.share(first, end),
    )


def adapter_slots_for(config: AdapterSlotOptions, job: Job) -> int:
    """Adapters to hold on the device at a time; by default as many as can run together."""
    if job.adapters is None:
        return 0
    together = job.slots // max(job.generation.num_beams, job.generation.num_return_sequences)
    return min(config.max_loaded_adapters or max(1, together), len(job.adapters.adapters))


def adapter_bytes(
    config: AdapterSlotOptions, model: Decoder, job: Job, device: str, ranks: Ranks
) -> int:
    """What the adapters of this rank's job take on its device."""
    if job.adapters is None:
        return 0
    slots, dtype = adapter_slots_for(config, job), config.compute_dtype(device)
    if config.adapter_dtype == "bf16":
        dtype = "bfloat16"
    return pool_bytes(job.adapters, config, model, ranks, slots, dtype)


def memory_need(
    config: ComputeOptions, files: ModelFiles, job: Job, device: str, ranks: Ranks
) -> Memory:
    """What this rank's `job` takes: on the CPU its process, on a device what is on that."""
    pool = 0
    if isinstance(config, AdapterSlotOptions):
        pool = adapter_bytes(config, files.model, job, device, ranks)
    if device != "CPU":
        return footprint.on_device(config, files, device, ranks, job.slots, job.length, pool)
    own = own_operators(config, files, device, ranks)
    if files.given is not None or config.backend == "mslite":
        return footprint.of_exported(config, files, job.slots, job.length)
    return footprint.of_run(
        config,
        files,
        ranks,
        own=own,
        slots=job.slots,
        length=job.length,
        adapters=pool,
        logits=_rows_of_logits(config, files.model, job),
    )


def _rows_of_logits(config: ComputeOptions, model: Decoder, job: Job) -> int:
    """Tokens after which a step gives logits, at most."""
    if not job.scored:
        return job.slots
    longest = max(job.length, step_capacity(job.slots))
    return rows_at_once(model.vocab_size, longest) if config.use_past else job.length


def memory_levers(
    config: ComputeOptions, files: ModelFiles, job: Job, device: str, ranks: Ranks
) -> list[Lever]:
    """Settings with which the job would need less; what is not offered together is left out."""
    own = device == "CPU" and own_operators(config, files, device, ranks)
    width = max(job.generation.num_beams, job.generation.num_return_sequences)

    def need(change: footprint.Change) -> Memory:
        slots = min(job.slots, width) if change.one_at_a_time else job.slots
        length = job.length // 2 if change.half_as_long else job.length
        smaller = replace(job, slots=slots, length=length)
        return memory_need(change.config, change.files, smaller, device, ranks)

    return footprint.levers(config, files, need, own=own, slots=job.slots, length=job.length)


def with_backend(config: Exported, files: ModelFiles, job: Job) -> Exported:
    """The config with backend=auto decided."""
    if config.backend != "auto":
        return config
    quantized = files.quantization.quant != "none" and files.given is None
    scored = job.scored and files.given is None
    if job.adapters is not None or quantized or scored:
        return replace(config, backend="ms")
    from lite_runner.export.cache import chosen_backend

    backend = chosen_backend(config, files, job.generation, slots=job.slots, length=job.length)
    return replace(config, backend=backend)


def load(
    config: ComputeOptions,
    files: ModelFiles,
    device: str,
    job: Job,
    tokenizer: Tokenizer | None = None,
    ranks: Ranks | None = None,
) -> Backend:
    """The backend with its weights, once it is sure that they fit.

    `ranks`, where there are several, must have met; whether all their parts fit is the launcher's
    to check. Exporting a model, where an offline backend has none yet, takes its `tokenizer` along.
    """
    ranks = ranks or Ranks()
    ascend_context.choose(AscendSettings.of(config.context), device, tell=ranks.rank == 0)
    if files.source == RANDOM and files.given is None and files.held is None:
        progress.note("load_checkpoint=random: the weights are noise, and so is the text")
    if isinstance(config, ExportedOptions) and config.backend == "mslite":
        from lite_runner.export.open import open_offline

        return open_offline(
            config,
            files,
            tokenizer,
            job.each,
            slots=job.slots,
            length=job.length,
            ranks=ranks,
        )
    own = kernels_serve(config, files, device, ranks)
    files = replace(files, rounded=config.rounded_dtype(device))
    if device == "CPU" and ranks.size == 1:
        check_memory(
            memory_need(config, files, job, device, ranks),
            lambda: memory_levers(config, files, job, device, ranks),
        )
    adapters: Sequence[Adapter] = ()
    if job.adapters is not None:
        adapters = pieces_of(job.adapters, config, files.model, ranks)
    lora = None
    if adapters and isinstance(config, AdapterSlotOptions):
        rounded = config.adapter_dtype == "bf16"
        lora = pool_size(adapters, adapter_slots_for(config, job), rounded=rounded)
    tensors = files.tensors(ranks, vocab_parallel=config.vocab_parallel)
    if files.quantization.quant != "none":
        progress.note(describe(tensors, files.quantization))
    name = f"load {files.path.name}" if files.path else "make random weights"
    if files.held is not None:
        name = "take the weights from the parameters"
    with progress.step(name, total=len(tensors), unit="tensors") as step:
        return open_backend(
            config,
            files,
            device,
            ranks,
            tensors,
            adapters,
            step.advance,
            own=own,
            slots=job.slots,
            length=job.length,
            lora=lora,
        )


def grown(
    backend: Backend, config: GenerateOptions, files: ModelFiles, device: str, job: Job
) -> bool:
    """Make room in a backend for what the job has, without reading a weight again; False where it
    cannot: for exported graphs, registered networks, and more adapters at a time than it holds.

    Raises EnvironmentFault where the larger cache does not fit.
    """
    if not isinstance(backend, Growing) or custom_network(files.model):
        return False
    if backend.adapters is not None and backend.adapters.slots < adapter_slots_for(config, job):
        return False
    if device == "CPU":
        info = backend.info
        held = replace(job, slots=info.slots, length=info.max_length)
        now, then = (memory_need(config, files, one, device, Ranks()).cache for one in (held, job))
        check_memory(Memory(0, max(0, then - now)))
    backend.grow(job.slots, job.length)
    return True
