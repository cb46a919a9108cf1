"""The plan of a run: everything that is resolved before weights are read, including its job.

A run mode makes and validates it; dry_run=true prints it. A job is prompts as token ids, their
options, and the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lite_runner import progress
from lite_runner.architectures.settings import TokenIds
from lite_runner.architectures.spec import Decoder
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.prompt import Request, check_prefixes, with_ending
from lite_runner.config.schema import ComputeOptions, ExportedOptions, RunConfig
from lite_runner.config.sections import ComputeSettings, Ranks
from lite_runner.errors import ConfigError
from lite_runner.generation import Adjustments, Guide, check_lengths, max_sequence_of, truncate_left
from lite_runner.generation import Request as GenerationRequest
from lite_runner.model import ModelFiles
from lite_runner.model.locate import end_tokens
from lite_runner.records import dataclass
from lite_runner.sizing import Memory, MemoryHint, align, memory_lines, model_lines, ranks_plan
from lite_runner.system import environment
from lite_runner.system.files import readable
from lite_runner.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lite_runner.model.adapters import AdapterJob
    from lite_runner.structured.grammars import Grammar

DEFAULT_BATCH_SIZE = 32  # of a job without a batch size


@dataclass(frozen=True)
class Job:
    """The work of a run: prompts, their options, sizes."""

    requests: Sequence[Request]  # empty where prompts were given as token ids
    tokens: Sequence[Sequence[int]]  # of each prompt
    generation: GenerationConfig
    slots: int
    length: int  # tokens of the longest sequence, prompt and new ones
    batch: int | None = None  # prompts to compute together; None: DEFAULT_BATCH_SIZE
    first_index: int = 0  # index of the first prompt, of a replica's share
    adapters: AdapterJob | None = None  # None: the base model alone
    all_logits: bool = False  # logits of every prompt token are needed, not only of the last
    # The grammar guide of each prompt, None without one; empty: no prompt has any. Not for other
    # processes.
    guides: Sequence[Callable[[], Guide] | None] = field(default=(), compare=False)

    @classmethod
    def without_prompts(cls, slots: int, length: int) -> Job:
        """The sizes alone, of an export."""
        return cls((), (), GenerationConfig(), slots, length)

    @property
    def options(self) -> list[GenerationConfig]:
        return options_per_prompt(self.generation, self.requests, len(self.tokens))

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


def with_ends(
    generation: GenerationConfig, given: TokenIds, model: Decoder, tokenizer: Tokenizer | None
) -> GenerationConfig:
    """The options with the end tokens: those `given`, else the model's and the tokenizer's."""
    if given is not None or tokenizer is None:
        return generation
    return replace(generation, eos_token_id=end_tokens(model, tokenizer))


def encoded(
    requests: Sequence[Request], files: ModelFiles, tokenizer: Tokenizer, *, chat: bool, system: str
) -> list[list[int]]:
    """The token ids of each prompt; with `chat` texts are messages, too."""
    tokens = [
        tokenizer.encode_chat(request.chat(system))
        if chat or request.messages
        else tokenizer.encode(request.text)
        for request in requests
    ]
    return [with_ending(files.model.prefix, ids) for ids in tokens]


def fit(
    generation: GenerationConfig,
    files: ModelFiles,
    tokenizer: Tokenizer | None,
    tokens: Sequence[list[int]],
    requests: Sequence[Request] = (),
    *,
    truncate: Literal["none", "left"] = "none",
    batch: int | None = None,
    structured: Mapping[str, Any],
) -> Job:
    """The job for prompts in token ids; `structured`: the grammar of those without their own, see
    `structured_options`. Raises ConfigError for prompts that do not fit the context."""
    context = files.model.seq_length
    each = options_per_prompt(generation, requests, len(tokens))
    if truncate == "left":
        bos = files.model.bos_token_id if tokenizer is None else tokenizer.bos_token_id
        longest = [mine.max_prompt(context) for mine in each]
        cut = [truncate_left(ids, most, bos) for ids, most in zip(tokens, longest, strict=True)]
        if cut != tokens:
            progress.note(f"truncate=left: prompts cut to their last {min(longest)} tokens")
        tokens = cut
    check_lengths([len(ids) for ids in tokens], each, context)
    check_prefixes(files.model.prefix, tokens, each)
    length = max_sequence_of([len(ids) for ids in tokens], each, context)
    slots = slots_for(generation, len(tokens), batch)
    job = Job(requests, tokens, generation, slots, length, batch)
    return with_guides(structured, job, files, tokenizer)


def estimate(
    generation: GenerationConfig,
    model: Decoder,
    requests: Sequence[Request],
    *,
    system: str = "",
    batch: int | None = None,
) -> Job:
    """The job for prompts that cannot be tokenized: their bytes are an upper bound of tokens."""
    sizes = [request.size(system) for request in requests]
    each = options_per_prompt(generation, requests, len(requests))
    length = min(model.seq_length, max_sequence_of(sizes, each, model.seq_length))
    slots = slots_for(generation, len(requests), batch)
    return Job(requests, [()] * len(requests), generation, slots, length, batch)


def grammars_of(
    shared: Mapping[str, Any], requests: Sequence[Request], prompts: int
) -> list[Grammar | None]:
    """The grammar of each prompt, `shared` for those without their own, checked as far as possible
    without a vocabulary; empty where there is none. Raises ConfigError, and EnvironmentFault
    without the package of grammars."""
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
    shared: Mapping[str, Any], job: Job, files: ModelFiles, tokenizer: Tokenizer | None
) -> Job:
    """The job with the grammars of its prompts compiled for the vocabulary. Raises ConfigError as
    `grammars_of`, and where the model cannot follow one."""
    grammars = grammars_of(shared, job.requests, len(job.tokens))
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

    ends, compiled = job.generation.eos_token_id, dict[str, Callable[[], Guide]]()
    compiler = compiler_for(tokenizer, files.model.vocab_size, ends)
    for grammar in grammars:
        if grammar is not None and grammar.lark not in compiled:
            compiled[grammar.lark] = compiler.compile(grammar)
    return replace(job, guides=[None if one is None else compiled[one.lark] for one in grammars])


def options_per_prompt(
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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A resolved run."""

    config: RunConfig  # for the run mode that made the plan
    device: str = "CPU"  # or "Ascend"
    why: str = ""  # the operators, and the reason for them
    dtype: str = ""  # of the weights in memory, as text
    ranks: Ranks = Ranks()
    files: ModelFiles | None = None  # the opened checkpoint, or exported model
    job: Job | None = None  # prompts as token ids, their options and adapters
    memory: Memory | None = None  # of one rank
    lines: Mapping[str, str] = field(default_factory=dict)  # of dry_run, by label
    table: tuple[str, ...] = ()  # printed after them
    # The opened tokenizer, and how long planning took.
    tokenizer: Tokenizer | None = field(default=None, compare=False, repr=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def model(self) -> ModelFiles:
        """The files; of a plan that has them."""
        assert self.files is not None
        return self.files

    @property
    def settings(self) -> ComputeSettings:
        """The settings that a backend takes; of a plan that computes."""
        assert isinstance(self.config, ComputeOptions)
        return self.config.settings

    @property
    def decoder(self) -> Decoder:
        """The model's sizes, from the config or else its files."""
        return self.config.model_config() or self.model.model

    @property
    def work(self) -> Job:
        """The job; of a plan that has one."""
        assert self.job is not None
        return self.job

    @property
    def writes_graphs(self) -> bool:
        """True for a run that writes an exported model."""
        return isinstance(self.config, ExportedOptions) and self.config.writes_graphs

    def text(self) -> str:
        """The text of dry_run=true."""
        return "\n".join([*align(self.lines), *self.table]) + "\n"

    def verified(self, ranks: Iterable[int]) -> Plan:
        """The plan for ranks that need not verify the shards they read: they are verified here,
        each once. Raises ArtifactError."""
        if self.files is None:
            return self
        every = [self.of_rank(rank).ranks for rank in ranks]
        files = self.files.verify(every, vocab_parallel=self.config.vocab_parallel)
        return replace(self, files=files)

    def of_rank(self, rank: int) -> Plan:
        return replace(self, ranks=replace(self.config.ranks, rank=rank))


def described(plan: Plan, hints: Callable[[], Sequence[MemoryHint]] = list) -> Plan:
    """The plan with the lines of dry_run=true; `hints` is called where memory does not suffice."""
    config, model, job, need = plan.config, plan.model.model, plan.work, plan.memory
    assert need is not None
    each = " in each rank" if config.use_parallel else ""
    cache = need.cache + need.more_cache
    lines = model_lines(config.run_mode, config.model_name, model, plan.model.location()) | {
        "weights": f"{readable(need.weights)} as {plan.dtype}{each}",
        "cache": f"{readable(cache)} for {job.slots} x {job.length} tokens{each}"
        if config.use_past
        else "none (use_past=false)",
    }
    if need.adapters:
        lines["adapters"] = f"{readable(need.adapters)} for those loaded at a time"
    if not need.process:
        lines["memory"] = (
            f"needs {readable(need.total)} on each device; how much one has is not known here"
        )
    elif not config.use_parallel:
        lines |= memory_lines(need, hints)
    lines["backend"] = f"{config.backend}: {plan.why}" if plan.why else config.backend
    lines |= {"device": plan.device, "ranks": str(plan.ranks.size), "output": config.output_dir}
    table: tuple[str, ...] = ()
    if config.use_parallel and config.on_ranks and not plan.writes_graphs:
        table = tuple(
            ranks_plan(
                config.cluster,
                model,
                need,
                device=plan.device,
                slots=job.slots,
                length=job.length,
                use_past=config.use_past,
                vocab_parallel=config.vocab_parallel,
            )
        )
    return replace(plan, lines={**lines, **plan.lines}, table=table)
