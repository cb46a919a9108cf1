"""Models as Cells with Parameters, for MindSpore's functions and MindFormers' scripts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from lite_runner import progress
from lite_runner.api.config import PretrainedConfig, config_of
from lite_runner.api.context import own_ranks
from lite_runner.api.loaded_model import Parameters
from lite_runner.api.model import PreTrainedModel
from lite_runner.api.options import without_call_options
from lite_runner.api.tokenizer import as_arrays
from lite_runner.architectures import architecture_of
from lite_runner.errors import ConfigError
from lite_runner.generation.sampling import logits_of_text
from lite_runner.model import ModelFiles
from lite_runner.model.adapters import network_tensors
from lite_runner.model.locate import locate


class Network(PreTrainedModel, nn.Cell):
    """A model that is a Cell: it has parameters, and is called with ids for logits.

    Its weights stay on disk until they are needed. Parameters are made when a script first asks for
    them (`parameters_dict`, load_param_into_net, ...); what it writes to them is what `generate`
    computes with from then on.
    """

    arch = ""  # as a yaml's model.arch.type has it; "": any

    def __init__(self, config: PretrainedConfig, files: ModelFiles | None = None) -> None:
        """Checks the config and finds the `files`, where they are not given.

        Raises ConfigError, ArtifactError.
        """
        nn.Cell.__init__(self, auto_prefix=False)
        PreTrainedModel.__init__(self, config, files)
        own = _arch_of(self._loaded.files)
        if self.arch and own != self.arch:
            raise ConfigError(
                f"{type(self).__name__}: got the config of a {own}, expected a {self.arch}",
                "AutoModel.from_config(config) makes the right one",
            )

    @classmethod
    def from_pretrained(cls, name_or_dir: str | Path, **settings: Any) -> Network:
        """See AutoModel.from_pretrained. Raises ConfigError for a model of another family."""
        checkpoint = settings.pop("checkpoint_name_or_path", "")
        model = network_of(config_of(name_or_dir, settings, checkpoint))
        return model if isinstance(model, cls) else cls(model.config)

    def parameters_and_names(
        self, name_prefix: str = "", expand: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """(name, Parameter) of every weight, or of what this rank has of it, in MindFormers' names
        and float32."""
        with self._loaded.opened():
            if self._loaded.parameters is None:
                config = self.config.run_config()
                ranks, sharded = own_ranks(config), config.vocab_parallel
                files = self._loaded.files
                if files.adapter is not None:  # pet_type=lora
                    tensors = network_tensors(files, ranks, vocab_parallel=sharded)
                else:
                    tensors = dict(files.tensors(ranks, vocab_parallel=sharded))
                if files.quantization.rounds:
                    progress.note(
                        f"quant={files.quantization}: the parameters of a script are floats, those"
                        " that the integers stand for; run_mode=quantize writes the integers"
                    )
                self._loaded.parameters = Parameters(tensors)
            by_name = self._loaded.parameters.by_name
        prefix = f"{name_prefix}." if name_prefix else ""
        for name, parameter in by_name.items():
            yield prefix + name, parameter

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the graphs are compiled by the first `generate`, which knows their shapes.

        What ms.Model.infer_predict_layout calls.
        """

    def prepare_inputs_for_predict_layout(self, input_ids: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The arguments of infer_predict_layout, and of functions that load a checkpoint."""
        return (input_ids,)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.construct(*args, **kwargs)

    def construct(self, input_ids: Any, *, batch_valid_length: Any = None) -> Tensor:
        """Logits [batch, n, vocab] in float32 after each of `input_ids` [batch, n].

        With `batch_valid_length` [batch], as in MindFormers' prefill, those after the last valid id
        of each row: [batch, vocab]. Padding behind it changes nothing. What `generate` made before
        has no part in it. Raises ConfigError for ids that do not fit, and for exported models.
        """
        ids = np.asarray(as_arrays(input_ids))
        vocab, context = self._loaded.files.model.vocab_size, self._loaded.files.model.seq_length
        fits = ids.ndim == 2 and ids.size and np.issubdtype(ids.dtype, np.integer)
        if not fits or ids.shape[1] > context or ids.min() < 0 or ids.max() >= vocab:
            raise ConfigError(
                f"input_ids: got {ids.dtype} of shape {list(ids.shape)}, expected integers"
                f" 0 to {vocab - 1} of shape [batch, n], n at most {context}"
            )
        with self._loaded.opened():
            backend = self._loaded.backend(ids.shape[1])
            rows = [
                np.concatenate(list(logits_of_text(backend, row.astype(np.int32)))) for row in ids
            ]
        if batch_valid_length is None:
            return Tensor(np.stack(rows))
        lengths = np.asarray(as_arrays(batch_valid_length)).reshape(-1)
        if len(lengths) != len(rows) or lengths.min() < 1 or lengths.max() > ids.shape[1]:
            raise ConfigError(
                f"batch_valid_length: got {lengths.tolist()}, expected a length of 1 to"
                f" {ids.shape[1]} for each of {len(rows)} rows"
            )
        return Tensor(np.stack([row[end - 1] for row, end in zip(rows, lengths, strict=True)]))


class LlamaForCausalLM(Network):
    """MindFormers' name of a Llama; Qwen2 is one too."""

    arch = "LlamaForCausalLM"


class Qwen2ForCausalLM(LlamaForCausalLM):
    """MindFormers' name of a Qwen2."""


class ChatGLM2ForConditionalGeneration(Network):
    """MindFormers' name of a ChatGLM2's or ChatGLM3's."""

    arch = "ChatGLM2ForConditionalGeneration"


class GLMForPreTraining(Network):
    """MindFormers' name of a ChatGLM-6B's."""

    arch = "GLMForPreTraining"


class GLMChatModel(GLMForPreTraining):
    """MindFormers' other name of it."""


class BloomLMHeadModel(Network):
    """MindFormers' name of a BLOOM."""

    arch = "BloomLMHeadModel"


class GPT2LMHeadModel(Network):
    """MindFormers' name of a GPT-2."""

    arch = "GPT2LMHeadModel"


def network_of(config: PretrainedConfig, files: ModelFiles | None = None) -> Network:
    """The model of a config, of the class of its family; finds the `files`, where they are not
    given. Raises ConfigError, ArtifactError."""
    files = files or locate(without_call_options(config.run_config()).source)
    named = (
        *(LlamaForCausalLM, BloomLMHeadModel, GPT2LMHeadModel),
        *(ChatGLM2ForConditionalGeneration, GLMForPreTraining),
    )
    kinds = {kind.arch: kind for kind in named}
    return kinds.get(_arch_of(files), Network)(config, files)


def _arch_of(files: ModelFiles) -> str:
    """MindFormers' name of a model's network, else that of its architecture."""
    theirs = architecture_of(files.model).mindformers
    return files.model.architecture if theirs is None else theirs.network
