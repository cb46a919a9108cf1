"""The releases of MindFormers: choosing one for a model, its Python, and facts from its sources.

The mindspore of 1.0.2's time is built for Python 3.9 at most, and cannot share a process with ours.
1.9.0 runs on ours; it pins packages that ours exclude, so it has an environment of its own. Its
networks are made for Ascend. Of those that it calls legacy, Llama computes on a CPU where the yaml
asks for it by plain operators; for greedy tokens mint.argmax, which has no kernel for a CPU, has a
stand-in: see worker.py. The cache is of paged attention, which has none either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from lite_runner.architectures import architecture_of
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.workers.python import WorkerPython
from lite_runner.errors import ConfigError, EnvironmentFault
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
    hides: Literal["pad", "end", ""] = ""  # the token that its attention does not see ..
    hides_in_cache: bool = True  # .. with use_past, too
    half_cache: bool = False  # the cache takes float16 only, and with it the weights
    one_row: bool = False  # with a cache it reads the logits of every prompt from the first row
    no_export: str = ""  # why its exported graph does not run here
    renamed: Mapping[str, str] = field(default_factory=dict)  # later names of tensors -> its own


@dataclass(frozen=True)
class MindFormersRelease:
    """A release on a device. Methods but `unsupported` are for supported models."""

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
        """Reasons why it cannot compute the model; empty where it can."""
        theirs = architecture_of(model).mindformers
        if theirs is None:
            return ["it has no such architecture"]
        if theirs.config not in self.families:
            return [f"it has no {theirs.config}"]
        reasons = list(self.families[theirs.config].unsupported(model))
        if use_past and not self.caches:
            reasons.append("its cache needs operators of Ascend; model.model_config.use_past=false")
        if beams > 1 and not self.beams:
            reasons.append("it has no beam search")
        if export:
            why = self.families[theirs.config].no_export if self.exports else "it has no exporter"
            reasons += [why] if why else []
        return reasons

    def hidden_tokens(self, model: Decoder, *, use_past: bool) -> tuple[int, ...]:
        """Token ids that its attention masks at any place in a prompt."""
        family = self._family(model)
        if not family.hides or (use_past and not family.hides_in_cache):
            return ()
        return model.eos_token_id[:1] if family.hides == "end" else (pad_token(model),)

    def computed_in(self, model: Decoder, wanted: DType, *, use_past: bool) -> DType:
        """The type of the weights where `wanted` was asked for."""
        return "float16" if self._family(model).half_cache and use_past else wanted

    def rows_together(self, model: Decoder, wanted: int, *, use_past: bool) -> int:
        """Rows completed together, of those `wanted`."""
        return 1 if self._family(model).one_row and use_past else wanted

    def tensor_name(self, model: Decoder, name: str) -> str:
        """Its name of a tensor that later releases call `name`."""
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
    """Settings that the releases' LlamaConfig share, without scaled rotary positions."""
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


def llama_errors(model: Decoder) -> Iterator[str]:
    """Reasons why no release's Llama computes the model."""
    yield from head_errors(model)
    if any(model.windows):
        yield "it has no sliding windows"
    if model.rotary is None or model.rotary.dims is not None:
        yield "it rotates all dimensions of its heads"


def head_errors(model: Decoder) -> Iterator[str]:
    """Heads of other sizes."""
    if model.head_dim * model.num_heads != model.hidden_size:
        yield f"its heads have hidden_size / num_heads dimensions, not {model.head_dim}"


def installed_release() -> str | None:
    """The release of MindFormers in this process's Python; None: there is none."""
    try:
        return version("mindformers")
    except PackageNotFoundError:
        return None


