"""A job: prompts as token ids, their options, and the batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

import numpy as np

from lite_runner import progress
from lite_runner.architectures.spec import Decoder
from lite_runner.config.checks import check_fits
from lite_runner.config.generation import GenerationConfig, asked_of
from lite_runner.config.parallel import Ranks
from lite_runner.config.prompt import Request, check_prefixes, with_ending
from lite_runner.config.schema import GenerateOptions
from lite_runner.errors import ConfigError
from lite_runner.generation import Adjustments, Guide, check_lengths, max_sequence_of, truncate_left
from lite_runner.generation import Request as GenerationRequest
from lite_runner.model.files import ModelFiles
from lite_runner.model.tokenizer import end_tokens
from lite_runner.records import dataclass
from lite_runner.system import environment
from lite_runner.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lite_runner.model.adapters import AdapterJob
    from lite_runner.structured.grammars import Grammar

DEFAULT_BATCH_SIZE = 32  # of a job without a batch size


@dataclass(frozen=True)
class Job:
    """All that is known before a weight is read."""

    requests: Sequence[Request]  # empty where prompts were given as token ids
    tokens: Sequence[Sequence[int]]  # of each prompt
    generation: GenerationConfig
    slots: int
    length: int  # tokens of the longest sequence, prompt and new ones
    batch: int | None = None  # prompts to compute together; None: DEFAULT_BATCH_SIZE
    first_index: int = 0  # index of the first prompt, of a replica's share
    adapters: AdapterJob | None = None  # None: the base model alone
    all_logits: bool = False  # logits of every prompt token are needed, not only of the last
    # Of each prompt what restricts it to a grammar, None for nothing; empty: no prompt has any.
    # It stays in this process.
    guides: Sequence[Callable[[], Guide] | None] = field(default=(), compare=False)

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
        """Number of completions of all prompts."""
        return len(self.tokens) * self.generation.num_return_sequences

    @property
    def needs_prompt_logits(self) -> bool:
        """True if logits of all prompt tokens are needed, not only of the last."""
        return self.all_logits or any(one.prompt_logprobs is not None for one in self.options)

    def share(self, ranks: Ranks) -> Job:
        """A replica's share of the prompts: consecutive and balanced. The length stays that of the
        whole job, so that all replicas compute alike."""
        replica, count = ranks.data_index, len(self.tokens)
        first, end = -(-count * replica // ranks.data), -(-count * (replica + 1) // ranks.data)
        return replace(
            self,
            requests=self.requests[first:end],
            tokens=self.tokens[first:end],
            slots=slots_for(self.generation, end - first, self.batch, ranks.data),
            first_index=first,
            adapters=self.adapters and self.adapters.share(first, end),
            guides=self.guides[first:end],
        )

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
                adjustments=Adjustments(guide=self.guides[place]) if self.guides else None,
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
    tokens: Sequence[list[int]] | None = None,
) -> Job:
    """Tokenize the prompts and validate lengths and adapters; `tokens`: another rank has done so.

    Raises ConfigError, and ArtifactError for an adapter.
    """
    adapters = _opened_adapters(config, files.model, requests)
    if tokens is not None:
        job = fit(config, files, tokenizer, tokens, requests)
        return replace(job, adapters=adapters)
    tokens = [
        tokenizer.encode_chat(request.chat(config.system))
        if config.chat or request.messages
        else tokenizer.encode(request.text)
        for request in requests
    ]
    tokens = [with_ending(files.model.prefix, ids) for ids in tokens]
    job = fit(config, files, tokenizer, tokens, requests)
    if adapters is not None:
        adapters.check(files)
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
    batch = config.predict_batch_size
    slots = slots_for(generation, len(tokens), batch)
    job = Job(requests, tokens, generation, slots, length, batch)
    return with_guides(config, job, files, tokenizer)


def estimate(config: GenerateOptions, files: ModelFiles, requests: Sequence[Request]) -> Job:
    """The job for prompts that cannot be tokenized: their bytes are an upper bound of tokens."""
    model = files.model
    generation = config.generation(model)
    sizes = [request.size(config.system) for request in requests]
    each = options_of(generation, requests, len(requests))
    length = min(model.seq_length, max_sequence_of(sizes, each, model.seq_length))
    batch = config.predict_batch_size
    slots = slots_for(generation, len(requests), batch)
    adapters = _opened_adapters(config, model, requests)
    tokens = [()] * len(requests)
    return Job(requests, tokens, generation, slots, length, batch, adapters=adapters)


def _opened_adapters(
    config: GenerateOptions, model: Decoder, requests: Sequence[Request]
) -> AdapterJob | None:
    if not config.adapter_path:
        return None
    from lite_runner.model.adapters import open_adapter_job  # not for runs without

    return open_adapter_job(config, model, [request.adapter for request in requests])


def grammars_of(
    config: GenerateOptions, requests: Sequence[Request], prompts: int
) -> list[Grammar | None]:
    """The grammar of each prompt, checked as far as it shows without a vocabulary; empty where
    there is none. Raises ConfigError, and EnvironmentFault without the package of grammars."""
    shared = asked_of(vars(config))
    asked = [request.structured or shared for request in requests] or [shared] * prompts
    if not any(asked):
        return []
    environment.check_packages("serve")
    from lite_runner.structured.grammars import check, grammar_of

    found: list[Grammar | None] = []
    checked: set[str] = set()
    for place, one in enumerate(asked):
        try:
            found.append(grammar := grammar_of(one))
            if grammar is not None and grammar.lark not in checked:
                check(grammar)
                checked.add(grammar.lark)
        except ConfigError as error:
            where = "" if one is shared else f"prompt {place}: "
            raise ConfigError(f"{where}{error.message}", error.hint) from None
    return found if any(found) else []


def with_guides(
    config: GenerateOptions, job: Job, files: ModelFiles, tokenizer: Tokenizer | None
) -> Job:
    """The job with the grammars of its prompts compiled for the vocabulary. Raises ConfigError as
    `grammars_of`, and where the model cannot follow one."""
    grammars = grammars_of(config, job.requests, len(job.tokens))
    first = next((grammar for grammar in grammars if grammar is not None), None)
    if first is None:
        return job
    if tokenizer is None:
        raise ConfigError(f"{first.field} needs a tokenizer, and the checkpoint has none")
    if files.exported is not None and files.exported.manifest.sampled:
        raise ConfigError(
            f"{first.field}: the exported model chooses the likeliest token itself"
            " (is_sample_acceleration)",
            "export it without model.model_config.is_sample_acceleration",
        )
    from lite_runner.structured.grammars import compiler_for

    ends, made = job.generation.eos_token_id, dict[str, Callable[[], Guide]]()
    compiler = compiler_for(tokenizer, files.model.vocab_size, ends)
    for grammar in grammars:
        if grammar is not None and grammar.lark not in made:
            made[grammar.lark] = compiler.compile(grammar)
    return replace(job, guides=[None if one is None else made[one.lark] for one in grammars])


def options_of(
    shared: GenerationConfig, requests: Sequence[Request], prompts: int
) -> list[GenerationConfig]:
    """The options of each prompt; those given as token ids have no options of their own."""
    return [request.options(shared) for request in requests] or [shared] * prompts


def slots_for(
    generation: GenerationConfig, prompts: int, batch: int | None, replicas: int = 1
) -> int:
    """Sequences that one replica computes together."""
    width = max(generation.num_beams, generation.num_return_sequences)
    return min(prompts, batch // replicas if batch else DEFAULT_BATCH_SIZE) * width
