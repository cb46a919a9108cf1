"""The network of a model with gradients: `architectures.reference` on a tape, for several texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import by_expert, by_role
from lite_runner.architectures.naming import Part, Role
from lite_runner.architectures.positions import RotaryAngles, alibi_slopes
from lite_runner.architectures.spec import (
    Attention,
    Block,
    Decoder,
    FeedForward,
    Latent,
    Norm,
    Rotary,
)
from lite_runner.records import dataclass
from lite_runner.training import mixture
from lite_runner.training import tape as ops
from lite_runner.training.kernels import Array, Room
from lite_runner.training.latent import LatentHeads, columns, own_rotary, rotated_queries
from lite_runner.training.shard import ModelShard, PartOf
from lite_runner.training.tape import Bfloat16Matrix, FrozenMatrix, PanelMatrix, Slot, Tape, Value
from lite_runner.weights import Index

_MATRICES = ("query", "key", "value", "attention_out", "gate", "up", "down", "head")
_EXPERTS = ("expert_gate", "expert_up", "expert_down")
_KINDS: tuple[Part, ...] = ("weight", "bias")
_NOTHING = np.empty((0, 0), np.float32)


@dataclass(frozen=True)
class Delta:
    """The LoRA of one weight: the names of its A and B, and their scale."""

    a: str
    b: str
    scale: float


@dataclass(frozen=True)
class Example:
    """Token ids; those from `first_target` on are targets."""

    ids: NDArray[np.int64]
    first_target: int  # at least 1: the first token has no predecessor
    # Mask of the targets from there on, of a chat with several answers; None: all.
    mask: NDArray[np.bool_] | None = None

    def rows(self) -> NDArray[np.int64]:
        """The tokens whose successors are targets."""
        rows = np.arange(self.first_target - 1, len(self.ids) - 1)
        return rows if self.mask is None else rows[self.mask]

    @property
    def targets(self) -> int:
        return len(self.ids) - self.first_target if self.mask is None else int(self.mask.sum())


def matrices(model: Decoder) -> dict[str, bool]:
    """The names of the matrices of layers and the head, and whether each is held as [in, out]."""
    found = {
        one.name: one.transposed
        for (role, _, kind), one in by_role(model).items()
        if role in _MATRICES and kind == "weight"
    }
    experts = by_expert(model).items()
    return found | {one.name: False for (role, _), of in experts if role in _EXPERTS for one in of}


def frozen(
    model: Decoder,
    weights: Iterable[tuple[str, Array]],
    kind: type[PanelMatrix | Bfloat16Matrix] | None,
) -> tuple[dict[str, Array], dict[str, FrozenMatrix]]:
    """Weights by name, as a network takes those that are not trained: arrays, and matrices of a
    `kind`. A tied embedding is both with bfloat16, since it is looked up unrounded."""
    turned, room = matrices(model), Room()
    embedding = by_role(model)["embedding", None, "weight"].name
    if model.tie_word_embeddings:
        turned[embedding] = False
    arrays, others = dict[str, Array](), dict[str, FrozenMatrix]()
    for name, array in weights:
        if kind is None or name not in turned:
            # Arrays mapped from a file would be in memory twice.
            copied = name in turned and array.flags.writeable
            arrays[name] = room.copied(array) if copied else array
            continue
        others[name] = kind(array.T if turned[name] else array, room)
        if name == embedding and kind is Bfloat16Matrix:
            arrays[name] = array
    return arrays, others


Dropout = Callable[[str, int], Array]  # dropout factors [n, in] of an A's input, by width


class TrainedNetwork:
    """A model's weights, frozen and trained."""

    def __init__(
        self,
        model: Decoder,
        weights: Mapping[str, Array],
        trained: Mapping[str, Array],
        deltas: Mapping[str, Delta],
        *,
        others: Mapping[str, FrozenMatrix] | None = None,
        recomputes: bool = False,
        shard: ModelShard | None = None,
    ) -> None:
        """`weights` by canonical name; `trained` are some of them, or A and B of `deltas`, which
        are by the weight's name. Arrays of `trained` may change between passes. `others`: matrices
        that are multiplied in another form than that of `weights`, which may lack them;
        `recomputes`: a block keeps its input alone, and is computed again for its gradients;
        `shard`: whose layers `weights` are parts of, while A and B of `deltas` are whole, and
        their gradients those of the part."""
        self.model, self.trained, self.deltas = model, trained, deltas
        self.recomputes, self.shard = recomputes, shard
        self._weights, self._others = weights, others or {}
        self._parameters = by_role(model)
        self._experts = {kind: by_expert(model, kind) for kind in _KINDS}

    def packed(self, name: str) -> FrozenMatrix | None:
        """A tensor whose products use another form than float32 rows."""
        return self._others.get(name)

    def gradients(
        self, texts: Sequence[Example], weight: float, dropout: Dropout | None = None
    ) -> tuple[float, dict[str, Array]]:
        """The sum of the targets' cross entropies, and the gradients of `weight` times it."""
        step = _Pass(self, texts, dropout)
        loss = step.loss(weight)
        step.tape.backward()
        slots = step.slots.items()
        return loss, {name: slot.grad for name, slot in slots if slot.grad is not None}

    def loss(self, texts: Sequence[Example]) -> float:
        """The sum of the targets' cross entropies, without gradients."""
        return _Pass(self, texts, None, learns=False).loss(1.0)

    def logits(self, ids: NDArray[np.int64]) -> Array:
        """After each token of one text."""
        model, step = self.model, _Pass(self, [Example(ids, 1)], None, learns=False)
        x, head = step.hidden(), step.head()
        logits = head.times(x.array)
        if model.head_bias:
            logits += step.value("head", None, "bias").array
        logits /= np.float32(model.logits_scaling)
        if model.logits_softcap is not None:
            logits = np.tanh(logits / model.logits_softcap) * np.float32(model.logits_softcap)
        return logits

    def name(self, role: Role, layer: int | None = None, kind: Part = "weight") -> str:
        """The canonical name of a tensor."""
        return self._parameters[role, layer, kind].name

    def matrix(self, name: str, transposed: bool = False) -> Array:
        """The current tensor; matrices are [out, in]."""
        known = self.trained if name in self.trained else self._weights
        array = known.get(name, _NOTHING)  # empty: its matrix is in `others`
        return array.T if transposed else array

    def transposed(self, role: Role, layer: int | None) -> bool:
        """True for a matrix stored as [in, out]."""
        return self._parameters[role, layer, "weight"].transposed

    def experts(self, role: Role, layer: int, kind: Part = "weight") -> list[str]:
        """The names of the experts' matrices, or of their biases."""
        return [one.name for one in self._experts[kind][role, layer]]


