"""A release of MindFormers: what it can compute, and a model as the section `model` of its yaml.

The yaml says more than what `config/model_yaml.py` writes, which is for this project to read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any, Literal

from lite_runner.architectures import architecture_of
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.workers.python import WorkerPython
from lite_runner.records import dataclass

DType = Literal["float32", "float16"]


@dataclass(frozen=True)
class Sizes:
    """The static sizes of a network."""

    batch: int  # rows, beams included
    length: int  # positions, prompt and new tokens
    dtype: DType
    use_past: bool


@dataclass(frozen=True)
class Family:
    """A config class of MindFormers."""

    unsupported: Callable[[Decoder], Iterator[str]]
    settings: Callable[[Decoder], dict[str, Any]]
    hidden: Callable[[Decoder, bool], tuple[int, ...]]  # with use_past: ids that attention hides
    half_cache: bool = False  # the cache takes float16 only, and with it the weights
    one_row: bool = False  # with a cache it reads the logits of every prompt from the first row
    no_export: str = ""  # why its exported graph does not run here
    renamed: Mapping[str, str] = field(default_factory=dict)  # later names of tensors -> its own


@dataclass(frozen=True)
class MindFormersRelease:
    """What a release can do on a device. Methods but `unsupported` are for supported models."""

    name: str
    mindspore: str  # the release of MindSpore that it runs on
    python: WorkerPython
    families: Mapping[str, Family]  # by config class
    sections: Mapping[str, Any]  # further sections of its yaml
    context: Mapping[str, Any]  # further settings of the section `context`
    caches: bool = True
    beams: bool = True
    exports: bool = True
    blocks: int = 0  # positions of a block of its cache; 0: the cache is of whole rows

    def unsupported(
        self, model: Decoder, *, use_past: bool, beams: int = 1, export: bool = False
    ) -> list[str]:
        """Why it cannot compute the model; empty where it can."""
        theirs = architecture_of(model).mindformers
        if theirs is None:
            return ["it has no such architecture"]
        if theirs.config not in self.families:
            return [f"it has no {theirs.config}"]
        reasons = list(self.families[theirs.config].unsupported(model))
        if use_past and not self.caches:
            reasons.append(
                "its cache is of operators for Ascend; model.model_config.use_past=false"
            )
        if beams > 1 and not self.beams:
            reasons.append("it has no beam search")
        if export:
            why = self.families[theirs.config].no_export if self.exports else "it has no exporter"
            reasons += [why] if why else []
        return reasons

    def hidden_tokens(self, model: Decoder, *, use_past: bool) -> tuple[int, ...]:
        """Token ids that its attention does not see, wherever they stand in a prompt."""
        return self._family(model).hidden(model, use_past)

    def computed_in(self, model: Decoder, wanted: DType, *, use_past: bool) -> DType:
        """The type of the weights where `wanted` was asked for."""
        return "float16" if self._family(model).half_cache and use_past else wanted

    def rows_together(self, model: Decoder, wanted: int, *, use_past: bool) -> int:
        """How many of `wanted` rows are completed together."""
        return 1 if self._family(model).one_row and use_past else wanted

    def tensor_name(self, model: Decoder, name: str) -> str:
        """What it calls a tensor that later ones call `name`."""
        return self._family(model).renamed.get(name, name)

    def model_section(self, model: Decoder, sizes: Sizes) -> dict[str, Any]:
        """`model` of the yaml, with random weights until a checkpoint is loaded."""
        theirs = architecture_of(model).mindformers
        assert theirs is not None, "see unsupported"
        return {
            "arch": {"type": theirs.network},
            "model_config": {
                "type": theirs.config,
                "batch_size": sizes.batch,
                "seq_length": sizes.length,
                "hidden_size": model.hidden_size,
                "num_layers": model.num_layers,
                "num_heads": model.num_heads,
                "vocab_size": model.vocab_size,
                "bos_token_id": model.bos_token_id or 0,
                "eos_token_id": model.eos_token_id[0] if model.eos_token_id else 0,
                "pad_token_id": pad_token(model),
                "use_past": sizes.use_past,
                "compute_dtype": sizes.dtype,
                "param_init_type": sizes.dtype,
                "layernorm_compute_type": "float32",
                "softmax_compute_type": "float32",
                "checkpoint_name_or_path": "",
                "do_sample": False,
                **self._paged(sizes),
                **self._family(model).settings(model),
            },
        }

    def _paged(self, sizes: Sizes) -> dict[str, Any]:
        if not (self.blocks and sizes.use_past):
            return {}
        row = -(-sizes.length // self.blocks)
        return {
            "is_dynamic": True,
            "block_size": self.blocks,
            "num_blocks": sizes.batch * row + 1,  # one is never given to a row
        }

    def _family(self, model: Decoder) -> Family:
        theirs = architecture_of(model).mindformers
        assert theirs is not None, "see unsupported"
        return self.families[theirs.config]


def static_length(model: Decoder, wanted: int) -> int:
    """Positions of a network for sequences of `wanted` tokens: learned positions are a weight."""
    return model.seq_length if model.learned_positions else wanted


def pad_token(model: Decoder) -> int:
    """The model's pad token; where it has none that which ends a text, as MindFormers' GPT-2."""
    if model.pad_token_id is not None:
        return model.pad_token_id
    return model.eos_token_id[0] if model.eos_token_id else 0


def llama_settings(model: Decoder) -> dict[str, Any]:
    """What the releases' LlamaConfig have in common, without scaled rotary positions."""
    assert model.rotary is not None
    return {
        "n_kv_heads": model.n_kv_heads,
        "max_position_embedding": model.seq_length,
        "intermediate_size": model.intermediate_size,
        "rms_norm_eps": model.norm_eps,
        "theta": model.rotary.theta,
        "extend_method": "None",
        "scaling_factor": 1.0,
        "qkv_has_bias": model.attention.qkv_bias,
        "rotary_dtype": "float32",
        # On CPU the other form multiplies by a matrix that BatchMatMul does not broadcast.
        "use_rope_slice": True,
    }


def llama_faults(model: Decoder) -> Iterator[str]:
    """What no release's Llama computes."""
    yield from head_faults(model)
    if any(model.windows):
        yield "it has no sliding windows"
    if model.rotary is None or model.rotary.dims is not None:
        yield "it rotates all dimensions of its heads"


def head_faults(model: Decoder) -> Iterator[str]:
    """Heads of other sizes."""
    if model.head_dim * model.num_heads != model.hidden_size:
        yield f"its heads have hidden_size / num_heads dimensions, not {model.head_dim}"


def hides_pads(model: Decoder, use_past: bool) -> tuple[int, ...]:
    """Pad tokens are masked, wherever they stand."""
    return (pad_token(model),)