def choose_release(
    model: Decoder,
    name: str,
    *,
    wanted: str | None,
    use_past: bool,
    beams: int = 1,
    export: bool = False,
    device: str = "CPU",
) -> MindFormersRelease:
    """The release that is `wanted`; None: the first that computes the model, `name` in messages, or
    exports it. On Ascend it is that of this Python, where one is installed here.

    Raises ConfigError where none does, EnvironmentFault where another one is installed.
    """
    known = RELEASES if device == "CPU" else ON_ASCEND
    here = None if device == "CPU" else installed_release()
    if here is not None and (here not in known or wanted not in (None, here)):
        raise EnvironmentFault(
            f"this Python has mindformers {here}, expected {wanted or ' or '.join(known)}",
            "install that release, or uninstall mindformers to use a separate Python, as on a CPU",
        )
    if (only := wanted or here) is not None:
        candidates = [known[only]]
    else:
        candidates = [known[one.name] for one in _in_order(model)]
    reasons = []
    for release in candidates:
        found = release.unsupported(model, use_past=use_past, beams=beams, export=export)
        if not found:
            return release
        reasons.append(f"MindFormers {release.name} cannot compute {name}: {', '.join(found)}")
    raise ConfigError(f"backend=mindformers: {'; '.join(reasons)}", "backend=ms")


def _in_order(model: Decoder) -> list[MindFormersRelease]:
    """1.0.2 is older than Qwen2, a Llama with biases."""
    return [V1_9_0, V1_0_2] if model.attention.qkv_bias else [V1_0_2, V1_9_0]


def python_for(release: MindFormersRelease, device: str) -> Path:
    """The interpreter that runs a release: this one where it is installed here, with a device, else
    that of the release. Raises EnvironmentFault where there is none."""
    if device != "CPU" and installed_release() == release.name:
        return Path(sys.executable)
    return release.python.find()


PYTHON_1_0 = WorkerPython(
    product="MindFormers 1.0.2",
    variable="LITE_RUNNER_MINDFORMERS_PYTHON",
    folder=".venv-mindformers",
    cached="mindformers",
    target="mindformers",
    elsewhere="with a Python 3.9: python3.9 -m venv {cached} && {cached}/bin/pip install "
    "mindformers==1.0.2 mindspore==2.0.0 numpy==1.24.4 protobuf==3.20.3 pillow==9.5.0",
)
PYTHON_1_9 = WorkerPython(
    product="MindFormers 1.9.0",
    variable="LITE_RUNNER_MINDFORMERS_1_9_PYTHON",
    folder=".venv-mindformers-1.9",
    cached="mindformers-1.9",
    target="mindformers",
    elsewhere="python3.11 -m venv {cached} && {cached}/bin/pip install mindspore==2.10.0"
    " numpy==1.26.4 huggingface-hub tokenizers safetensors sentencepiece tqdm pyyaml requests"
    " python-dateutil && {cached}/bin/pip install --no-deps mindformers==1.9.0 mindpet==1.0.4"
    " datasets==5.2.0 deprecated==1.2.18 jieba==0.42.1 multiprocess==0.70.19 nltk==3.10.4"
    " pandas==2.3.3 pyarrow==23.0.1 pytz==2026.6 regex==2026.11.15 rouge-chinese==1.0.3"
    " tensorboardx==2.6.5 tiktoken==0.14.0 wrapt==1.17.3 xxhash==4.1.0",
)


EPSILON = 1e-5  # of LayerNorm, whatever the yaml says


def _llama_errors(model: Decoder) -> Iterator[str]:
    scaling = model.rotary.scaling if model.rotary else None
    if scaling is not None and scaling.type != "linear":
        yield f"it has no {scaling.type} scaling of rotary positions, only a linear one"
    yield from llama_errors(model)
    if model.attention.out_bias or model.feed_forward.bias:
        yield "its Llama has biases on q, k and v only"


def _llama(model: Decoder) -> dict[str, Any]:
    settings = llama_settings(model)
    assert model.rotary is not None
    if (scaling := model.rotary.scaling) is not None:
        settings |= {"extend_method": "PI", "scaling_factor": scaling.factor}
    return settings


def _own_settings(model: Decoder) -> dict[str, Any]:
    theirs = architecture_of(model).mindformers
    assert theirs is not None
    return theirs.settings(model)


def _glm2(model: Decoder) -> dict[str, Any]:
    settings = _own_settings(model)
    return {
        **settings,
        "add_qkv_bias": settings["qkv_has_bias"],
        "padded_vocab_size": model.vocab_size,
        "num_attention_heads": model.num_heads,
    }


