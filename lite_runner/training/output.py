"""Outputs of a training: an adapter, or a model, trained or with the adapter merged; and the
checkpoints that MindFormers goes on from."""

from __future__ import annotations

import glob
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import AdapterFormat, CheckpointFormat
from lite_runner.records import dataclass
from lite_runner.training.adapter import TrainedLora, in_memory
from lite_runner.training.kernels import Array
from lite_runner.training.mindformers_checkpoint import FOLDER, write_training
from lite_runner.weights import LazyTensor
from lite_runner.weights.lora.adapter import merged, merged_model
from lite_runner.weights.lora.adapter_gguf import SUFFIX as GGUF
from lite_runner.weights.lora.adapter_gguf import write_lora_gguf
from lite_runner.weights.lora.adapter_reader import FILES as ADAPTER_FILES
from lite_runner.weights.lora.adapter_writer import write_adapters
from lite_runner.weights.write import files_folder, with_head, write_model

Form = AdapterFormat | CheckpointFormat
# Not the tokenizer, which lies beside adapters too.
_MODEL_FILES = ("model.safetensors", "config.json", "generation_config.json")


@dataclass(frozen=True)
class TrainingOutput:
    """Writes the trained arrays."""

    model: Decoder
    lora: TrainedLora | None  # None: the model itself is trained
    form: Form
    name: str  # of a file in the folder
    tensors: Callable[[], Mapping[str, LazyTensor]]  # of the model, but for what is trained
    beside: Callable[[], Mapping[str, bytes]]  # config and tokenizer, for a model

    def write(self, folder: Path, trained: Mapping[str, Array]) -> None:
        """Write the trained weights. Raises EnvironmentFault."""
        self._clean(folder)
        form = self.form
        if form == "ckpt" or form == "safetensors" or form == "huggingface":
            tensors, model = self.tensors(), self.model
            if self.lora is None:
                tensors = {**tensors, **_held(trained)}
            else:
                # It is zero after the first step of a warm-up.
                adapter = replace(self.lora.adapter(), may_be_zero=True)
                tensors, model = merged(tensors, adapter, model), merged_model(model, adapter)
            target = folder if form == "huggingface" else folder / f"{self.name}.{form}"
            if form != "huggingface":
                tensors = with_head(tensors, model)
            write_model(target, form, tensors, model, self.beside())
            return
        assert self.lora is not None
        adapter = self.lora.adapter()
        if form == "gguf":
            write_lora_gguf(adapter, self.model, folder / f"{self.name}{GGUF}")
        else:
            adapters = {adapter.name: adapter}
            write_adapters(adapters, self.model, folder, form, overwrite=True, listed=False)

    def _clean(self, folder: Path) -> None:
        """Remove files of a training in another format."""
        weights = {form: f"{self.name}.{form}" for form in ("ckpt", "safetensors", "gguf")}
        for form, names in {
            "peft": ADAPTER_FILES,
            "huggingface": _MODEL_FILES,
            **{form: (name,) for form, name in weights.items()},
        }.items():
            kept = "peft" if self.form == "mindformers" else self.form
            for name in names if form != kept else ():
                (folder / name).unlink(missing_ok=True)
                shutil.rmtree(files_folder(folder / name), ignore_errors=True)

    def write_checkpoint(
        self, folder: Path, state: Sequence[Mapping[str, Array]], step: int, steps_per_epoch: int
    ) -> Path:
        """Write the checkpoint that MindFormers resumes, in place of the previous one."""
        trained, *moments = state
        own = {} if self.lora else _held(trained)
        tensors = dict(with_head({**self.tensors(), **own}, self.model))
        epoch, place = divmod(step - 1, steps_per_epoch)
        ranks = folder / FOLDER / "rank_0"
        path = ranks / f"{self.name}_rank_0-{epoch + 1}_{place + 1}.ckpt"
        write_training(path, self.model, tensors, self.lora, moments, step=step, epoch=epoch + 1)
        for other in ranks.glob(f"{glob.escape(self.name)}_rank_0-*.ckpt"):
            if other != path:
                other.unlink()
        return path


def _held(arrays: Mapping[str, Array]) -> dict[str, LazyTensor]:
    return {name: in_memory(array) for name, array in arrays.items()}
