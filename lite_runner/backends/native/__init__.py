"""backend=native: this project's own CPU kernels, without MindSpore."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lite_runner import native, progress
from lite_runner.architectures.quantization import CacheType, Quantization
from lite_runner.architectures.spec import Decoder
from lite_runner.backends import RunOptions, Seat, rows_at_once, step_capacity, unchunked
from lite_runner.backends.native.backend import NativeBackend, slot_bytes, state_bytes
from lite_runner.backends.native.packed_cache import (
    entry_of,
    is_cached,
    packed_memory,
    packed_model,
)
from lite_runner.config import bytes_of
from lite_runner.model import ModelFiles
from lite_runner.native import fingerprint
from lite_runner.native.model import NativeOptions, unsupported
from lite_runner.native.structs import Packed, Share
from lite_runner.sizing import PROCESS as WITH_MINDSPORE
from lite_runner.sizing import Memory

if TYPE_CHECKING:
    from lite_runner.native.peers import Peers
    from lite_runner.weights.lora.adapter import LoraSize

CACHE: CacheType = "fp16"  # of keys and values, by default
PROCESS = 110 << 20  # Python with NumPy, the tokenizer and Hydra; measured


class Native(Seat):
    """See `lite_runner.backends.Seat`."""

    elastic = reproducible = hidden_states = True

    def unsupported(self, files: ModelFiles, options: RunOptions) -> list[str]:
        settings = options.settings
        reasons = []
        if options.device != "CPU":
            reasons.append(f"its kernels are for CPUs, got {options.device}")
        if error := native.unusable():
            reasons.append(f"its kernels {error.why} -> {error.remedy}")
        if files.exported is not None:
            reasons.append(f"{files.exported.folder} is an exported model, without a checkpoint")
        if settings.context.mode == 1:
            reasons.append("context.mode=1 runs MindSpore's operators one by one")
        if not settings.use_past:
            reasons.append("model.model_config.use_past=false turns off the KV cache")
        if setting := options.speculates:
            if options.ranks.tensor > 1:
                reasons.append(f"{setting}: not supported with tensor parallelism")
            if _keys_change(files.model):
                reasons.append(f"{setting}: this model's keys change with the text's length")
            if options.predicts_next and (why := _without_next_token(files)):
                reasons.append(f"{setting}: {why}")
        if options.draft is not None:
            if options.ranks.tensor > 1:
                reasons.append("draft_model: not supported with tensor parallelism")
            if _keys_change(files.model) or _keys_change(options.draft.model):
                reasons.append("draft_model: keys of a model change with the text's length")
            drafts = unsupported(options.draft.model)
            reasons += [f"draft_model={options.draft.location()}: {why}" for why in drafts]
        return reasons + unsupported(files.model)

    def check(self, files: ModelFiles, options: RunOptions) -> None:
        if options.draft is not None:
            from lite_runner.model.draft import check_vocabulary

            check_vocabulary(options.draft, files, options.tokenizer)

    def memory(self, files: ModelFiles, options: RunOptions) -> Memory:
        """See Seat. Measured: mapped layers take no more than those packed in memory."""
        need = self._memory(files, options)
        draft = _next_token_files(files) if options.predicts_next else options.draft
        if draft is None:
            return need
        return _together(need, self._memory(draft, options.of_draft(draft)))

    def _memory(self, files: ModelFiles, options: RunOptions) -> Memory:
        """Without that of the draft model."""
        model, slots, length = files.model, options.slots, options.length
        share, local = _share(options), files.model.shard(options.ranks.tensor)
        # A dry run does not look into the cache, so that it always gives the same.
        cached = options.settings.context.cache and not options.settings.dry_run
        weights, loading = packed_memory(
            _as_computed(files, options), options.ranks, share, cached=cached
        )
        rows = slots
        if options.prompt_logits:
            capacity = step_capacity(slots, unchunked(model, length))
            rows = rows_at_once(model.vocab_size, max(length, capacity))
        slot = slot_bytes(local, slots, length, options.settings.kv_cache or CACHE)
        slot += state_bytes(model)
        # Ranks make the same schedule, so all need the same memory.
        least = min(slots, options.width) if options.ranks.size == 1 else slots
        return Memory(
            weights,
            least * slot,
            options.adapter_bytes(model),
            process=PROCESS if options.ranks.size == 1 else WITH_MINDSPORE,  # by which ranks meet
            loading=loading,
            work=_step_bytes(model, slots, length)
            + 2 * 4 * rows * model.vocab_size
            + _written_later(options),
            more_cache=(slots - least) * slot,
        )

    def describe(self, files: ModelFiles, options: RunOptions) -> str:
        return f"lite-runner's own kernels ({native.instructions()})"

    def dtype(self, files: ModelFiles, options: RunOptions) -> str:
        from lite_runner.weights.quantization.quantize import block_types

        if files.quantization.rounds:
            return f"integers (quant={files.quantization})"
        tensors = replace(_as_computed(files, options), verified=True).tensors().values()
        if types := block_types(tensors):
            # MXFP4, NVFP4, TQ and IQ of up to 3 bits are indices here, with 16 bits in any case.
            rounded = files.quantization.rounds_inputs and any(one.blocks for one in tensors)
            bits = 8 if rounded else 16
            inputs = f", inputs of {bits} bits" if files.gguf is not None else ""
            return f"{', '.join(types)} as the file has them{inputs}"
        names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        found = {names[tensor.dtype] for tensor in tensors if len(tensor.shape) > 1}
        return " and ".join(sorted(found))

    def quantization(self, files: ModelFiles) -> Quantization:
        return files.quantization

    def provenance(self) -> dict[str, str]:
        return {"kernels": f"{native.instructions()}, sources {fingerprint.sources()[:16]}"}

    def open(self, files: ModelFiles, options: RunOptions) -> NativeBackend:
        settings = options.settings
        self.check(files, options)
        draft, next_token = None, None
        if options.draft is not None:
            draft = self.open(options.draft, options.of_draft(options.draft))
        dtype = settings.precision.rounded(options.device)
        quantized, blocks = files.quantization.rounds, files.quantization.keeps_blocks
        if dtype != "float32" and (quantized or blocks):
            from lite_runner.weights.quantization.quantize import describe_dtype

            progress.note(describe_dtype(dtype, quantized=quantized, blocks=blocks))
        if options.ranks.size > 1:
            from lite_runner.native.peers import bind_to_node

            local = options.local_ranks
            bind_to_node(options.ranks.rank % local, local)
        adapters, lora = options.rank_adapters(files.model)
        peers = _met(options) if options.ranks.tensor > 1 else None
        name = settings.draft_model or "" if options.is_draft else settings.source.name
        layers = _packed(files, options, name, lora)
        if options.predicts_next:
            from lite_runner.backends.native.next_token import NextToken

            own = _next_token_files(files)
            packed = _packed(
                own, options, f"{settings.source.name}'s layer for multi-token prediction"
            )
            next_token = partial(NextToken, own.model, packed)
        learned = None
        if files.learned_keys is not None:
            from lite_runner.model.learned_keys import learned_keys

            same = settings.context.reproducible
            learned = learned_keys(files.learned_keys, files.model, reproducible=same)
        cache = settings.kv_cache or CACHE
        sizes = NativeOptions(options.slots, options.length, cache, lora, options.cache_bytes)
        store = None
        if stores_prefixes(files, options):
            from lite_runner.backends.native.prefix_files import StoreSettings

            limit, entry = settings.context.cache_limit, entry_of(_as_computed(files, options))
            store = StoreSettings(entry.name, None if limit is None else bytes_of(limit))
        return NativeBackend(
            *(files.model, layers, sizes, adapters),
            threads=settings.context.threads,
            peers=peers,
            store=store,
            reproducible=settings.context.reproducible,
            draft=draft,
            next_token=next_token,
            learned=learned,
        )


SEAT = Native()


def _packed(
    files: ModelFiles, options: RunOptions, name: str, lora: LoraSize | None = None
) -> list[Packed]:
    return packed_model(
        _as_computed(files, options),
        lora,
        name=name,
        cached=options.settings.context.cache,
        ranks=options.ranks,
        share=_share(options),
    )


def _without_next_token(files: ModelFiles) -> str:
    """Why a model has no layer for multi-token prediction; "" if its files may have one."""
    from lite_runner.architectures.next_token import next_token_layer

    if next_token_layer(files.model) is None:
        return f"{files.model.architecture} has no layer for multi-token prediction"
    if files.held is not None or files.learned_keys is not None:
        return "the layer is read from a checkpoint, and not for prefixes or parameters in memory"
    return ""


def _next_token_files(files: ModelFiles) -> ModelFiles:
    """The layer for multi-token prediction."""
    from lite_runner.architectures.next_token import next_token_layer

    layer = next_token_layer(files.model)
    assert layer is not None  # see _without_next_token
    return replace(files, model=layer, base=None, adapter=None)


def _keys_change(model: Decoder) -> bool:
    return not model.keys_reusable or model.short_length is not None or model.prefix is not None


def _together(model: Memory, draft: Memory) -> Memory:
    return replace(
        model,
        weights=model.weights + draft.weights,
        cache=model.cache + draft.cache,
        loading=max(model.loading, draft.loading),
        work=model.work + draft.work,
        more_cache=model.more_cache + draft.more_cache,
    )


def _share(options: RunOptions) -> Share:
    ranks = options.ranks
    return Share(ranks.tensor_index, ranks.tensor, options.settings.vocab_parallel)


def stores_prefixes(files: ModelFiles, options: RunOptions) -> bool:
    """True if prefixes of prompts are stored in files, beside packed layers in the cache."""
    # A state is as large as the keys of many blocks, and names of files do not cover learned keys.
    if files.model.recurrent is not None or files.learned_keys is not None:
        return False
    share, cached = _share(options), options.settings.context.cache
    return options.stores_prefixes and is_cached(files, share, cached=cached)


def _written_later(options: RunOptions) -> int:
    """Bytes of prefixes queued for writing."""
    if not options.stores_prefixes:
        return 0
    from lite_runner.backends.native.prefix_files import QUEUED

    return QUEUED


def _met(options: RunOptions) -> Peers:
    """The other ranks that share the model, once all have joined."""
    from lite_runner.backends.collectives import all_gather, gather_text
    from lite_runner.native.peers import meet_peers

    ranks, share = options.ranks, _share(options)
    first = ranks.data_index * ranks.tensor
    peers = meet_peers(share, partial(gather_text, ranks), first, partial(all_gather, ranks))
    if peers.all_gather is not None and ranks.rank == 0:
        progress.note(
            "the ranks of the model are on several machines: MindSpore's collectives connect them"
        )
    return peers


def _as_computed(files: ModelFiles, options: RunOptions) -> ModelFiles:
    return replace(files, rounded=options.settings.precision.rounded(options.device))


def _step_bytes(model: Decoder, slots: int, length: int) -> int:
    """Buffers of a step: hidden states at its capacity, a layer's activations for its tokens, and
    partial results of attention."""
    capacity = step_capacity(slots, unchunked(model, length))
    tokens = min(capacity, slots * length)
    widest = max(block.feed_forward.width for block in model.blocks)
    heads = max(block.attention.heads * block.attention.head_dim for block in model.blocks)
    wide = 2 * max(widest, heads) + 4 * model.hidden_size
    if model.side is not None:  # each layer's inputs of a token, from the table and from the matrix
        wide += 2 * model.num_layers * model.side.width
    if model.sparse is not None and model.sparse.experts is not None:
        # Each expert's inputs, activations and outputs.
        inner = 2 * model.sparse.width + 3 * model.hidden_size
        wide = max(wide, model.sparse.experts.chosen * inner + 4 * model.hidden_size)
    if (recurrent := model.recurrent) is not None:  # before and behind its convolution, and outputs
        wide = max(wide, 2 * recurrent.channels + 2 * recurrent.values + 3 * model.hidden_size)
    return 4 * (3 * capacity * model.hidden_size + tokens * wide)
