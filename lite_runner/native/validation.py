"""Validates packed layers read from a file, once: the kernels follow each word of a header
unchecked.

A header must be the one that packing writes for the model. Free are only the storage format of each
matrix and the order of the parts, which must fill the block without gaps or overlaps. Values of the
parts may be anything: they change what a layer computes, not where it reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NoReturn, TypeVar

import numpy as np

from lite_runner.architectures import spec
from lite_runner.errors import ArtifactError
from lite_runner.native import structs
from lite_runner.native.layout import ALIGNMENT, Block
from lite_runner.native.lora_pool import PoolLayout
from lite_runner.native.packed_model import (
    activation,
    is_general,
    norm_of_hidden,
    normed_residual,
    residual_scale,
    rope_columns,
    score_scale,
    unsupported,
)
from lite_runner.native.structs import INPUT_GROUP, MOST_GROUP, PANEL, Format, Kind

HINT = "the file is damaged, or of another model: export the model again"
_ITEM_BITS = {
    Format.FLOAT32: 32,
    Format.BFLOAT16: 16,
    Format.FLOAT16: 16,
    Format.INT8: 8,
    Format.INT4: 4,
}
_S = TypeVar("_S", bound=ctypes.Structure)


def check_model(where: str, model: spec.Decoder) -> None:
    """Raise ArtifactError unless the kernels support the model; `where` names its description."""
    attention = model.attention
    sizes = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "seq_length": model.seq_length,
        "num_heads": attention.heads,
        "n_kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
    }
    sizes |= {f"intermediate_size {i}": b.feed_forward.width for i, b in enumerate(model.blocks)}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ArtifactError(f"{where}: {name}: got {size!r}, expected a number from 1", HINT)
    faults = unsupported(model)
    if attention.heads % attention.kv_heads:
        faults.append(f"{attention.kv_heads} key/value heads do not divide {attention.heads} heads")
    if faults:
        raise ArtifactError(f"{where}: the native operators do not support it: {faults[0]}", HINT)


def check_layer(
    where: str, index: int, block: Block, model: spec.Decoder, *, rounded_input: bool
) -> None:
    """Raise ArtifactError unless `block` is layer `index` of a model that passes `check_model`:
    0 is the embedding, then attention and feed-forward of each block, then the head.

    `where` names the file and the layer; `rounded_input`: see matrices.matrix.
    """
    found = _Validator(where, block, model, rounded_input)
    layer, feed_forward = divmod(index - 1, 2)
    if index == 0:
        found.embedding()
    elif layer == model.num_layers:
        found.head()
    elif feed_forward:
        found.feed_forward(model.blocks[layer])
    else:
        found.attention(model.blocks[layer])
    found.end()


class _Validator:
    """Holds the words of one block against a model."""

    def __init__(self, where: str, block: Block, model: spec.Decoder, rounded_input: bool) -> None:
        self._where, self._block, self._model = where, block, model
        self._rounded_input = rounded_input
        self._header_end = 0
        self._parts: list[tuple[int, int, str]] = []  # of all parts: start, end, name

    def embedding(self) -> None:
        model, fields = self._model, self._header(structs.EmbeddingLayer)
        expected = structs.EmbeddingLayer(
            hidden=model.hidden_size, has_norm=model.embedding_norm is not None
        )
        self._same(fields, expected, free=("table", "positions"))
        self._matrix("table", fields.table, model.vocab_size, model.hidden_size)
        if model.learned_positions:
            size = model.seq_length, model.hidden_size
            self._matrix("positions", fields.positions, *size, plain=True)
        else:
            self._equal("positions", fields.positions, 0)
        self._norm("norm", fields.norm, model.embedding_norm, model.hidden_size)

    def attention(self, block: spec.Block) -> None:
        parts, hidden = block.attention, self._model.hidden_size
        queries, keys = parts.heads * parts.head_dim, parts.kv_heads * parts.head_dim
        extended = parts.qk_norm is not None or parts.window is not None
        general = is_general(self._model, block)
        kind = Kind.EXTENDED_ATTENTION if extended else Kind.ATTENTION
        expected = structs.AttentionLayer(
            kind=Kind.GENERAL_ATTENTION if general else kind,
            hidden=hidden,
            heads=parts.heads,
            kv_heads=parts.kv_heads,
            head_dim=parts.head_dim,
            rotary=parts.rotary is not None,
            residual=True,
        )
        fields = self._header(structs.AttentionLayer)
        self._same(fields, expected, free=("slopes", "query_key_value", "projection"))
        if parts.alibi:
            self._part("slopes", fields.slopes, 4 * parts.heads)
        else:
            self._equal("slopes", fields.slopes, 0)
        out = queries + 2 * keys
        self._matrix("query_key_value", fields.query_key_value, out, hidden, bias=parts.qkv_bias)
        self._matrix("projection", fields.projection, hidden, queries, bias=parts.out_bias)
        self._norm("norm", fields.norm, norm_of_hidden(self._model, block.norm), hidden)
        if extended or general:
            whole = self._header(structs.ExtendedAttentionLayer)
            self._equal("window", whole.window, parts.window or 0)
            widths = (parts.head_dim,) * 2 if parts.qk_norm_by_head else (queries, keys)
            self._norm("query_norm", whole.query_norm, parts.qk_norm, widths[0])
            self._norm("key_norm", whole.key_norm, parts.qk_norm, widths[1])
        if general:
            widest = self._header(structs.GeneralAttentionLayer)
            self._equal("scale", widest.scale, score_scale(parts))
            self._equal("softcap", widest.softcap, parts.softcap or 0.0)
            columns = rope_columns(self._model, parts)
            self._equal("rope columns", (widest.rope_width, widest.rope_offset), columns)
            self._equal("joint_norm", widest.joint_norm, int(not parts.qk_norm_by_head))
            self._equal("prefix", widest.prefix, int(self._model.prefix is not None))
            self._residual(widest, block)

    def feed_forward(self, block: spec.Block) -> None:
        parts, hidden = block.feed_forward, self._model.hidden_size
        general = is_general(self._model, block)
        kind = Kind.GENERAL_FEED_FORWARD if general else Kind.FEED_FORWARD
        expected = structs.FeedForwardLayer(
            kind=kind if parts.experts is None else Kind.EXPERTS,
            hidden=hidden,
            wide=parts.width,
            gated=parts.gated,
            residual=True,
        )
        fields = self._header(structs.FeedForwardLayer)
        self._same(fields, expected, free=("up", "down"))
        out = 2 * _panels(parts.width) * PANEL if parts.gated else parts.width
        if parts.experts is not None:
            self._norm("norm", fields.norm, norm_of_hidden(self._model, block.norm), hidden)
            self._mixture(block, parts.experts, out)
            return
        self._matrix("up", fields.up, out, hidden, bias=parts.bias)
        self._matrix("down", fields.down, hidden, parts.width, bias=parts.bias)
        self._norm("norm", fields.norm, norm_of_hidden(self._model, block.norm), hidden)
        if general:
            widest = self._header(structs.GeneralFeedForwardLayer)
            self._equal("activation", widest.activation, activation(parts))
            self._residual(widest, block)

    def _mixture(self, block: spec.Block, experts: spec.Experts, out: int) -> None:
        width, hidden = block.feed_forward.width, self._model.hidden_size
        whole = self._header(structs.ExpertsLayer)
        self._equal("experts", whole.experts, experts.count)
        self._equal("chosen", whole.chosen, experts.chosen)
        self._equal("renormalized", whole.renormalized, int(experts.renormalized))
        self._matrix("router", whole.router, experts.count, hidden, plain=True)
        plain = whole.general.plain
        for name, at, shape in (
            ("up", plain.up, (out, hidden)),
            ("down", plain.down, (hidden, width)),
        ):
            self._part(name, at, 8 * experts.count)
            offsets = self._block[at : at + 8 * experts.count].view(np.int64).tolist()
            forms = [
                self._matrix(f"{name} {expert}", offset, *shape)
                for expert, offset in enumerate(offsets)
            ]
            for expert, form in enumerate(forms):
                self._equal(f"rounding of {name} {expert}", form, forms[0])
        self._equal("activation", whole.general.activation, activation(block.feed_forward))
        self._residual(whole.general, block)

    def head(self) -> None:
        model, fields = self._model, self._header(structs.HeadLayer)
        expected = structs.HeadLayer(hidden=model.hidden_size)
        self._same(fields, expected, free=("matrix_offset",))
        if model.tie_word_embeddings:
            self._equal("matrix_offset", fields.matrix_offset, 0)
        else:
            self._matrix("matrix", fields.matrix_offset, model.vocab_size, model.hidden_size)
        self._norm("norm", fields.norm, norm_of_hidden(model, model.norm), model.hidden_size)
        if model.logits_softcap is not None:
            capped = self._header(structs.CappedHeadLayer)
            self._equal("softcap", capped.softcap, model.logits_softcap)

    def _residual(
        self,
        fields: structs.GeneralAttentionLayer | structs.GeneralFeedForwardLayer,
        block: spec.Block,
    ) -> None:
        self._equal("residual_scale", fields.residual_scale, residual_scale(self._model, block))
        normed = normed_residual(self._model, block)
        self._equal("normed_residual", fields.normed_residual, normed or 0.0)
        self._equal("parallel", fields.parallel, int(block.parallel))
        self._norm("post_norm", fields.post_norm, block.post_norm, self._model.hidden_size)

    def _matrix(
        self,
        name: str,
        at: int,
        out: int,
        inputs: int,
        *,
        bias: bool = False,
        plain: bool = False,
    ) -> tuple[int, int, int]:
        """A matrix [out, inputs] at an offset, zero-padded to panels and to whole words; `plain`:
        what it multiplies is never rounded. How integers are multiplied: whether it has them (2:
        in blocks), with inputs of 8 bits or for blocks of 15, and in which groups."""
        size = ctypes.sizeof(structs.Matrix)
        fields = self._matrix_header(name, at)
        if fields.format == Format.JOINED:
            return self._joined(name, at, out, inputs, bias)
        self._part(name, at, size)
        self._equal(f"{name}.out", fields.out, out)
        self._equal(f"{name}.inputs", fields.inputs, inputs)
        if fields.format not in (*_ITEM_BITS, *structs.UNITS):
            known = sorted(map(int, (*_ITEM_BITS, *structs.UNITS)))
            self._fail(f"{name}.format", fields.format, f"one of {known}")
        depth, rows = -(-inputs // 8) * 8, _panels(out) * PANEL
        blocks = fields.format in structs.UNITS
        sizes = {
            "data": self._units(name, fields, out)
            if blocks
            else depth * rows * _ITEM_BITS[fields.format] // 8,
            "scales": 0,
            "minimums": 0,
            "sums": 0,
            "bias": 4 * rows if bias else 0,
        }
        integers = fields.format in (Format.INT8, Format.INT4)
        rounding = blocks or fields.format in (Format.INT8, Format.BFLOAT16)
        rounded = self._rounded_input and rounding and not plain
        self._equal(f"{name}.rounded_input", fields.rounded_input, int(rounded))
        group = fields.group
        if not integers:
            self._equal(f"{name}.group", group, 0)
        elif group or fields.format == Format.INT4:
            if not 0 < group <= MOST_GROUP or group % 8 or inputs % group:
                expected = f"a multiple of 8 up to {MOST_GROUP} that divides {inputs} inputs"
                self._fail(f"{name}.group", group, expected)
            sizes["scales"] = 2 * rows * (inputs // group)
        else:
            sizes["scales"] = 4 * rows
        if fields.format == Format.INT4:
            sizes["minimums"] = sizes["scales"]
        if rounded and integers:
            sizes["sums"] = 4 * rows * -(-depth // (group or INPUT_GROUP))
        for part, nbytes in sizes.items():
            offset = getattr(fields, part)
            if nbytes:
                self._part(f"{name}.{part}", offset, nbytes, base=at)
            else:
                self._equal(f"{name}.{part}", offset, 0)
        if blocks:
            return 2, int(fields.format in structs.FEWER_BITS), 0
        return int(integers), int(integers and rounded), group

    def _matrix_header(self, name: str, at: int) -> structs.Matrix:
        size = ctypes.sizeof(structs.Matrix)
        self._inside(name, at, size)
        return structs.Matrix.from_buffer_copy(self._block.data, at)

    def _units(self, name: str, fields: structs.Matrix, out: int) -> int:
        """Bytes of a matrix in GGUF's blocks."""
        span, nbytes = structs.UNITS[Format(fields.format)]
        if fields.inputs % span:
            self._fail(f"{name}.inputs", fields.inputs, f"a multiple of {span}")
        return _panels(out) * int(fields.inputs) // span * nbytes

    def _joined(
        self, name: str, at: int, out: int, inputs: int, bias: bool
    ) -> tuple[int, int, int]:
        """As `_matrix`, of several that are one."""
        self._part(name, at, ctypes.sizeof(structs.JoinedMatrix))
        whole = structs.JoinedMatrix.from_buffer_copy(self._block.data, at)
        fields, most = whole.plain, structs.MOST_PARTS
        if not 1 < whole.count <= most or whole.by_turns not in (0, 1):
            self._fail(f"{name}.count", whole.count, f"2 to {most} parts, by turns or not")
        left, fewer = _panels(out), 0
        for index in range(whole.count):
            start = at + whole.parts[index]
            part = self._matrix_header(f"{name}.{index}", start)
            panels = _panels(out) // whole.count if whole.by_turns else _panels(part.out)
            last = whole.by_turns or index == whole.count - 1
            if part.format == Format.JOINED or part.out < 1 or (part.out % PANEL and not last):
                self._fail(f"{name}.{index}.out", part.out, f"a multiple of {PANEL}")
            floats = part.format not in structs.UNITS
            form = self._matrix(f"{name}.{index}", start, part.out, inputs, plain=floats)
            fewer = max(fewer, form[1])
            if form[0] == 1:
                self._fail(f"{name}.{index}.format", part.format, "floats, or GGUF's blocks")
            self._equal(f"panels of {name}.{index}", _panels(part.out), panels)
            left -= panels
        self._equal(f"panels of {name}", left, 0)
        expected = structs.Matrix(
            format=Format.JOINED,
            out=out,
            inputs=inputs,
            rounded_input=self._rounded_input,
            bias=fields.bias,
        )
        self._same(fields, expected, free=())
        if bias:
            self._part(f"{name}.bias", fields.bias, 4 * _panels(out) * PANEL, base=at)
        else:
            self._equal(f"{name}.bias", fields.bias, 0)
        return 2, fewer, 0

    def _norm(self, name: str, fields: structs.Norm, norm: spec.Norm | None, size: int) -> None:
        """A norm over `size` values; None: there is none, and all its words are 0."""
        centred = norm is not None and norm.kind == "layer"
        self._equal(f"{name}.centred", fields.centred, int(centred))
        self._equal(f"{name}.epsilon", fields.epsilon, 0.0 if norm is None else norm.eps)
        for part, there in (("gamma", norm is not None), ("beta", centred)):
            offset = getattr(fields, part)
            if there:
                self._part(f"{name}.{part}", offset, 4 * size)
            else:
                self._equal(f"{name}.{part}", offset, 0)

    def _header(self, kind: type[_S]) -> _S:
        """The struct that the layer begins with."""
        if len(self._block) < ctypes.sizeof(kind):
            self._fail("bytes", len(self._block), f"at least {ctypes.sizeof(kind)}")
        self._header_end = ctypes.sizeof(kind)
        return kind.from_buffer_copy(self._block.data)

    def _part(self, name: str, offset: int, nbytes: int, base: int = 0) -> None:
        """A part of `nbytes` at `offset` from a struct at `base`."""
        self._inside(name, offset, nbytes, base)
        self._parts.append((base + offset, base + offset + nbytes, name))

    def _inside(self, name: str, offset: int, nbytes: int, base: int = 0) -> None:
        if offset % ALIGNMENT or not 0 < offset <= len(self._block) - base - nbytes:
            self._fail(
                name,
                f"offset {offset}",
                f"a multiple of {ALIGNMENT}, and all its {nbytes} bytes inside the layer's"
                f" {len(self._block)}",
            )

    def end(self) -> None:
        """The parts follow the header and each other, each at the next multiple of ALIGNMENT."""
        end = _aligned(self._header_end)
        for start, stop, name in sorted(self._parts):
            self._equal(f"start of {name}", start, end)
            end = _aligned(stop)
        self._equal("bytes", len(self._block), end)

    def _same(
        self, fields: ctypes.Structure, expected: ctypes.Structure, free: tuple[str, ...]
    ) -> None:
        """All fields but norms and the `free` ones; no adapter is in an export."""
        if not isinstance(fields, structs.Matrix):
            expected.adapters = PoolLayout(0, ()).parts()
        for (name, got), (_, wanted) in zip(_words(fields), _words(expected), strict=True):
            if name not in free:
                self._equal(name, got, wanted)

    def _equal(self, name: str, got: object, expected: object) -> None:
        if got != expected:
            self._fail(name, got, expected)

    def _fail(self, name: str, got: object, expected: object) -> NoReturn:
        raise ArtifactError(f"{self._where}: {name}: got {got}, expected {expected}", HINT)


def _words(fields: ctypes.Structure) -> Iterator[tuple[str, object]]:
    """The fields of a layer by name, but its norms; those of its adapters too."""
    for name, *_ in fields._fields_:
        value = getattr(fields, name)
        if isinstance(value, structs.LoraPair):
            yield "adapters.rank", value.rank
            yield "adapters.down", list(value.down)
            yield "adapters.up", list(value.up)
        elif not isinstance(value, structs.Norm):
            yield name, value


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _panels(outputs: int) -> int:
    return -(-outputs // PANEL)
