"""Gemma 4, its text model: a Gemma 3 whose layers with the whole context have larger heads, fewer
keys and positions on a part of them, with norms of values, keys that later layers share, inputs of
each layer by itself, and in one size experts beside the feed-forward network."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

from lite_runner.architectures import GGUF, Architecture, experts, gemma2, llama_like
from lite_runner.architectures import llama as settings
from lite_runner.architectures.fields import MAX_EXPERTS, Fields
from lite_runner.architectures.gemma3 import NAMES as GEMMA3_NAMES
from lite_runner.architectures.llama import FULL, SLIDING
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import FusedExperts, Name, Names, Role
from lite_runner.architectures.spec import Block, Decoder, Experts, LayerInputs, Norm, Rotary

_LAYER = "model.layers.{}"
_FUSED: dict[Role, FusedExperts] = {
    "expert_gate": FusedExperts(f"{_LAYER}.experts.gate_up_proj", 0, 2),
    "expert_up": FusedExperts(f"{_LAYER}.experts.gate_up_proj", 1, 2),
    "expert_down": FusedExperts(f"{_LAYER}.experts.down_proj", 0, 1),
}
_EXPERTS = experts.names(("router", "router.proj"), ("experts", "experts"), ("gate", "down", "up"))
_OF_BLOCK: dict[Role, tuple[str, str]] = {
    "router_scale": ("router.scale.", "router.scale."),
    "expert_scales": ("router.per_expert_scale.", "router.per_expert_scale."),
    "expert_norm": ("experts.norm", "pre_feedforward_layernorm_2"),
    "expert_out_norm": ("experts.post_norm", "post_feedforward_layernorm_2"),
    "shared_out_norm": ("feed_forward.post_norm", "post_feedforward_layernorm_1"),
    "side_gate": ("side.gate", "per_layer_input_gate"),
    "side_out": ("side.projection", "per_layer_projection"),
    "side_out_norm": ("side.post_norm", "post_per_layer_input_norm"),
    "block_scale": ("scale.", "layer_scalar."),
}
_SHARED: dict[Role, Role] = {"shared_gate": "gate", "shared_down": "down", "shared_up": "up"}
NAMES: Names = {
    "embedding": GEMMA3_NAMES["embedding"],
    "side_table": Name("model.tok_sides.embedding_weight", "model.embed_tokens_per_layer"),
    "side_inward": Name("model.sides.projection", "model.per_layer_model_projection"),
    "side_norm": Name("model.sides.norm", "model.per_layer_projection_norm"),
    **GEMMA3_NAMES,
    **experts.fused(_EXPERTS, _FUSED),
    **{
        one: dataclasses.replace(GEMMA3_NAMES[dense], gguf=f"blk.{{}}.ffn_{dense}")
        for one, dense in _SHARED.items()
    },
    **{
        role: Name(f"{_LAYER}.{ours}", f"{_LAYER}.{theirs}")
        for role, (ours, theirs) in _OF_BLOCK.items()
    },
}


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(
        **{"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216},
        **{"num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4},
        **{"head_dim": 256, "sliding_window": 512, "tie_word_embeddings": True},
        **{"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
    )
    fields.neutral(use_bidirectional_attention="vision")  # of images
    fields.choice("hidden_activation", gemma2.ACTIVATIONS)
    if fields.raw.get("rope_scaling"):
        expected = "null: rope_parameters has the rotations of each kind of layer"
        raise fields.invalid("rope_scaling", fields.raw["rope_scaling"], expected)
    plain = fields.with_values(hidden_act=None, rope_parameters=None)
    sizes = llama_like.sizes(plain, positions=131072)
    layers, bias = sizes["num_layers"], fields.flag("attention_bias", False)
    windows = settings.read_periodic_windows(fields, layers, 6)
    if windows[-1] is not None or all(one is None for one in windows):
        found = fields.raw.get("layer_types")
        raise fields.invalid("layer_types", found, f"{SLIDING} and {FULL}, the last one {FULL}")
    full = _full_heads(fields, windows, sizes["n_kv_heads"])
    whole, local = _rotaries(fields, full["head_dim"])
    model = llama_like.decoder(
        architecture="gemma4_text",
        norms="both",
        activation="gelu",
        qk_norm=True,
        scale=1.0,
        qkv_bias=bias,
        out_bias=bias,
        embedding_scale=sizes["hidden_size"] ** 0.5,
        windows=windows,
        local_rotary=local,
        mixture=_mixture(fields, sizes["intermediate_size"]),
        logits_softcap=fields.optional_number("final_logit_softcapping"),
        **sizes | {"rotary": whole},
    )
    norm, first = Norm("rms", model.norm_eps), layers - fields.index("num_kv_shared_layers", 0)
    wide = fields.flag("use_double_wide_mlp", False)
    if wide and first < layers and model.sparse is not None:
        raise fields.invalid("use_double_wide_mlp", True, "false with experts")

    def change(layer: int, block: Block) -> Block:
        alike = [one for one in range(first) if (windows[one] is None) == (windows[layer] is None)]
        if not alike:
            shared = fields.raw.get("num_kv_shared_layers")
            raise fields.invalid("num_kv_shared_layers", shared, "fewer: each kind of layer lends")
        own, borrows, network = block.attention, layer >= first, block.feed_forward
        attention = dataclasses.replace(
            own,
            value_norm=dataclasses.replace(norm, gain=False),
            borrowed=alike[-1] if borrows else None,
            **({} if own.window else full),
        )
        if borrows and wide:
            network = dataclasses.replace(network, width=2 * network.width)
        return dataclasses.replace(block, attention=attention, feed_forward=network, scaled=True)

    width = fields.index("hidden_size_per_layer_input", 256)
    rows = fields.integer("vocab_size_per_layer_input", default=262144)
    if width and rows != model.vocab_size:
        raise fields.invalid("vocab_size_per_layer_input", rows, f"vocab_size = {model.vocab_size}")
    return dataclasses.replace(
        model,
        blocks=tuple(map(change, range(layers), model.blocks)),
        side=LayerInputs(width, norm) if width else None,
    )


def _full_heads(fields: Fields, windows: tuple[int | None, ...], kv_heads: int) -> dict[str, Any]:
    """The settings of full attention that differ from those of sliding windows."""
    own = fields.raw.get("per_layer_config")
    equal = fields.flag("attention_k_eq_v", False)
    given = fields
    names = ("global_head_dim", "num_global_key_value_heads")
    if own:  # as transformers 5 writes them
        full = {str(layer) for layer, window in enumerate(windows) if window is None}
        sections = fields.section("per_layer_config")
        given, names = sections.section(min(full)), ("head_dim", "num_key_value_heads")
        every = [dict(sections.section(layer).raw) for layer in own]
        same = all(one == every[0] for one in every)
        if own.keys() != full or not same or every[0].keys() - {*names}:
            expected = f"head_dim and num_key_value_heads, the same of each layer of {FULL}"
            raise fields.invalid("per_layer_config", own, expected)
    heads = given.optional_integer(names[1])
    if own or equal:
        kv_heads = heads or kv_heads
    if (count := fields.integer("num_attention_heads")) % kv_heads:
        raise given.invalid(names[1], kv_heads, f"a divisor of the {count} heads")
    head_dim = given.integer(names[0], default=512)
    return {"head_dim": head_dim, "kv_heads": kv_heads, "values_are_keys": equal}


def _rotaries(fields: Fields, head_dim: int) -> tuple[Rotary, Rotary]:
    """Positions of the layers with the whole context, and of those with windows."""
    both = fields.section("rope_parameters")
    if others := both.raw.given.keys() - {FULL, SLIDING}:
        raise fields.invalid("rope_parameters", sorted(others), f"{FULL} and {SLIDING}")
    whole, local = both.section(FULL), both.section(SLIDING)
    whole.choice("rope_type", ("proportional",))
    whole.neutral(factor=1.0)
    local.choice("rope_type", ("default",))
    share = whole.number("partial_rotary_factor", 1.0 if whole.raw.given else 0.25)
    dims = 2 * int(share * head_dim / 2)
    if not 0 < dims <= head_dim:
        expected = f"a fraction of the {head_dim} of a head"
        raise whole.invalid("partial_rotary_factor", share, expected)
    rotary = Rotary(whole.number("rope_theta", 1e6), None, dims, proportional=True)
    return rotary, Rotary(local.number("rope_theta", 10000.0))


def _mixture(fields: Fields, dense: int) -> Mixture | None:
    if not fields.flag("enable_moe_block", False):
        return None
    count = fields.integer("num_experts", most=MAX_EXPERTS)
    chosen = fields.integer("top_k_experts", most=count)
    width = fields.integer("moe_intermediate_size")
    return Mixture(Experts(count, chosen, shared=dense, apart=True), width)


def write(model: Decoder) -> dict[str, Any]:
    full, local = (
        next(one.attention for one in model.blocks if (one.attention.window is None) == there)
        for there in (True, False)
    )
    assert full.rotary is not None and local.rotary is not None
    found = llama_like.shared(model)
    del found["rope_theta"], found["rope_scaling"], found["hidden_act"]
    kept = {"head_dim": full.head_dim, "num_key_value_heads": full.kv_heads}
    if full.kv_heads != local.kv_heads and not full.values_are_keys:  # only said so
        every = enumerate(model.windows)
        found["per_layer_config"] = {str(layer): kept for layer, one in every if one is None}
    experts_of = None if model.sparse is None else model.sparse.experts
    lent = sum(one.attention.borrowed is not None for one in model.blocks)
    last = model.blocks[-1].feed_forward
    return found | {
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_activation": gemma2.ACTIVATIONS[0],
        "attention_bias": full.qkv_bias,
        "attention_k_eq_v": full.values_are_keys,
        "head_dim": local.head_dim,
        "num_key_value_heads": local.kv_heads,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.kv_heads,
        "num_kv_shared_layers": lent,
        "sliding_window": local.window,
        "layer_types": [SLIDING if window else FULL for window in model.windows],
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "rope_theta": full.rotary.theta,
                "partial_rotary_factor": (full.rotary.dims or full.head_dim) / full.head_dim,
            },
            SLIDING: {"rope_type": "default", "rope_theta": local.rotary.theta},
        },
        "use_double_wide_mlp": last.width != model.intermediate_size and experts_of is None,
        "hidden_size_per_layer_input": model.side.width if model.side else 0,
        "vocab_size_per_layer_input": model.vocab_size,
        "final_logit_softcapping": model.logits_softcap,
        "enable_moe_block": experts_of is not None,
        **(
            {}
            if experts_of is None or model.sparse is None
            else {
                "intermediate_size": experts_of.shared,
                "num_experts": experts_of.count,
                "top_k_experts": experts_of.chosen,
                "moe_intermediate_size": model.sparse.width,
            }
        ),
    }


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of single layers; the rotated dimensions are in a tensor."""
    layers = given["num_hidden_layers"]
    slides, heads, widths = (
        one if isinstance(one, list) else [one] * layers
        for one in map(given.get, ("layer_types", "num_key_value_heads", "intermediate_size"))
    )
    if len(slides) != layers or {*slides} != {False, True}:
        raise ValueError(
            f"attention.sliding_window_pattern is {given['layer_types']}, expected true or false of"
            f" each of the {layers} layers, and both"
        )
    full, local = slides.index(False), slides.index(True)
    if heads != [heads[local if one else full] for one in slides]:
        raise ValueError(
            f"attention.head_count_kv is {heads}, expected the same of all layers with a sliding"
            " window, and of all others"
        )
    equal = f"blk.{full}.attn_v.weight" not in tensors
    own = {"head_dim": given["global_head_dim"], "num_key_value_heads": heads[full]}
    apart = heads[full] != heads[local] and not equal
    positions: dict[str, dict[str, Any]] = {
        FULL: {"rope_type": "proportional", "rope_theta": given["rope_theta"]},
        SLIDING: {"rope_type": "default", "rope_theta": given["rope_local_base_freq"] or 10000.0},
    }
    positions[FULL]["partial_rotary_factor"] = 1.0
    return {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_local_base_freq": None,
        "rope_parameters": positions,
        "layer_types": [SLIDING if one else FULL for one in slides],
        "num_key_value_heads": heads[local],
        "num_global_key_value_heads": heads[full],
        "per_layer_config": {str(layer): own for layer, one in enumerate(slides) if not one}
        if apart
        else None,
        "attention_k_eq_v": equal,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[0] != widths[-1],
        "num_kv_shared_layers": given["num_kv_shared_layers"] or 0,
        "hidden_size_per_layer_input": given["hidden_size_per_layer_input"] or 0,
        "vocab_size_per_layer_input": given["vocab_size"],
        "enable_moe_block": bool(given["num_experts"]),
    }


