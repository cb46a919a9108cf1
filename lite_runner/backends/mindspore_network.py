"""The network of the MindSpore backend: its options, and building it on a device."""

from __future__ import annotations

from dataclasses import asdict, replace

import mindspore as ms
from mindspore import nn

from lite_runner.architectures import network_code
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.collectives import tensor_parallel
from lite_runner.backends.device import choose_attention, set_device
from lite_runner.config.ranks import Ranks
from lite_runner.native.lora_pool import LoraSize
from lite_runner.networks.layers import BuildOptions, CacheSize, Weights
from lite_runner.networks.quantized_layers import LinearIntegers
from lite_runner.networks.steps import network_of
from lite_runner.records import dataclass
from lite_runner.system import environment
from lite_runner.weights.read_ahead import QuantizedWeights


@dataclass(frozen=True)
class MindSporeOptions:
    """Options of a MindSpore backend."""

    slots: int  # cache slots
    length: int  # maximum tokens per row, prompt and generated
    dtype: str = "float32"
    device: str = "CPU"
    device_id: int = 0
    threads: int | None = None  # None: MindSpore's default
    use_past: bool = True  # False: no cache, every step recomputes the whole row
    ranks: Ranks = Ranks()
    vocab_parallel: bool = True  # with several ranks: shard the embedding and the head too
    lora: LoraSize | None = None  # adapter slots; None: base model only
    integer_input: bool = False  # a8w8: inputs of int8 weights are quantized too
    pynative: bool = False  # eager mode: nothing is compiled, and each step is slower


def build_network(
    config: Decoder, weights: Weights | QuantizedWeights, options: MindSporeOptions
) -> nn.Cell:
    """Set the device, and build this rank's network from its shard of the weights.

    `config` is the unsharded model. QuantizedWeights need Ascend's quantized operators. Several
    ranks need a rendezvous first: see `lite_runner.backends.collectives`.
    """
    set_device(options.device, options.device_id, options.threads, pynative=options.pynative)
    fused = environment.has_fused_operators(options.device)
    if fused:
        choose_attention()
    build = BuildOptions(
        CacheSize(options.slots, options.length) if options.use_past else None,
        getattr(ms, options.dtype),
        tensor_parallel(options.ranks, vocab_parallel=options.vocab_parallel),
        options.lora,
        fused,
        options.integer_input,
    )
    if isinstance(weights, QuantizedWeights):
        weights = LinearIntegers(weights, config)
    return network_of(config.shard(options.ranks.tensor), weights, build)


def graph_key(network: nn.Cell, config: Decoder, options: MindSporeOptions) -> dict[str, object]:
    """Everything that the compiled graphs of a network depend on: see GraphCache."""
    lora = options.lora
    return {
        "model": asdict(config),
        "options": asdict(replace(options, lora=None)) | {"threads": None},
        "fused": environment.has_fused_operators(options.device),
        "adapters": lora and [lora.slots, lora.rank, sorted(lora.targets)],
        # Quantized weights, per column or per group, use other operators than floats.
        "weights": [
            [one.name, list(one.shape), str(one.dtype)] for one in network.get_parameters()
        ],
        "network": network_code(config),
    }
