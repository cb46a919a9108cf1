"""MindFormers' module tree: which of its modules exports which names of the API.

The modules are made from the table below, once: `lite_runner.mindformers.models.bloom` is not a
file. A name is taken from `lite_runner` when it is first asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import lite_runner
from lite_runner.api import golden_stick
from lite_runner.config import did_you_mean, nearest

ROOT = "lite_runner.mindformers"

_AUTO = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoProcessor", "AutoTokenizer")
_CONTEXT = ("build_context", "init_context")
_DEVICES = ("ContextConfig", "ParallelContextConfig")
_EXPORT_INPUTS = (
    *("PREFILL_MODEL_INPUT_MAP", "get_bloom_inc_model_input"),
    *("get_llama_prefill_model_input", "get_llm_common_prefill_model_input"),
)
_INFER = ("InferConfig", "InferTask")
_INFER_INPUTS = ("BaseInputsOfInfer", "CommonInputsOfInfer", "InputOfInfer")
_PIPELINES = ("TextGenerationPipeline", "pipeline")
_STREAMERS = ("TextIteratorStreamer", "TextStreamer")
_TRAINER = ("Trainer", "TrainingArguments")


def _family(name: str, config: str, model: str, tokenizer: str) -> dict[str, tuple[str, ...]]:
    """The modules of a family, which MindFormers names after it."""
    parts = {
        f"{name}_config": config,
        name: model,
        f"{name}_tokenizer": tokenizer,
        f"{name}_tokenizer_fast": f"{tokenizer}Fast",
    }
    package = f"models.{name}"
    return {
        package: tuple(parts.values()),
        **{f"{package}.{part}": (one,) for part, one in parts.items()},
    }


_FAMILIES = {
    **_family("bloom", "BloomConfig", "BloomLMHeadModel", "BloomTokenizer"),
    "models.glm": ("ChatGLMTokenizer", "GLMChatModel", "GLMConfig", "GLMForPreTraining"),
    "models.glm.chatglm_6b_tokenizer": ("ChatGLMTokenizer",),
    "models.glm.glm": ("GLMChatModel", "GLMForPreTraining"),
    "models.glm.glm_config": ("GLMConfig",),
    "models.glm2": (
        *("ChatGLM2Config", "ChatGLM2ForConditionalGeneration"),
        *("ChatGLM2Tokenizer", "ChatGLM3Tokenizer"),
    ),
    "models.glm2.glm2": ("ChatGLM2ForConditionalGeneration",),
    "models.glm2.glm2_config": ("ChatGLM2Config",),
    "models.glm2.glm2_tokenizer": ("ChatGLM2Tokenizer",),
    "models.glm2.glm3_tokenizer": ("ChatGLM3Tokenizer",),
    **_family("gpt2", "GPT2Config", "GPT2LMHeadModel", "GPT2Tokenizer"),
    **_family("llama", "LlamaConfig", "LlamaForCausalLM", "LlamaTokenizer"),
    **_family("qwen2", "Qwen2Config", "Qwen2ForCausalLM", "Qwen2Tokenizer"),
}


def _infer(package: str) -> dict[str, tuple[str, ...]]:
    """The modules of exported models: `infer` in the documents, `inference` in the releases."""
    return {
        package: _INFER,
        f"{package}.infers": _INFER_INPUTS,
        f"{package}.infers.text_generator_infer": _INFER_INPUTS,
        f"{package}.text_generator_infer": _INFER_INPUTS,
        f"{package}.infer_config": ("InferConfig",),
        f"{package}.infer_task": ("InferTask",),
    }


# A package without a row has the names of its modules; so has MindFormers itself, "".
_LISTED: dict[str, tuple[str, ...]] = {
    "auto_class": _AUTO,
    "core.context": _CONTEXT,
    "core.context.build_context": _CONTEXT,
    "core.parallel_config": ("build_parallel_config",),
    "generation": ("GenerationConfig", *_STREAMERS),
    "generation.generation_config": ("GenerationConfig",),
    "generation.streamers": _STREAMERS,
    **_infer("infer"),
    **_infer("inference"),
    "models.auto": _AUTO,
    "models.auto.configuration_auto": ("AutoConfig",),
    "models.auto.modeling_auto": ("AutoModel", "AutoModelForCausalLM"),
    "models.auto.processing_auto": ("AutoProcessor",),
    "models.auto.tokenization_auto": ("AutoTokenizer",),
    "models.configuration_utils": ("PretrainedConfig",),
    "models.modeling_utils": ("PreTrainedModel",),
    "models.tokenization_utils": ("PreTrainedTokenizer",),
    **_FAMILIES,
    "modules": ("TransformerOpParallelConfig",),
    "modules.transformer": ("TransformerOpParallelConfig",),
    "modules.transformer.op_parallel_config": ("TransformerOpParallelConfig",),
    "pet": ("LoraConfig", "PetConfig"),
    "pet.pet_config": ("LoraConfig", "PetConfig"),
    "pipeline": _PIPELINES,
    "pipeline.pipeline": ("pipeline",),
    "pipeline.text_generation_pipeline": ("TextGenerationPipeline",),
    "tools": ("MindFormerConfig", "get_real_rank", "logger", "str2bool"),
    "tools.export": _EXPORT_INPUTS,
    "tools.logger": ("logger",),
    "tools.register": ("MindFormerConfig",),
    "tools.register.config": ("MindFormerConfig",),
    "tools.utils": ("get_real_rank", "str2bool"),
    "trainer": (*_DEVICES, *_TRAINER),
    "trainer.config_args": _DEVICES,
    "trainer.trainer": ("Trainer",),
    "trainer.training_args": ("TrainingArguments",),
    "trainer.utils": ("get_last_checkpoint", "transform_and_load_checkpoint"),
}


def _with_packages(listed: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    tree = {name: set(names) for name, names in listed.items()}
    for name, names in listed.items():
        while name:
            name = name.rpartition(".")[0]
            if name not in listed:
                tree.setdefault(name, set()).update(names)
    return {name: tuple(sorted(names)) for name, names in sorted(tree.items())}


MODULES = _with_packages(_LISTED)

_HELPERS = ("MFLlama2Helper", "NetworkHelper")
_GOLDEN_STICK: dict[str, tuple[str, ...]] = {
    "mindspore_gs": (),
    "mindspore_gs.common": ("BackendTarget",),
    "mindspore_gs.ptq": ("PTQConfig", "PTQMode", "RoundToNearest"),
    "mindspore_gs.ptq.network_helpers": ("NetworkHelper",),
    "mindspore_gs.ptq.network_helpers.mf_net_helpers": _HELPERS,
}


class _Existing(Loader):
    """Loads a module by its spec, as MindSpore does when it compiles, from sys.modules."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to do: it is executed already."""


