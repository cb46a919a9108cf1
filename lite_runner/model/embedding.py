"""Pooling of hidden states to embeddings, as sentence-transformers or GGUF define it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from lite_runner.config.generation import Pooling
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model import ModelFiles
from lite_runner.records import dataclass
from lite_runner.system.files import read_json, read_json_object
from lite_runner.weights.repository import MODULES, PROMPTS

_POOLINGS: Mapping[str, Pooling] = {"mean": "mean", "lasttoken": "last"}  # supported pooling modes
# Keys of 1_Pooling/config.json -> their values since version 5.
_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_OF_GGUF = {1: "mean", 2: "cls", 3: "lasttoken"}  # llama.cpp's numbers; 0: none, 4: of a reranker
_HINT = "embed.pooling=mean or embed.pooling=last says which, of a server serve.pooling="


@dataclass(frozen=True)
class EmbeddingConfig:
    """Pooling, normalization and prompts of embeddings."""

    pooling: Pooling | None = None  # None: the checkpoint does not say
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)  # prefixes of texts, by name
    usual: str | None = None  # name of the default prompt

    def prompt(self, name: str | None) -> str:
        """The prefix of each text. Raises ConfigError for an unknown name."""
        name = self.usual if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise ConfigError(f"no prompt {name[:100]!r}; the checkpoint has: {known}")
        return self.prompts[name]


def embedding_of(files: ModelFiles, given: Pooling | None = None) -> EmbeddingConfig:
    """The checkpoint's embedding settings, with a `given` pooling. Raises ArtifactError for
    settings that are broken or not supported."""
    if files.gguf is not None:
        metadata = files.gguf.metadata
        number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
        kind = _OF_GGUF.get(number) if isinstance(number, int) else None
        return EmbeddingConfig(given or _computed(kind, files.gguf.path))
    if files.path is None or not (listed := files.path / MODULES).is_file():
        return EmbeddingConfig(given)
    modules = read_json(listed, "a list of modules")
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ArtifactError(f"{listed}: expected a list of modules")
    pooling, normalize = given, False
    for one in modules:
        kind = str(one.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = given or _pooling(files.path, str(one.get("path")))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ArtifactError(f"{listed}: the module {kind} is not computed here")
    return EmbeddingConfig(pooling, normalize, *_prompts(files.path / PROMPTS))


def _pooling(folder: Path, name: str) -> Pooling | None:
    path = folder / name / "config.json"
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ArtifactError(f"{folder / MODULES}: the path {name} leads out of the folder")
    found = read_json_object(path, "settings of pooling")
    kinds = [kind for key, kind in _KEYS.items() if found.get(key) is True]
    if isinstance(mode := found.get("pooling_mode"), str):
        kinds = [mode]
    if len(kinds) > 1:
        raise ArtifactError(f"{path}: {' and '.join(kinds)} together are not computed here", _HINT)
    return _computed(kinds[0] if kinds else None, path)


def _computed(kind: str | None, path: Path) -> Pooling | None:
    if kind is not None and kind not in _POOLINGS:
        raise ArtifactError(f"{path}: pooling by {kind} is not computed here", _HINT)
    return None if kind is None else _POOLINGS[kind]


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    if not path.is_file():
        return {}, None
    found: dict[str, Any] = read_json_object(path, "settings of sentence-transformers")
    prompts, usual = found.get("prompts") or {}, found.get("default_prompt_name")
    texts = isinstance(prompts, dict) and all(isinstance(one, str) for one in prompts.values())
    if not texts or not (usual is None or usual in prompts):
        raise ArtifactError(f"{path}: expected prompts, and default_prompt_name as one of them")
    return prompts, usual
