"""The operators that the networks for Ascend are made of: what MindSpore says they take, and what
an exported step gives them."""

from __future__ import annotations

import inspect
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.ops.auto_generate import gen_ops_prim
from mindspore.train.mind_ir_pb2 import ModelProto

from lite_runner.architectures.spec import Experts, FeedForward
from lite_runner.backends.mindspore.device import set_device
from lite_runner.networks.ascend_layers import GroupedMixture, QuantizedLinear
from lite_runner.networks.decoder import (
    Decode,
    DecoderCell,
    LoraDecode,
    LoraPrefill,
    LoraScore,
    Prefill,
    Score,
)
from lite_runner.networks.layers import BuildOptions, CacheSize, MixtureBiases
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.quantization.quantized import quantize
from lite_runner.weights.read_ahead import ReadAhead
from tests.sizes import ModelConfig

WHEEL = Path(ms.__file__).resolve().parent
SLOTS, LENGTH, HEADS, WIDTH = 3, 200, 4, 16
EXPERTS = 4
KEPT = 64  # positions of a block
FAMILIES = {
    family: ModelConfig(
        family=family,
        vocab_size=90,
        hidden_size=64,
        num_layers=1,
        num_heads=HEADS,
        n_kv_heads=2 if family == "llama" else HEADS,
        head_dim=WIDTH,
        intermediate_size=128,
        seq_length=512,
        norm_eps=1e-5,
        tie_word_embeddings=family != "llama",
    )
    for family in ("bloom", "llama")
}
MOST = 2147483647
TENSOR = "tensor"  # in the graph; what stands there otherwise is a constant, None: not given


@dataclass(frozen=True)
class Operator:
    """An operator's inputs and then its attributes, in the order that kernels count them in, as
    mindspore 2.10.0 has them in ops/auto_generate/gen_ops_prim.py; and what our graphs give."""

    inputs: str
    attributes: str
    read: Mapping[int, str]  # by its kernel, which counts: the name at a place
    source: str  # of the kernel
    ours: Mapping[str, Mapping[str, object]]  # by graph; what is not named is None


