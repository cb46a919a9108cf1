"""Description of a decoder: a tree of small frozen dataclasses.

`reference.forward` defines its meaning in NumPy; every backend implements it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from lite_runner.records import dataclass

RopeType = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
# gelu: the tanh form; gelu_exact: x times the normal distribution function
# GELU by tanh, by the normal distribution function, and as x * sigmoid(1.702 x).
Activation = Literal["silu", "gelu", "gelu_exact", "quick_gelu", "relu", "relu_squared"]


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling beyond the trained context.

    Field names and meaning follow transformers' `rope_scaling` / `rope_parameters`.
    """

    type: RopeType
    factor: float
    original_seq_length: int  # positions the model was trained on, before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    # yarn and longrope; None: derived from the factor (and mscale)
    attention_factor: float | None = None
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    # longrope: what each frequency is divided by, for texts of at most the original length ..
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()  # .. and for longer ones


@dataclass(frozen=True)
class Norm:
    """x / sqrt(mean(x^2) + eps) * gain; kind `layer` subtracts the mean first and adds a bias."""

    kind: Literal["rms", "layer"]
    eps: float
    bias: bool = True  # of kind `layer`
    gain: bool = True  # False: 1 throughout, which no file has


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding on the pairs (d, d + head_dim / 2) of queries and keys, for
    d < dims / 2."""

    theta: float = 10000.0  # base of the frequencies
    scaling: RopeScaling | None = None
    dims: int | None = None  # rotated dimensions of a head; None: all
    proportional: bool = False  # frequencies are those of a whole head, which the first pairs have
    # The first half of the pairs is rotated by a token's position, the second by its block
    # position: see positions.py. The tables are float16, as ChatGLM was trained.
    two_dimensional: bool = False

    @property
    def dynamic(self) -> RopeScaling | None:
        """The scaling if angles depend on the sequence length too."""
        by_length = self.scaling is not None and self.scaling.type in ("dynamic", "longrope")
        return self.scaling if by_length else None


@dataclass(frozen=True)
class Latent:
    """Latent attention (MLA): keys and values of all heads are linear in one latent vector, beside
    which a rotated part of keys is kept, the same for all heads.

    A head's query and key are of `plain` + `rotated` numbers. Absorbed into queries and outputs the
    latent vector and the rotated part are the only key, and the value: kv_heads is 1 and head_dim
    rank + rotated.
    """

    rank: int
    rotated: int
    plain: int
    value: int  # numbers of a head's value
    norm: Norm  # of the latent vector, and of the queries'
    query_rank: int | None = None  # queries are linear in a latent vector too; None: in x
    interleaved: bool = True  # in Hugging Face's files: the two of each rotation lie side by side


@dataclass(frozen=True)
class Temperature:
    """Scaling of queries by their position."""

    span: int
    weight: float


@dataclass(frozen=True)
class Attention:
    """Softmax attention of `heads` query heads over `kv_heads` key/value heads."""

    heads: int
    kv_heads: int  # divides heads; fewer than heads: grouped-query attention
    head_dim: int  # may differ from hidden_size / heads
    rotary: Rotary | None = None
    alibi: bool = False  # a linear bias by distance, with a slope per head ..
    alibi_scale: float = 1.0  # .. which is multiplied by this
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Norm | None = None  # of queries and keys, before RoPE
    qk_norm_by_head: bool = True  # on each head [head_dim]; else over all heads together
    qk_norm_apart: bool = False  # by head, and each head has weights of its own
    qk_norm_late: bool = False  # behind RoPE
    value_norm: Norm | None = None  # of each head's value, without weights
    values_are_keys: bool = False  # values are made as keys are, before the norms of both
    borrowed: int | None = None  # the layer whose keys and values are this one's too
    scale: float | None = None  # of scores; None: head_dim^-1/2
    clip: float | None = None  # queries, keys and values are from -clip to clip, before RoPE
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    window: int | None = None  # sliding window in tokens, the current one included; None: full
    latent: Latent | None = None
    sinks: bool = False  # the softmax has one more score, of each head, that adds no value
    gated: bool = False  # outputs are times the sigmoid of gates, which `query` has behind queries
    placed_query: bool = False  # queries are linear in a row by position of a table, not in x
    chunk: int | None = None  # tokens see those of their own chunk of so many alone
    # Queries are times 1 + weight * log(1 + n) behind n whole spans of so many tokens.
    temperature: Temperature | None = None

    @property
    def most_seen(self) -> int | None:
        """Last tokens that one sees at most, itself included; None: all."""
        return self.chunk or self.window


@dataclass(frozen=True)
class Recurrent:
    """A mixer with a state of one size in place of keys: a gated delta net, or Mamba-2.

    Queries, keys and values are linear in x, then a causal convolution of each channel and SiLU.
    The state [key_dim, value_dim] of a head decays by a factor of the token, then key * written is
    added; the output is the query times it. A delta net writes (value - key * state) * sigmoid(b),
    Mamba-2 value * rate, the softplus of a logit, by which its state decays, too.
    Outputs of both are normed by groups, and times the SiLU of gates: Mamba-2's before the norm.
    """

    delta: bool
    heads: int  # of values
    key_heads: int  # of keys and queries; divides heads
    key_dim: int
    value_dim: int
    kernel: int  # tokens of the convolution
    norm: Norm
    groups: int  # of the outputs, each normed by itself; of a delta net the heads
    conv_bias: bool = False
    bias: bool = False  # of what the convolution and the gates are made of, and of the output

    @property
    def channels(self) -> int:
        """Numbers of a token that go through the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Numbers of a token's values, and of its outputs."""
        return self.heads * self.value_dim


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, of which each token takes the `chosen` most probable ones.

    Probabilities are the softmax of the router's logits over all experts, or the sigmoid of each.
    The output is the sum of the chosen experts' outputs, each times its probability and `scale`.
    """

    count: int
    chosen: int
    renormalized: bool = True  # the probabilities of the chosen ones are divided by their sum
    sigmoid: bool = False
    router_bias: bool = False  # of the router's logits
    choice_bias: bool = False  # experts are chosen by their probabilities plus this
    # Experts are chosen from the best groups, in whose score the best of a group are added up.
    groups: int = 1
    chosen_groups: int = 1
    best_of_group: int = 1
    scale: float = 1.0
    scaled_inputs: bool = False  # the inputs of experts are times these factors, not their outputs
    shared: int = 0  # width of a gated network that every token takes besides; 0: none
    shared_gate: bool = False  # its output is times the sigmoid of a logit
    # The router, the experts and the shared network have each a norm of their own, the latter two
    # one of their outputs too; each expert's output is times a factor of its own.
    apart: bool = False


@dataclass(frozen=True)
class FeedForward:
    """Gated: down(f(gate(x)) * up(x)); else down(f(up(x))); f is the activation."""

    width: int  # of each expert, where there are experts
    gated: bool  # of experts all, and the network beside them
    bias: bool  # of gate and up, and of down unless `down_bias` says
    activation: Activation | None = None  # None: SiLU if gated, else GELU
    experts: Experts | None = None  # networks of this width; None: a single network
    # Gates are at most this, ups from -limit to limit, and f(gate) is times up + 1.
    limit: float | None = None
    down_bias: bool | None = None  # None: as `bias`

    @property
    def biased_down(self) -> bool:
        return self.bias if self.down_bias is None else self.down_bias

    @property
    def function(self) -> Activation:
        return self.activation or ("silu" if self.gated else "gelu")


@dataclass(frozen=True)
class Block:
    """x + scale * post_norm(attention(norm(x))), then the same with the feed-forward; each norm
    has its own weights. With `normed_residual` the x that is added to is that times norm(x). With
    `parallel` the norm before the feed-forward takes the block's input instead of the attention's
    output; what both compute is added to that input."""

    norm: Norm | None  # None: attention and feed-forward take x itself
    attention: Attention
    feed_forward: FeedForward
    post_norm: Norm | None = None
    residual_scale: float = 1.0
    normed_residual: float | None = None  # only with `norm`
    parallel: bool = False
    shared_norm: bool = False  # with `parallel`: both have one norm, with the attention's weights
    # In place of attention, whose sizes are then those of other blocks.
    recurrent: Recurrent | None = None
    # One of both alone; what there is not has the sizes of other blocks.
    only: Literal["mixer", "feed_forward"] | None = None
    scaled: bool = False  # the block's output is times a number of its own
    # Post-norm: x is the norm of the sum, behind attention and behind the feed-forward.
    sum_norm: Norm | None = None
    out_norm: Norm | None = None

    @property
    def attends(self) -> bool:
        """True if it has attention, with keys."""
        return self.recurrent is None and self.only != "feed_forward"


@dataclass(frozen=True)
class LayerInputs:
    """Numbers of each token for each layer: the sum of a table's by the token, times width^1/2, and
    of the normed outputs of a matrix by the token's embedding times hidden_size^-1/2; times
    2^-1/2.

    Behind its feed-forward each block adds a norm of what a matrix makes of them times f(gate(x)).
    """

    width: int
    norm: Norm  # of a layer's numbers, and of what is added


@dataclass(frozen=True)
class Prefix:
    """A prefix LM: every token sees all tokens before the first `end_token_id`; from that on
    attention is causal. What it means for positions: see positions.py."""

    end_token_id: int  # ChatGLM's sop
    # Tokens before the end that stand for the generated text; the first that occurs counts.
    mask_token_ids: tuple[int, ...]  # ChatGLM's gMASK and MASK


@dataclass(frozen=True)
class Decoder:
    """A decoder-only model: embedding, blocks, norm, head. Sizes have MindFormers' names."""

    architecture: str  # key of `architectures.KNOWN`, which names its tensors
    vocab_size: int
    hidden_size: int
    seq_length: int  # longest context, in tokens
    blocks: tuple[Block, ...]
    norm: Norm | None  # final norm, before the head
    tie_word_embeddings: bool  # the head is the embedding
    learned_positions: bool = False  # position embedding [seq_length, hidden_size]
    position_offset: int = 0  # rows of it before that of the first token
    embedding_norm: Norm | None = None
    embedding_scale: float = 1.0  # of embeddings, before positions and norm
    logits_scaling: float = 1.0  # logits are divided by it
    logits_softcap: float | None = None  # then they become softcap * tanh(logit / softcap)
    head_bias: bool = False  # of an untied head
    normed_head: bool = False  # files have a head whose rows are divided by their lengths
    prefix: Prefix | None = None  # None: causal attention throughout
    side: LayerInputs | None = None
    # Of a multi-token prediction layer by itself: its input is a matrix of the normed
    # embedding of a token and the normed hidden state of the one before. The embedding and the head
    # are those of the model that it belongs to.
    joins: Norm | None = None
    # Learned keys and values in front of each sequence's, which all tokens see. They have no
    # position: the first token is at 0.
    learned_keys: int = 0
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def attention(self) -> Attention:
        """Attention of the first block; windows and positions are not always the same in all, nor
        with `heads_differ` the key/value heads and their sizes."""
        return self.blocks[0].attention

    @property
    def heads_differ(self) -> bool:
        """True where layers have other key/value heads, or other sizes of heads."""
        every = (block.attention for block in self.blocks)
        return len({(one.heads, one.kv_heads, one.head_dim) for one in every}) > 1

    @property
    def feed_forward(self) -> FeedForward:
        """Feed-forward of the first dense block; of the first block if all have experts."""
        every = [block.feed_forward for block in self.blocks if block.only != "mixer"]
        every = every or [self.blocks[0].feed_forward]
        return next((one for one in every if one.experts is None), every[0])

    @property
    def sparse(self) -> FeedForward | None:
        """Feed-forward of the blocks that have experts, the same in all of these."""
        every = (block.feed_forward for block in self.blocks if block.only != "mixer")
        return next((one for one in every if one.experts is not None), None)

    @property
    def recurrent(self) -> Recurrent | None:
        """Of the blocks that have a state in place of keys, the same in all of these."""
        return next((one.recurrent for one in self.blocks if one.recurrent is not None), None)

    @property
    def cached(self) -> tuple[Attention, ...]:
        """Attention of the layers with keys and values of their own."""
        every = (block.attention for block in self.blocks if block.attends)
        return tuple(one for one in every if one.borrowed is None)

    def borrows(self, layer: int) -> bool:
        """True for a layer that takes the keys and values of an earlier one."""
        return layer < self.num_layers and self.blocks[layer].attention.borrowed is not None

    @property
    def moe_intermediate_size(self) -> int | None:
        """Width of each expert; None: there are none."""
        return None if self.sparse is None else self.sparse.width

    @property
    def num_heads(self) -> int:
        return self.attention.heads

    @property
    def n_kv_heads(self) -> int:
        return self.attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def intermediate_size(self) -> int:
        return self.feed_forward.width

    @property
    def norm_eps(self) -> float:
        """Of the final norm; without one, of the blocks'."""
        norm = self.norm or self.blocks[0].norm or self.blocks[0].sum_norm
        assert norm is not None
        return norm.eps

    @property
    def rotary(self) -> Rotary | None:
        """Rotary positions of the blocks with the whole context; if all have windows, of the first
        with positions."""
        found = [one.attention for one in self.blocks if one.attention.rotary]
        whole = (one for one in found if one.window is None)
        first = next(whole, found[0] if found else None)
        return None if first is None else first.rotary

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The different rotary positions of the blocks, in the order of their first blocks."""
        found = (one.attention.rotary for one in self.blocks)
        return tuple(dict.fromkeys(one for one in found if one is not None))

    def rotated_head(self, rotary: Rotary) -> int:
        """The size of the heads with these rotary positions."""
        every = (one.attention for one in self.blocks)
        return next(one.head_dim for one in every if one.rotary == rotary)

    @property
    def length_dependent(self) -> bool:
        """True where a token's cached keys depend on the sequence length (dynamic RoPE scaling and
        longrope), or on where its prefix ends."""
        dynamic = self.rotary is not None and self.rotary.dynamic is not None
        return dynamic or self.prefix is not None

    @property
    def short_length(self) -> int | None:
        """The most tokens of a text whose keys have longrope's short factors: all keys of a longer
        text are others. None: without longrope."""
        scaling = None if self.rotary is None else self.rotary.scaling
        if scaling is None or scaling.type != "longrope":
            return None
        return scaling.original_seq_length

    @property
    def keys_reusable(self) -> bool:
        """True where texts that begin alike, on the same side of `short_length`, share cached
        keys."""
        return not self.length_dependent or self.short_length is not None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window per layer."""
        return tuple(block.attention.window for block in self.blocks)

    def shard(self, ranks: int) -> Decoder:
        """The shard of one of `ranks` tensor-parallel ranks: fewer heads and a smaller feed-forward
        width; hidden_size and vocab_size are unchanged."""

        def part(block: Block) -> Block:
            attention, feed_forward = block.attention, block.feed_forward
            kv_heads = max(1, attention.kv_heads // ranks)
            return replace(
                block,
                attention=replace(attention, heads=attention.heads // ranks, kv_heads=kv_heads),
                feed_forward=replace(feed_forward, width=feed_forward.width // ranks),
            )

        return self._each(part)

    def with_rope_scaling(self, scaling: RopeScaling) -> Decoder:
        """The same model with this scaling of its `rotary`."""
        assert self.rotary is not None
        return self.with_rotary(replace(self.rotary, scaling=scaling))

    def with_rotary(self, rotary: Rotary) -> Decoder:
        """The same model with these positions in place of its `rotary`."""
        old = self.rotary

        def changed(block: Block) -> Block:
            if block.attention.rotary is None or block.attention.rotary != old:
                return block
            return replace(block, attention=replace(block.attention, rotary=rotary))

        return self._each(changed)

    def _each(self, change: Callable[[Block], Block]) -> Decoder:
        return replace(self, blocks=tuple(map(change, self.blocks)))

    def sizes(self) -> dict[str, Any]:
        """Flat settings by MindFormers' names, for messages and comparisons."""
        attention, rotary = self.attention, self.rotary or Rotary()
        windows = self.windows
        return {
            "family": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "n_kv_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "seq_length": self.seq_length,
            "norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "theta": rotary.theta,
            "rope_scaling": rotary.scaling,
            "rotary_dims": rotary.dims,
            "rope_local_base_freq": tuple(one.theta for one in self.rotaries if one != rotary),
            "qkv_has_bias": attention.qkv_bias,
            "attn_proj_has_bias": attention.out_bias,
            "mlp_has_bias": self.feed_forward.bias,
            "hidden_act": self.feed_forward.function,
            "qk_layernorm": attention.qk_norm is not None,
            "sliding_window": windows if len(set(windows)) > 1 else windows[0],
            "no_rope_layers": tuple(
                layer
                for layer, block in enumerate(self.blocks)
                if self.rotary and not block.attention.rotary
            ),
            "embedding_multiplier": self.embedding_scale,
            "attention_multiplier": attention.scale,
            "residual_multiplier": self.blocks[0].residual_scale,
            "logits_scaling": self.logits_scaling,
            "attn_logit_softcapping": attention.softcap,
            "final_logit_softcapping": self.logits_softcap,
            "normed_residual": self.blocks[0].normed_residual,
            "use_parallel_residual": self.blocks[0].parallel,
            "position_encoding_2d": rotary.two_dimensional,
            "prefix": self.prefix,
            **self._sizes_of_experts(),
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
        }

    def _sizes_of_experts(self) -> dict[str, Any]:
        """Empty for a dense model."""
        if self.sparse is None or self.sparse.experts is None:
            return {}
        experts, dense = self.sparse.experts, self.dense_layers
        return {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.chosen,
            "norm_topk_prob": experts.renormalized,
            "moe_intermediate_size": self.sparse.width,
            "mlp_only_layers": dense,
        }

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Indices of the layers without experts."""
        every = enumerate(self.blocks)
        return tuple(
            layer
            for layer, one in every
            if one.feed_forward.experts is None and one.only != "mixer"
        )