def metadata(model: Decoder) -> dict[str, Any]:
    """The GGUF metadata that differs between layers."""
    every = [one.attention for one in model.blocks]
    full, local = (next(one for one in every if bool(one.window) == slides) for slides in (0, 1))
    assert local.rotary is not None
    experts_of = None if model.sparse is None else model.sparse.experts
    widths = [experts_of.shared if experts_of else one.feed_forward.width for one in model.blocks]
    return {
        "feed_forward_length": widths if len(set(widths)) > 1 else widths[0],
        "attention.head_count_kv": [one.kv_heads for one in every],
        "attention.sliding_window_pattern": [one.window is not None for one in every],
        "attention.value_length": full.head_dim,
        "attention.value_length_swa": local.head_dim,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": local.head_dim,
        "rope.freq_base_swa": float(local.rotary.theta),
    }


GEMMA4_TEXT = Architecture(
    "gemma4_text",
    read,
    NAMES,
    write,
    gguf=GGUF(
        {
            **{"rms_norm_eps": "attention.layer_norm_rms_epsilon"},
            **{"global_head_dim": "attention.key_length", "head_dim": "attention.key_length_swa"},
            **{"num_key_value_heads": "attention.head_count_kv"},
            **{"num_kv_shared_layers": "attention.shared_kv_layers"},
            **{"layer_types": "attention.sliding_window_pattern"},
            **{"sliding_window": "attention.sliding_window"},
            **{"rope_local_base_freq": "rope.freq_base_swa"},
            **{"hidden_size_per_layer_input": "embedding_length_per_layer_input"},
            **{"final_logit_softcapping": "final_logit_softcapping"},
            **{"num_experts": "expert_count", "top_k_experts": "expert_used_count"},
            **{"moe_intermediate_size": "expert_feed_forward_length"},
        },
        infer=infer_from_gguf,
        name="gemma4",
        more=metadata,
    ),
    no_effect={"rope_theta": "rope_parameters has that of each kind of layer"},
    layers_differ=True,
)
GEMMA4 = Architecture("gemma4", read, text_of="gemma4_text")