KERNELS = ("libmindspore_ops_ascend.so", "ascend/libmindspore_internal_kernels.so")
SOURCES = "mindspore 2.10, mindspore/ops/kernel/ascend"
OPERATORS = {
    "PagedAttention": Operator(
        "query key_cache value_cache=None block_tables=None context_lens=None antiquant_scale=None"
        " antiquant_offset=None attn_mask=None q_seq_lens=None alibi_mask=None",
        "head_num scale_value kv_head_num kv_cache_quant_mode='DEFAULT' mask_mode='MASK_DEFAULT'"
        " mla_v_dim=0",
        {
            **{4: "context_lens", 7: "attn_mask", 9: "alibi_mask", 10: "head_num"},
            **{11: "scale_value", 12: "kv_head_num", 13: "kv_cache_quant_mode", 15: "mla_v_dim"},
        },
        f"{SOURCES}/internal/paged_attention.cc",
        {
            "llama decode": {
                **dict.fromkeys(("query", "key_cache", "value_cache"), TENSOR),
                "block_tables": (SLOTS, -(-LENGTH // KEPT)),
                "context_lens": "batch_valid_length",
                **{"head_num": HEADS, "scale_value": 1.0, "kv_head_num": 2},
                **dict.fromkeys(("kv_cache_quant_mode", "mask_mode", "mla_v_dim"), 0),
            }
        },
    ),
    "PagedAttentionMask": Operator(
        "query key_cache value_cache block_tables context_lens antiquant_scale=None"
        " antiquant_offset=None alibi_mask=None",
        "head_num scale_value kv_head_num kv_cache_quant_mode='DEFAULT'",
        {
            **{4: "context_lens", 7: "alibi_mask", 8: "head_num", 9: "scale_value"},
            **{10: "kv_head_num", 11: "kv_cache_quant_mode"},
        },
        f"{SOURCES}/internal/paged_attention_mask.cc",
        {
            "bloom decode": {
                **dict.fromkeys(("query", "key_cache", "value_cache", "alibi_mask"), TENSOR),
                "block_tables": (SLOTS, -(-LENGTH // KEPT)),
                "context_lens": "batch_valid_length",
                **{"head_num": HEADS, "scale_value": 1.0, "kv_head_num": HEADS},
                "kv_cache_quant_mode": 0,
            }
        },
    ),
    # CANN 8.5, aclnnFlashAttentionScore: attenMask [B, 1, Sq, Skv] of BOOL or UINT8, 1 leaves a
    # score out; realShift [B, N, Sq, Skv] of the type of the query; 0 is the sparse mode for both.
    "FlashAttentionScore": Operator(
        "query key value real_shift=None drop_mask=None padding_mask=None attn_mask=None"
        " prefix=None actual_seq_qlen=None actual_seq_kvlen=None",
        f"head_num keep_prob=1.0 scale_value=1.0 pre_tokens={MOST} next_tokens={MOST}"
        " inner_precise=0 input_layout='BSH' sparse_mode=0",
        {
            **{3: "real_shift", 6: "attn_mask", 8: "actual_seq_qlen", 9: "actual_seq_kvlen"},
            **{10: "head_num", 11: "keep_prob", 12: "scale_value", 13: "pre_tokens"},
            **{14: "next_tokens", 15: "inner_precise", 16: "input_layout", 17: "sparse_mode"},
        },
        f"{SOURCES}/aclnn/kernel_mod_impl/customize/flash_attention_score_aclnn_kernel.cc",
        {
            f"{family} prefill": {
                **dict.fromkeys(("query", "key", "value", "attn_mask"), TENSOR),
                **({"real_shift": TENSOR} if family == "bloom" else {}),
                **{"head_num": HEADS, "keep_prob": 1.0, "scale_value": 1.0},
                **dict.fromkeys(("pre_tokens", "next_tokens"), MOST),
                **dict.fromkeys(("inner_precise", "input_layout", "sparse_mode"), 0),
            }
            for family in FAMILIES
        },
    ),
    "ReshapeAndCache": Operator(
        "key value=None key_cache=None value_cache=None slot_mapping=None",
        "",
        {0: "key", 1: "value", 2: "key_cache", 3: "value_cache", 4: "slot_mapping"},
        f"{SOURCES}/internal/reshape_and_cache.cc",
        {
            f"{family} {kind}": dict.fromkeys(
                ("key", "value", "key_cache", "value_cache", "slot_mapping"), TENSOR
            )
            for family in FAMILIES
            for kind in ("prefill", "decode")
        },
    ),
    "RmsNorm": Operator(
        "x gamma",
        "epsilon=1e-06",
        {0: "x", 1: "gamma", 2: "epsilon"},
        "mindspore 2.10, ops/auto_generate/gen_ops_def.py, rms_norm",
        {
            f"llama {kind}": {"x": TENSOR, "gamma": TENSOR, "epsilon": pytest.approx(1e-5)}
            for kind in ("prefill", "decode")
        },
    ),
    "WeightQuantBatchMatmul": Operator(
        "x weight antiquant_scale antiquant_offset=None quant_scale=None quant_offset=None"
        " bias=None",
        "transpose_x=False transpose_weight=False antiquant_group_size=0",
        {3: "antiquant_offset", 7: "transpose_x", 8: "transpose_weight", 9: "antiquant_group_size"},
        "mindspore 2.10, ops/auto_generate/gen_ops_def.py, weight_quant_batch_matmul",
        {
            "a16w8": {
                **dict.fromkeys(("x", "weight", "antiquant_scale"), TENSOR),
                **{"transpose_x": False, "transpose_weight": True, "antiquant_group_size": 0},
            },
            "a16w4": {
                **dict.fromkeys(("x", "weight", "antiquant_scale", "antiquant_offset"), TENSOR),
                **{"transpose_x": False, "transpose_weight": False, "antiquant_group_size": 32},
            },
        },
    ),
    "QuantBatchMatmul": Operator(
        "x1 x2 scale offset=None bias=None pertokenScaleOptional=None",
        "transpose_x1=False transpose_x2=False dtype=mindspore.float16",
        {3: "offset", 4: "bias", 5: "pertokenScaleOptional", 6: "transpose_x1", 8: "dtype"},
        "mindspore 2.10, ops/auto_generate/gen_ops_def.py, quant_batch_matmul",
        {
            "a8w8": {
                **dict.fromkeys(("x1", "x2", "scale", "pertokenScaleOptional"), TENSOR),
                **{"transpose_x1": False, "transpose_x2": True, "dtype": 42},  # float16
            }
        },
    ),
    # vllm-mindspore gives the same, model_executor/layers/fused_moe/fused_moe.py (run_tp).
    "MoeInitRoutingV2": Operator(
        "x expert_idx active_num expert_capacity expert_num drop_pad_mode"
        " expert_tokens_count_or_cumsum_flag expert_tokens_before_capacity_flag",
        "",
        {4: "expert_num", 6: "expert_tokens_count_or_cumsum_flag"},
        "mindspore 2.10, ops/auto_generate/gen_ops_prim.py, MoeInitRoutingV2",
        {
            "experts": {
                **dict.fromkeys(("x", "expert_idx"), TENSOR),
                **{"active_num": 0, "expert_capacity": 0, "expert_num": EXPERTS},
                **{"drop_pad_mode": 0, "expert_tokens_count_or_cumsum_flag": 2},
                "expert_tokens_before_capacity_flag": True,
            }
        },
    ),
    "GroupedMatmulV4": Operator(
        "x weight bias=None scale=None offset=None antiquant_scale=None antiquant_offset=None"
        " pre_token_scale=None group_list=None activation_input=None activation_quant_scale=None"
        " activation_quant_offset=None split_item=0 group_type=-1 group_list_type=0 act_type=0"
        " output_dtype=None",
        "",
        {8: "group_list", 12: "split_item", 13: "group_type", 14: "group_list_type"},
        "mindspore 2.10, ops/auto_generate/gen_ops_def.py, grouped_matmul_v4",
        {
            "experts": {
                **dict.fromkeys(("x", "weight", "group_list"), TENSOR),
                **{"split_item": 3, "group_type": 0, "group_list_type": 1, "act_type": 0},
            }
        },
    ),
    "MoeTokenUnpermute": Operator(
        "permuted_tokens sorted_indices probs=None padded_mode=False restore_shape=None",
        "",
        {1: "sorted_indices", 2: "probs"},
        "mindspore 2.10, ops/auto_generate/gen_ops_def.py, moe_token_unpermute",
        {},  # the front end makes another operator of it
    ),
    "DynamicQuantExt": Operator(
        "x smooth_scales=None",
        "",
        {0: "x", 1: "smooth_scales"},
        "mindspore 2.10, ops/auto_generate/gen_ops_def.py, dynamic_quant_ext",
        {"a8w8": {"x": TENSOR}},
    ),
}


def parameters_of(signature: inspect.Signature) -> str:
    """Names and defaults of all but `self`, as OPERATORS writes them."""
    shown = []
    for one in list(signature.parameters.values())[1:]:
        default = one.default
        text = str(default) if isinstance(default, ms.Type) else repr(default)
        if isinstance(default, ms.Type):
            text = f"mindspore.{text.lower()}"
        shown.append(one.name if default is one.empty else f"{one.name}={text}")
    return " ".join(shown)


def test_the_installed_mindspore_says_so(subtests: pytest.Subtests) -> None:
    for name, operator in OPERATORS.items():
        with subtests.test(name=name):
            check_installed(name, operator)


def check_installed(name: str, operator: Operator) -> None:
    installed = getattr(gen_ops_prim, name)
    assert parameters_of(inspect.signature(installed.__call__)) == operator.inputs
    assert parameters_of(inspect.signature(installed.__init__)) == operator.attributes
    names = [one.partition("=")[0] for one in (operator.inputs + " " + operator.attributes).split()]
    assert {place: names[place] for place in operator.read} == operator.read
    assert any(in_library(f"lib/plugin/{library}", name) for library in KERNELS)


def in_library(path: str, text: str) -> bool:
    """True if a library of the wheel contains the text."""
    with (
        (WHEEL / path).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held,
    ):
        return held.find(text.encode()) >= 0


# What our graphs give


def exported(cell: nn.Cell, inputs: list[Tensor], path: Path) -> ModelProto:
    cell.set_train(False)
    ms.export(cell, *inputs, file_name=str(path), file_format="MINDIR")
    model = ModelProto()
    model.ParseFromString(path.with_suffix(".mindir").read_bytes())
    return model


def network_of(family: str) -> nn.Cell:
    config = FAMILIES[family]
    options = BuildOptions(CacheSize(SLOTS, LENGTH), ms.float16, fused=True)
    return DecoderCell(config, ReadAhead(random_checkpoint(config, 0)), options)


def ints(*shape: int) -> Tensor:
    return Tensor(np.zeros(shape, np.int32))


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelProto]:
    """Each step as it is exported."""
    set_device("CPU", 0)
    folder = tmp_path_factory.mktemp("graphs")
    graphs = {}
    for family in FAMILIES:
        network = network_of(family)
        prompt = [Tensor(shape=[1, None], dtype=ms.int32), ints(1), ints(1), ints(1)]
        each = [ints(SLOTS, 1), ints(SLOTS), ints(SLOTS)]
        graphs[f"{family} prefill"] = exported(Prefill(network), prompt, folder / f"{family}_p")
        graphs[f"{family} decode"] = exported(Decode(network), each, folder / f"{family}_d")
    weight = np.random.default_rng(0).standard_normal((10, 96)).astype(np.float32)
    x = Tensor(np.zeros((5, 96), np.float32))
    for name, bits, group in ("a16w8", 8, 0), ("a16w4", 4, 32), ("a8w8", 8, 0):
        options = BuildOptions(None, ms.float16, fused=True, integer_input=name == "a8w8")
        layer = QuantizedLinear(options, quantize(weight, bits, group))
        graphs[name] = exported(layer, [x], folder / name)
    experts = np.zeros((EXPERTS, 16, 96), np.float32)
    feed_forward = FeedForward(16, True, False, experts=Experts(EXPERTS, 2))
    layer = GroupedMixture(
        BuildOptions(None, ms.float16, fused=True),
        *(feed_forward, np.zeros((EXPERTS, 96), np.float32)),
        *(experts, experts, experts.transpose(0, 2, 1), None, MixtureBiases()),
    )
    graphs["experts"] = exported(layer, [x], folder / "experts")
    return graphs


def given(model: ModelProto, name: str) -> list[list[object]]:
    """The inputs and attributes of each node of an operator, in their order."""
    nodes = [node for graph in (model.graph, *model.functions) for node in graph.node]
    constants = {}
    for node in nodes:
        if node.op_type == "Constant":
            [value] = [one for one in node.attribute if one.name == "value"]
            if value.tensors:
                constants[node.output[0]] = tuple(value.tensors[0].dims)
            elif value.type == value.NONE:
                constants[node.output[0]] = None
            else:
                constants[node.output[0]] = value.f if value.type == value.FLOAT else value.i
    inputs = {one.name: one.name.rpartition(":")[2] for one in model.graph.input}
    found = []
    for node in nodes:
        if node.op_type.startswith(f"REF::{name}:"):
            found.append([constants.get(one, inputs.get(one, TENSOR)) for one in node.input])
    return found


CASES = [(graph, name) for name, one in OPERATORS.items() for graph in one.ours]


def test_our_graphs_give(subtests: pytest.Subtests, graphs: dict[str, ModelProto]) -> None:
    for graph, name in CASES:
        with subtests.test(graph=graph, name=name):
            check_given(graphs, graph, name)


def check_given(graphs: dict[str, ModelProto], graph: str, name: str) -> None:
    operator = OPERATORS[name]
    names = [one.partition("=")[0] for one in (operator.inputs + " " + operator.attributes).split()]
    wanted = {one: operator.ours[graph].get(one) for one in names}
    nodes = given(graphs[graph], name)
    assert nodes
    for node in nodes:
        assert dict(zip(names, node, strict=False)) == wanted


# What MindSpore's kernels read on the host, by the name of a graph's input:
# mindspore 2.10, mindspore/core/utils/llm_manager.cc and ops/kernel/ascend/internal. MindFormers
# (1.9.0, parallel_core/inference/model_utils.py) and vllm-mindspore
# (model_executor/models/model_base.py) give `batch_valid_length` int32 [sequences], from NumPy.
LENGTHS = ("batch_valid_length", "q_seq_lens", "actual_seq_qlen", "actual_seq_kvlen")


def test_the_library_reads_these_inputs() -> None:
    assert all(in_library("lib/libmindspore_core.so", name) for name in LENGTHS)


@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_are_an_input_of_decode_alone(graphs: dict[str, ModelProto], family: str) -> None:
    named = {}
    for kind in ("prefill", "decode"):
        inputs = graphs[f"{family} {kind}"].graph.input
        found = {one.name.rpartition(":")[2]: one.tensor[0] for one in inputs}
        named[kind] = {name: found[name] for name in LENGTHS if name in found}
    assert not named["prefill"]  # its FlashAttentionScore would take them for all its rows
    [(name, tensor)] = named["decode"].items()
    assert (name, tuple(tensor.dims)) == ("batch_valid_length", (SLOTS,))
    assert tensor.data_type == tensor.INT32


@pytest.mark.parametrize("step", [Decode, LoraDecode])
def test_every_decode_has_them(step: type[nn.Cell]) -> None:
    assert "batch_valid_length" in inspect.signature(step.construct).parameters


@pytest.mark.parametrize("step", [Prefill, Score, LoraPrefill, LoraScore])
def test_no_other_step_has_them(step: type[nn.Cell]) -> None:
    assert not set(LENGTHS) & set(inspect.signature(step.construct).parameters)