class AliasModule(ModuleType):
    """A module of the table."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{ROOT}.{path}", f"MindFormers' module {path}.")
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(self.__name__, _Existing(), is_package=True)
        self.__all__ = list(MODULES[path])
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return attribute(self._path, name)

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *self.__all__]


def attribute(path: str, name: str) -> Any:
    """The `name` of the module at `path`: one of the API's, or a module below it.

    Raises AttributeError with what there is.
    """
    if name in MODULES[path]:
        return getattr(lite_runner, name)
    below = f"{path}.{name}".lstrip(".")
    if below in MODULES:
        return sys.modules[f"{ROOT}.{below}"]
    raise AttributeError(_missing(below))


def _missing(path: str) -> str:
    """The error text for a missing name, with the names that there are."""
    parent, _, name = path.rpartition(".")
    while parent not in MODULES:
        parent, _, name = parent.rpartition(".")
    homes = [f"mindformers.{home}".rstrip(".") for home, names in MODULES.items() if name in names]
    where = f"mindformers.{parent}".rstrip(".")
    prefix = f"{parent}." if parent else ""
    modules = [home.removeprefix(prefix) for home in MODULES if home.startswith(prefix) and home]
    there = [*MODULES[parent], *sorted(one for one in modules if "." not in one)]
    found = f"; it is in {homes[-1]}" if homes else did_you_mean(nearest(name, MODULES[parent]))
    return f"lite-runner's {where} has no {name}{found}; it has {', '.join(there)}"


class _Missing:
    """The last finder: raises an error with suggestions for a missing module of the tree.

    `from mindformers.models.llama import LlamaModel` comes here as well, since that could be a
    module: an AttributeError would be replaced by Python's own, shorter one.
    """

    def __init__(self, root: str) -> None:
        self._root = f"{root}."

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(self._root) or name.rpartition(".")[2].startswith("__"):
            return None
        raise ModuleNotFoundError(_missing(name.removeprefix(self._root)))


def install() -> None:
    """Put the modules of the table into sys.modules, below `lite_runner.mindformers`."""
    for path in MODULES:
        if path:
            sys.modules[f"{ROOT}.{path}"] = AliasModule(path)
    sys.meta_path.append(_Missing(ROOT))


def alias_mindformers(root: ModuleType) -> None:
    """Make `import mindformers`, and modules below it, mean `root` in this process.

    An installed MindFormers can no longer be imported in it.
    """
    sys.modules["mindformers"] = root
    for path in MODULES:
        if path:
            sys.modules[f"mindformers.{path}"] = sys.modules[f"{ROOT}.{path}"]
    sys.meta_path.append(_Missing("mindformers"))


def alias_golden_stick() -> None:
    """Make `import mindspore_gs` mean the quantization here."""
    for name, names in _GOLDEN_STICK.items():
        module = sys.modules[name] = ModuleType(name, "MindSpore Golden Stick's module.")
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, _Existing(), is_package=True)
        for one in names:
            setattr(module, one, getattr(golden_stick, one))
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