def _layer_norm_errors(model: Decoder) -> Iterator[str]:
    if model.norm_eps != EPSILON:
        yield f"its LayerNorm has an epsilon of {EPSILON:g}, not {model.norm_eps:g}"
    if model.intermediate_size % model.hidden_size:
        yield (
            f"its feed-forward is a multiple of hidden_size={model.hidden_size}, not "
            f"{model.intermediate_size}"
        )


def _layer_norm(model: Decoder) -> dict[str, Any]:
    return {
        "expand_ratio": model.intermediate_size // model.hidden_size,
        "hidden_act": _own_settings(model)["hidden_act"],
        "embedding_dropout_prob": 0.0,
        "hidden_dropout_rate": 0.0,
        "attention_dropout_rate": 0.0,
    }


V1_0_2 = MindFormersRelease(
    "1.0.2",
    "2.0.0",
    PYTHON_1_0,
    {
        "LlamaConfig": Family(_llama_errors, _llama, hides="pad"),
        "BloomConfig": Family(
            _layer_norm_errors, _layer_norm, hides="end", hides_in_cache=False, half_cache=True
        ),
        "ChatGLM2Config": Family(
            head_errors,
            _glm2,
            hides="pad",
            hides_in_cache=False,
            one_row=True,
            renamed={
                "transformer.embedding.embedding_weight": "transformer.embedding.embedding_table"
            },
        ),
        "GLMConfig": Family(
            head_errors,
            _own_settings,
            no_export="its exported GLM takes positions and a mask, which no engine here gives it",
        ),
        "GPT2Config": Family(
            _layer_norm_errors,
            _layer_norm,
            hides="end",
            no_export="MindSpore Lite does not run the mask of its exported GPT-2",
        ),
    },
    sections={},
    context={},
)


def _llama_errors_1_9(model: Decoder) -> Iterator[str]:
    scaling = model.rotary.scaling if model.rotary else None
    if scaling is not None and scaling.type not in ("linear", "llama3"):
        yield f"no {scaling.type} scaling of rotary positions is translated for it"
    yield from llama_errors(model)
    if model.feed_forward.bias:
        yield "its Llama has no biases in the feed-forward"


def _llama_1_9(model: Decoder) -> dict[str, Any]:
    settings = llama_settings(model) | {
        "attn_proj_has_bias": model.attention.out_bias,
        "tie_word_embeddings": model.tie_word_embeddings,
        "fused_rms_norm": False,
        "use_flash_attention": False,
    }
    assert model.rotary is not None
    if (scaling := model.rotary.scaling) is None:
        return settings
    if scaling.type == "linear":
        return settings | {"extend_method": "PI", "scaling_factor": scaling.factor}
    return settings | {
        "extend_method": "LLAMA3",
        "scaling_factor": {
            "factor": float(scaling.factor),
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_seq_length,
        },
    }


def _llama_ascend(model: Decoder) -> dict[str, Any]:
    plain = ("use_rope_slice", "fused_rms_norm")
    settings = {name: value for name, value in _llama_1_9(model).items() if name not in plain}
    return settings | {"use_flash_attention": True}


V1_9_0 = MindFormersRelease(
    "1.9.0",
    "2.10.0",
    PYTHON_1_9,
    {"LlamaConfig": Family(_llama_errors_1_9, _llama_1_9, hides="pad")},
    sections={"use_legacy": True, "parallel": {}, "parallel_config": {}},
    context={"postprocess_use_numpy": True},
    caches=False,
    beams=False,
    exports=False,
)
# On Ascend by its own operators, and with a cache. Written from its sources and its yamls: never
# run, for want of a device.
V1_9_0_ASCEND = replace(
    V1_9_0,
    families={"LlamaConfig": Family(_llama_errors_1_9, _llama_ascend, hides="pad")},
    context={},
    caches=True,
    blocks=16,
)


RELEASES: Mapping[str, MindFormersRelease] = {"1.0.2": V1_0_2, "1.9.0": V1_9_0}
ON_ASCEND: Mapping[str, MindFormersRelease] = {"1.0.2": V1_0_2, "1.9.0": V1_9_0_ASCEND}
