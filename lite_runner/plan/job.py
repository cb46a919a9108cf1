"""A job: prompts as token ids, their options, and the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lite_runner import progress
from lite_runner.config.checks import check_fits
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.options import BatchOptions, GenerateOptions
from lite_runner.config.prefixes import check_prefixes, with_ending
from lite_runner.config.prompt import Request
from lite_runner.config.ranks import Ranks
from lite_runner.generation import Request as GenerationRequest
from lite_runner.generation import check_lengths, max_sequence_of, truncate_left
from lite_runner.model.adapters import AdapterJob, check_adapter_job, open_adapter_job
from lite_runner.model.files import ModelFiles
from lite_runner.model.tokenizer import end_tokens
from lite_runner.records import dataclass
from lite_runner.text.tokenizer import Tokenizer

DEFAULT_BATCH_SIZE = 32  # with predict_batch_size=null


@dataclass(frozen=True)
class Job:
    """All that is known before a weight is read."""

    requests: Sequence[Request]  # empty where prompts were given as token ids
    tokens: Sequence[Sequence[int]]  # of each prompt
    generation: GenerationConfig
    slots: int
    length: int  # tokens of the longest sequence, prompt and new ones
    first_index: int = 0  # index of the first prompt, of a replica's share
    adapters: AdapterJob | None = None  # None: the base model alone
    all_logits: bool = False  # logits of every prompt token are needed, not only of the last

    @classmethod
    def without_prompts(cls, slots: int, length: int) -> Job:
        """The sizes alone, of an export."""
        return cls((), (), GenerationConfig(), slots, length)

    @property
    def options(self) -> list[GenerationConfig]:
        """The options of each prompt."""
        return options_of(self.generation, self.requests, len(self.tokens))

    @property
    def texts(self) -> int:
        """How many completions the prompts get."""
        return len(self.tokens) * self.generation.num_return_sequences

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether logits of all prompt tokens are needed, not only of the last."""
        return self.all_logits or any(one.prompt_logprobs is not None for one in self.options)

    def scheduler_requests(self, *, keep_logits: bool = False) -> list[GenerationRequest]:
        """The prompts for the scheduler. One with its own seed samples as if it were alone."""
        own = [request.seed is not None for request in self.requests] or [False] * len(self.tokens)
        return [
            GenerationRequest(
                np.array(tokens, np.int32),
                options,
                None if self.adapters is None else self.adapters.name(place),
                (options.seed, 0 if own[place] else self.first_index + place),
                priority=(self.requests[place].priority or 0) if self.requests else 0,
                keep_logits=keep_logits,
                name=f"prompt {self.first_index + place}",
            )
            for place, (tokens, options) in enumerate(zip(self.tokens, self.options, strict=True))
        ]

    def adapter_name(self, prompt_index: int) -> str | None:
        """The adapter of a prompt; None: the base model."""
        return (
            None if self.adapters is None else self.adapters.name(prompt_index - self.first_index)
        )


def prepare(
    config: GenerateOptions,
    files: ModelFiles,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
) -> Job:
    """Tokenize the prompts and validate lengths and adapters.

    Raises ConfigError, and ArtifactError for an adapter.
    """
    adapters = open_adapter_job(config, files.model, [request.adapter for request in requests])
    if config.chat:
        tokens = [tokenizer.encode_chat(request.chat(config.system)) for request in requests]
    else:
        tokens = [tokenizer.encode(request.text) for request in requests]
    tokens = [with_ending(files.model.prefix, ids) for ids in tokens]
    job = fit(config, files, tokenizer, tokens, requests)
    if adapters is not None:
        check_adapter_job(adapters, files)
    return replace(job, adapters=adapters)


def fit(
    config: GenerateOptions,
    files: ModelFiles,
    tokenizer: Tokenizer | None,
    tokens: Sequence[list[int]],
    requests: Sequence[Request] = (),
) -> Job:
    """The job for prompts in token ids; without a tokenizer, eos ids are the model's alone.

    Raises ConfigError for prompts that do not fit the context.
    """
    if config.model_config() is None:  # model=auto: its sizes are known only now
        check_fits(config, files.model)
    generation = config.generation(files.model)
    if config.eos_token_id is None and tokenizer is not None:
        ends = end_tokens(files.model, tokenizer)
        generation = replace(generation, eos_token_id=ends)
    context = files.model.seq_length
    each = options_of(generation, requests, len(tokens))
    if config.truncate == "left":
        bos = files.model.bos_token_id if tokenizer is None else tokenizer.bos_token_id
        longest = [mine.max_prompt(context) for mine in each]
        cut = [truncate_left(ids, most, bos) for ids, most in zip(tokens, longest, strict=True)]
        if cut != tokens:
            progress.note(f"truncate=left: prompts cut to their last {min(longest)} tokens")
        tokens = cut
    check_lengths([len(ids) for ids in tokens], each, context)
    check_prefixes(files.model.prefix, tokens, each)
    length = max_sequence_of([len(ids) for ids in tokens], each, context)
    return Job(requests, tokens, generation, slots_for(config, generation, len(tokens)), length)


def estimate(config: GenerateOptions, files: ModelFiles, requests: Sequence[Request]) -> Job:
    """The job for prompts that cannot be tokenized: their bytes are an upper bound of tokens."""
    model = files.model
    generation = config.generation(model)
    sizes = [request.size(config.system) for request in requests]
    each = options_of(generation, requests, len(requests))
    length = min(model.seq_length, max_sequence_of(sizes, each, model.seq_length))
    slots = slots_for(config, generation, len(requests))
    adapters = open_adapter_job(config, model, [request.adapter for request in requests])
    return Job(requests, [()] * len(requests), generation, slots, length, adapters=adapters)


def with_run_seed(job: Job, config: GenerateOptions) -> Job:
    """The job with the run's seed, which rank 0 may have drawn."""
    return replace(job, generation=replace(job.generation, seed=config.seed or 0))


def options_of(
    shared: GenerationConfig, requests: Sequence[Request], prompts: int
) -> list[GenerationConfig]:
    """The options of each prompt; those given as token ids have no options of their own."""
    return [request.options(shared) for request in requests] or [shared] * prompts


def slots_for(
    config: BatchOptions, generation: GenerationConfig, prompts: int, replicas: int = 1
) -> int:
    """Sequences that one replica computes together."""
    width = max(generation.num_beams, generation.num_return_sequences)
    batch = config.predict_batch_size
    return min(prompts, batch // replicas if batch else DEFAULT_BATCH_SIZE) * width


def share(config: GenerateOptions, job: Job, ranks: Ranks) -> Job:
    """This replica's share of the prompts: consecutive and balanced. The length stays that of the
    whole job, so that all replicas compute alike."""
    replica, count = ranks.data_index, len(job.tokens)
    first, end = -(-count * replica // ranks.data), -(-count * (replica + 1) // ranks.data)
    return replace(
        job,
        requests=job.requests[first:end],
        tokens=job.tokens[first:end],
        slots=slots_for(config, job.generation, end - first, ranks.data),
        first_index=first,
        adapters=job.adapters and job.adapters.share(first, end),
    )