class _Pass:
    """One forward pass over several texts."""

    def __init__(
        self,
        network: TrainedNetwork,
        texts: Sequence[Example],
        dropout: Dropout | None,
        *,
        learns: bool = True,
    ) -> None:
        self.network, self.model, self.learns = network, network.model, learns
        self.tape, self.texts, self.dropout = Tape(), texts, dropout
        self.lengths = [len(text.ids) for text in texts]
        self.ids = np.concatenate([text.ids for text in texts])
        self.positions = np.concatenate([np.arange(length) for length in self.lengths])
        self.slots: dict[str, Slot] = {}
        self.angles = {one: self._angles(one) for one in self.model.rotaries}
        self.slopes: Array | None = None
        if self.model.attention.alibi:
            attention = self.model.attention
            self.slopes = attention.alibi_scale * alibi_slopes(attention.heads)
            if network.shard is not None:
                self.slopes = self.slopes[network.shard.heads]

    def loss(self, weight: float) -> float:
        """The sum of the targets' cross entropies; gradients are those of `weight` times it."""
        starts = np.cumsum([0, *self.lengths[:-1]])
        rows = np.concatenate(
            [start + text.rows() for start, text in zip(starts, self.texts, strict=True)]
        )
        return ops.cross_entropy(
            self.hidden(rows),
            self.head(),
            self.ids[rows + 1],
            weight,
            bias=self.value("head", None, "bias") if self.model.head_bias else None,
            scaling=self.model.logits_scaling,
            softcap=self.model.logits_softcap,
        )

    def hidden(self, rows: NDArray[np.int64] | None = None) -> Value:
        """The head's input [n, hidden_size], or only some `rows` of it."""
        model, tape = self.model, self.tape
        x = ops.rows_of(tape, self.value("embedding"), self.ids)
        x = ops.scaled(tape, x, model.embedding_scale)
        if model.learned_positions:
            places = self.positions + model.position_offset
            x = ops.add(tape, x, ops.rows_of(tape, self.value("positions"), places))
        x = self.norm(model.embedding_norm, x, "embedding_norm")
        compute = self.recomputed if self.network.recomputes and self.learns else self.block
        for layer, block in enumerate(model.blocks):
            x = compute(block, x, layer)
        if rows is not None:
            x = ops.picked(tape, x, rows)
        return self.norm(model.norm, x, "norm")

    def head(self) -> Value:
        """The weight [vocab_size, hidden_size] that gives logits."""
        return self.value("embedding" if self.model.tie_word_embeddings else "head")

    def block(self, block: Block, x: Value, layer: int) -> Value:
        """x [n, hidden_size] -> [n, hidden_size]"""
        tape = self.tape
        normed = self.norm(block.norm, x, "attention_norm", layer)
        added = self.attention(block.attention, normed, layer)
        added = self.norm(block.post_norm, added, "attention_post_norm", layer)
        start, x = x, ops.add(tape, self.residual(block, x, normed), added, block.residual_scale)
        x = self.norm(block.sum_norm, x, "sum_norm", layer)
        start = start if block.parallel else x
        if not block.shared_norm:
            normed = self.norm(block.norm, start, "feed_forward_norm", layer)
        added = self.feed_forward(block.feed_forward, normed, layer)
        added = self.norm(block.post_norm, added, "feed_forward_post_norm", layer)
        x = ops.add(tape, self.residual(block, x, normed), added, block.residual_scale)
        return self.norm(block.out_norm, x, "out_norm", layer)

    def recomputed(self, given: Block, x: Value, layer: int) -> Value:
        """As `block`, but computed again for its gradients."""
        tape = self.tape
        self.tape, self.learns = Tape(), False
        y = self.block(given, Value(x.array), layer)
        self.tape, self.learns = tape, True

        def backward(grad: Array) -> None:
            self.tape = Tape()
            start = Value(x.array, Slot())
            again = self.block(given, start, layer)
            assert again.slot is not None and start.slot is not None
            again.slot.add(grad, own=False)
            self.tape.backward()
            if x.slot is not None and start.slot.grad is not None:
                x.slot.add(start.slot.grad)

        # An input with a gradient: weights of the block have some even where x has none.
        return tape.record(y.array, [Value(x.array, Slot())], backward)

    def residual(self, block: Block, x: Value, normed: Value) -> Value:
        """The residual that a layer's output is added to."""
        factor = block.normed_residual
        return x if factor is None else ops.scaled(self.tape, normed, factor)

    def attention(self, given: Attention, x: Value, layer: int) -> Value:
        """x [n, hidden_size] -> [n, hidden_size]"""
        if given.latent is not None:
            return self.latent_attention(given, given.latent, x, layer)
        x = self.entered(x)
        query = self.linear(x, "query", layer, given.qkv_bias)
        key = self.linear(x, "key", layer, given.qkv_bias)
        value = self.linear(x, "value", layer, given.qkv_bias)
        if not given.qk_norm_late:
            query, key = self.normed(given, query, key, layer)
        if (most := given.clip) is not None:
            query, key, value = (
                ops.clipped(self.tape, one, -most, most) for one in (query, key, value)
            )
        if given.rotary is not None:
            angles = self.angles[given.rotary]
            query, key = (ops.rotated(self.tape, one, *angles) for one in (query, key))
        if given.qk_norm_late:
            query, key = self.normed(given, query, key, layer)
        mixed = ops.attention(
            self.tape,
            query,
            key,
            value,
            self.lengths,
            head_dim=given.head_dim,
            scale=given.head_dim**-0.5 if given.scale is None else given.scale,
            softcap=given.softcap,
            window=given.window,
            slopes=self.slopes,
            sinks=self.value("sinks", layer) if given.sinks else None,
        )
        return self.linear_of_rows(mixed, "attention_out", layer, given.out_bias)

    def latent_attention(self, given: Attention, latent: Latent, x: Value, layer: int) -> Value:
        """x [n, hidden_size] -> [n, hidden_size]"""
        tape, heads = self.tape, LatentHeads(latent, given.heads)
        assert given.rotary is not None and given.scale is not None
        angles = self.angles[given.rotary]
        queries = x
        if latent.query_rank is not None:
            queries = self.linear(x, "latent_query", layer, given.qkv_bias)
            queries = self.norm(latent.norm, queries, "latent_query_norm", layer)
        query = self.linear(queries, "query", layer, bias=False)
        query = rotated_queries(tape, query, heads, *angles)
        both = self.linear(x, "latent", layer, given.qkv_bias)
        places = np.arange(latent.rank + latent.rotated)
        kept = columns(tape, [both], places[: latent.rank])
        turned = ops.rotated(tape, columns(tape, [both], places[latent.rank :]), *angles)
        kept = self.norm(latent.norm, kept, "latent_norm", layer)
        wide = self.linear(kept, "latent_values", layer, bias=False)
        mixed = ops.attention(
            tape,
            query,
            columns(tape, [wide, turned], heads.keys),
            columns(tape, [wide], heads.values),
            self.lengths,
            head_dim=heads.width,
            scale=given.scale,
        )
        mixed = columns(tape, [mixed], heads.out)
        return self.linear(mixed, "attention_out", layer, given.out_bias)

    def normed(self, given: Attention, query: Value, key: Value, layer: int) -> tuple[Value, Value]:
        """Queries and keys, of each head or of all together."""
        width = given.head_dim if given.qk_norm_by_head else None
        return (
            self.norm(given.qk_norm, query, "query_norm", layer, width),
            self.norm(given.qk_norm, key, "key_norm", layer, width),
        )

    def feed_forward(self, given: FeedForward, x: Value, layer: int) -> Value:
        """x [n, hidden_size] -> [n, hidden_size]"""
        if given.experts is not None:
            return self.mixture(given, x, layer)
        x = self.entered(x)
        up = self.linear(x, "up", layer, given.bias)
        if given.gated:
            inner = self.gated(given, self.linear(x, "gate", layer, given.bias), up)
        else:
            inner = ops.activated(self.tape, given.function, up)
        return self.linear_of_rows(inner, "down", layer, given.biased_down)

    def mixture(self, given: FeedForward, x: Value, layer: int) -> Value:
        """x [n, hidden_size] -> [n, hidden_size]"""
        experts = given.experts
        assert experts is not None
        tape = self.tape
        logits = self.linear(x, "router", layer, experts.router_bias)
        bias = self.value("choice_bias", layer, "bias").array if experts.choice_bias else None
        chosen, factors = mixture.routed(tape, logits, experts, bias)
        x, factors = self.entered(x), self.entered(factors)
        parts = []
        for expert in range(experts.count):
            rows, place = np.nonzero(chosen == expert)
            if not len(rows):
                continue
            part = ops.picked(tape, x, rows)
            gate, up = (
                self.expert(part, role, layer, expert, given.bias)
                for role in ("expert_gate", "expert_up")
            )
            inner = self.gated(given, gate, up)
            down = self.expert(inner, "expert_down", layer, expert, given.biased_down)
            parts.append((rows, place, down))
        out = self.summed(mixture.gathered(tape, x.array.shape, parts, factors))
        if not experts.shared:
            return out
        gate, up = (self.linear(x, role, layer, False) for role in ("shared_gate", "shared_up"))
        added = self.linear(self.gated(given, gate, up), "shared_down", layer, False)
        if experts.shared_gate:
            logit = self.linear(x, "shared_router", layer, False)
            added = mixture.sigmoid_of(tape, added, logit)
        return ops.add(tape, out, added)

    def gated(self, given: FeedForward, gate: Value, up: Value) -> Value:
        if given.limit is not None:
            gate = ops.clipped(self.tape, gate, None, given.limit)
            up = ops.clipped(self.tape, up, -given.limit, given.limit, plus=1.0)
        return ops.activated(self.tape, given.function, gate, up)

    def expert(self, x: Value, role: Role, layer: int, expert: int, bias: bool) -> Value:
        """x [n, in] -> [n, out] by one of the experts."""
        names = self.network.experts
        weight = self.tensor(names(role, layer)[expert])
        shift = self.tensor(names(role, layer, "bias")[expert]) if bias else None
        return ops.linear(self.tape, x, weight, shift)

    def linear(self, x: Value, role: Role, layer: int, bias: bool) -> Value:
        """x [n, in] -> [n, out]"""
        network, tape = self.network, self.tape
        y = ops.linear(
            tape, x, self.value(role, layer), self.value(role, layer, "bias") if bias else None
        )
        name = network.name(role, layer)
        delta = network.deltas.get(name)
        if delta is None:
            return y
        a, b = self.tensor(delta.a), self.tensor(delta.b)
        kept = None if self.dropout is None else self.dropout(delta.a, a.array.shape[1])
        if network.shard is not None:
            rows, columns = network.shard.sides(name)
            kept = None if kept is None else kept[:, columns]
            a, b = _part(a, (slice(None), columns)), _part(b, (rows, slice(None)))
        return ops.low_rank(tape, y, x, a, b, delta.scale, kept)

    def linear_of_rows(self, x: Value, role: Role, layer: int, bias: bool) -> Value:
        """As `linear`, with a row-parallel matrix: the bias is added to the sum."""
        if self.network.shard is None:
            return self.linear(x, role, layer, bias)
        y = self.summed(self.linear(x, role, layer, bias=False))
        return ops.shifted(self.tape, y, self.value(role, layer, "bias")) if bias else y

    def entered(self, x: Value) -> Value:
        """The input of column-parallel matrices."""
        shard = self.network.shard
        return x if shard is None else shard.entered(self.tape, x)

    def summed(self, x: Value) -> Value:
        """The output of row-parallel matrices."""
        shard = self.network.shard
        return x if shard is None else shard.summed(self.tape, x)

    def norm(
        self,
        given: Norm | None,
        x: Value,
        role: Role,
        layer: int | None = None,
        width: int | None = None,
    ) -> Value:
        """The norm over all of x, or each `width` of it; None: x itself."""
        if given is None:
            return x
        if given.gain:
            gain = self.value(role, layer)
        else:
            gain = Value(np.ones(width or x.array.shape[-1], np.float32))
        has_shift = given.kind == "layer" and given.bias
        shift = self.value(role, layer, "bias") if has_shift else None
        if width is None or gain.array.size == width:
            return ops.norm(self.tape, given, x, gain, shift, width)
        ones = Value(np.ones(width, np.float32))  # each head has its own gain
        return ops.weighted(self.tape, ops.norm(self.tape, given, x, ones, None, width), gain)

    def value(self, role: Role, layer: int | None = None, kind: Part = "weight") -> Value:
        """A tensor of the model, with a gradient slot if it is trained."""
        transposed = kind == "weight" and self.network.transposed(role, layer)
        return self.tensor(self.network.name(role, layer, kind), transposed)

    def tensor(self, name: str, transposed: bool = False) -> Value:
        slot = None
        if self.learns and name in self.network.trained:
            slot = self.slots.setdefault(name, Slot())
        array = self.network.matrix(name, transposed)
        turned = _Turned(slot) if slot is not None and transposed else slot
        return Value(array, turned, self.network.packed(name))

    def _angles(self, rotary: Rotary) -> tuple[Array, Array]:
        """cos and sin [n, 1, head_dim / 2] of all tokens."""
        latent = self.model.attention.latent
        if latent is None:
            angles = RotaryAngles(rotary, self.model.head_dim)
        else:
            angles = RotaryAngles(own_rotary(rotary), latent.rotated)
        if angles.dynamic is None:
            cos, sin = (table[self.positions] for table in angles.table(max(self.lengths)))
        else:
            cos, sin = angles.scaled(self.positions, np.repeat(self.lengths, self.lengths))
        return cos[:, None].astype(np.float32), sin[:, None].astype(np.float32)


def _part(whole: Value, place: Index) -> Value:
    slot = None if whole.slot is None else PartOf(whole.slot, whole.array.shape, place)
    return Value(whole.array[place], slot)


class _Turned(Slot):
    """The gradient slot of a matrix stored as [in, out]."""

    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self._slot = slot

    def add(self, grad: Array, own: bool = True) -> None:
        self._slot.add(np.ascontiguousarray(grad.T), own=True)
