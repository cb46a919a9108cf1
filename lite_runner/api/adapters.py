"""The adapters of a model object: opened once, and loaded all together, whichever a call names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lite_runner.architectures.spec import Decoder
from lite_runner.backends.base import AdapterSlots
from lite_runner.config.parallel import Ranks
from lite_runner.config.prompt import adapter_name
from lite_runner.config.schema import GenerateOptions
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model.adapters import (
    AdapterJob,
    adapter_root_of,
    adapters_of,
    check_adapters,
    open_adapter_job,
    rank_adapters,
)
from lite_runner.model.files import ModelFiles
from lite_runner.weights.lora.adapter import Adapter
from lite_runner.weights.lora.adapter_reader import adapter_folders, shards_of

AdapterIds = str | Sequence[str | None] | None


class OpenAdapters:
    """The adapters of adapter_path, all opened: a call with another one needs no other backend."""

    def __init__(self) -> None:
        self._of: tuple[str, str] | None = None  # the paths that `_opened` is of
        self._opened: dict[str, Adapter] = {}
        self._checked: set[str] = set()

    def job(
        self, config: GenerateOptions, files: ModelFiles, names: Sequence[str | None]
    ) -> AdapterJob | None:
        """The adapter of each prompt (None: the base) among all that the listing has; None where
        the config has no adapter_path.

        Of those that no prompt wants, one that does not open is left out. Raises ArtifactError for
        a wanted one that is not there or does not fit, ConfigError where there is no adapter_path.
        """
        wanted = list(dict.fromkeys(name for name in names if name is not None))
        if config.merges_adapter:
            if wanted:
                raise ConfigError(
                    f"adapter_id={wanted[0]}: with pet_type=lora one adapter is merged for all",
                    "pet_type=slora: adapter_id chooses",
                )
            return None
        if not config.adapter_path:
            if wanted:
                raise ConfigError(
                    f"adapter_id={wanted[0]} needs adapter_path=lora_adapter.json",
                    "AutoModel.from_pretrained(..., adapter_path='lora_adapter.json')",
                )
            return None
        path = Path(config.adapter_path).expanduser()
        if shards_of(path, adapter_root_of(config)):
            return open_adapter_job(config, files.model, names)
        of = (config.adapter_path, config.adapter_root)
        if of != self._of or not self._opened.keys() >= set(wanted):
            self._open(config, files, wanted)
            self._of = of
        check_adapters([self._opened[n] for n in wanted if n not in self._checked], files)
        self._checked.update(wanted)
        return AdapterJob(list(self._opened.values()), names)

    def _open(self, config: GenerateOptions, files: ModelFiles, wanted: Sequence[str]) -> None:
        found = adapters_of(config, files.model, wanted)
        path = Path(config.adapter_path).expanduser()
        listed = adapter_folders(path, adapter_root_of(config))
        for name in listed:
            if name not in found:
                try:
                    found |= adapters_of(config, files.model, [name])
                except ArtifactError:
                    continue  # told when it is asked for
        self._opened = {name: found[name] for name in listed if name in found}
        self._checked.clear()


class LoadedAdapters:
    """The adapters that a running backend knows."""

    def __init__(self) -> None:
        self._known: dict[str, Adapter] = {}

    def reset(self, job: AdapterJob | None) -> None:
        """The backend was loaded with those of a job."""
        self._known = {one.name: one for one in job.adapters} if job else {}

    def serve(
        self,
        slots: AdapterSlots | None,
        job: AdapterJob | None,
        config: GenerateOptions,
        model: Decoder,
        ranks: Ranks,
    ) -> bool:
        """Add a job's new adapters to the backend's slots; False where one does not fit."""
        known = {(one.name, one.folder) for one in self._known.values()}
        new = [one for one in job.adapters if (one.name, one.folder) not in known] if job else []
        if job is None or not new:
            return True
        if slots is None:
            return False
        try:
            for piece in rank_adapters(replace(job, adapters=new), config, model, ranks):
                slots.add(piece)
        except ConfigError:
            return False
        self._known |= {one.name: one for one in new}
        return True


def names_of(ids: AdapterIds, prompts: int) -> list[str | None]:
    """The adapter of each prompt; None: the base model. Raises ConfigError for a wrong number."""
    if ids is None or isinstance(ids, str):
        return [adapter_name(ids)] * prompts
    if len(ids) != prompts:
        raise ConfigError(
            f"adapter_id: got {len(ids)} for {prompts} prompts, expected one for each, or one name"
            " for all"
        )
    return [adapter_name(one) for one in ids]
