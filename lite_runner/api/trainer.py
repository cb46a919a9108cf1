"""Trainer: MindFormers' front end for a task: predict, export, train, finetune, evaluate."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lite_runner import launch, progress
from lite_runner.api.auto_model import AutoModel
from lite_runner.api.config import AutoConfig, PretrainedConfig
from lite_runner.api.model import PreTrainedModel
from lite_runner.api.pipelines import TextGenerationPipeline, check_task
from lite_runner.api.settings import as_mapping, read_batch_size
from lite_runner.api.tokenizer import PreTrainedTokenizer
from lite_runner.config import at, did_you_mean, nearest
from lite_runner.config.mindformers_training import evaluation_of
from lite_runner.config.sections import MANIFEST, RANDOM
from lite_runner.errors import ConfigError
from lite_runner.evaluation.tasks import built_in
from lite_runner.output import RESULT
from lite_runner.system.files import read_json_object
from lite_runner.system.yaml_file import read_yaml

# MindFormers' settings of training alone; those of _FINETUNE are what `finetune` takes, the others
# change nothing.
_OF_TRAINING = frozenset(
    """
    adam_beta1 adam_beta2 adam_epsilon dataloader_drop_last dataloader_num_workers data_seed
    data_skip_steps dataset_strategy dataset_task dataset_type do_eval do_predict do_train
    eval_dataset eval_epochs eval_steps evaluation_strategy filepath_prefix
    gradient_accumulation_steps ignore_data_skip integrated_save keep_checkpoint_per_n_minutes
    layer_decay layer_scale learning_rate logging_steps logging_strategy loss_scale_value lr_end
    lr_scheduler_type max_grad_norm metric_type micro_batch_interleave_num micro_batch_num
    num_train_epochs optim overwrite_output_dir per_device_eval_batch_size
    per_device_train_batch_size recompute save_directory save_prefix save_seconds save_steps
    save_strategy save_total_limit scale_sense shuffle sink_mode sink_size total_steps
    train_dataset use_clip_grad warmup_epochs warmup_lr_init warmup_ratio warmup_steps weight_decay
    wrapper_type
    """.split()
)
_FINETUNE = {
    "num_train_epochs": "epochs",
    "total_steps": "steps",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "accumulate",
    "learning_rate": "learning_rate",
    "lr_scheduler_type": "schedule",
    "warmup_steps": "warmup_steps",
    "weight_decay": "weight_decay",
    "max_grad_norm": "clip",
    "shuffle": "shuffle",
    "save_steps": "save_steps",
    "eval_steps": "eval_steps",
}
# Settings of a model's pet_config, as a yaml's are read.
_LORA = {
    "lora_rank": "r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
}
# Arguments of a Trainer: all of training, and of pictures and sounds.
_OBJECTS_OF_TRAINING = (
    *("train_dataset", "eval_dataset", "optimizers", "wrapper", "callbacks", "eval_callbacks"),
    *("compute_metrics", "save_config"),
)


class TrainingArguments:
    """Settings of a Trainer; those of training are what `finetune` takes, or change nothing."""

    def __init__(
        self,
        output_dir: str | Path = "",
        batch_size: int | None = None,
        *,
        seed: int | None = None,
        **training: Any,
    ) -> None:
        """`output_dir` "": the config's; `batch_size` None: the model config's, else the rows of
        an exported graph; `seed` None: the config's.

        Raises ConfigError for an invalid batch_size, and for settings that are unknown or that a
        Trainer does not support.
        """
        if batch_size is not None:
            read_batch_size(batch_size)
        for name, value in training.items():
            if name == "use_parallel" and value:
                hint = "init_context(use_parallel=True) in every rank, before the model is made"
                raise ConfigError("TrainingArguments: got use_parallel=True", hint)
            if name not in _OF_TRAINING and value:
                near = did_you_mean(nearest(name, (*_OF_TRAINING, "batch_size", "output_dir")))
                raise ConfigError(
                    f"TrainingArguments: no training argument {name!r}{near}",
                    "set it on the model's config, or by init_context",
                )
        self.output_dir, self.batch_size, self.seed = output_dir, batch_size, seed
        self._training = training

    def finetune_keys(self) -> dict[str, str]:
        """The settings of training as keys of run_mode=finetune."""
        found = {"finetune.batch_size": self.batch_size, "seed": self.seed}
        found |= {
            f"finetune.{_FINETUNE[n]}": v for n, v in self._training.items() if n in _FINETUNE
        }
        # -1: not given, as there.
        return {key: str(value) for key, value in found.items() if value not in (None, -1)}

    def note_idle(self) -> None:
        """Say which settings `finetune` does not take."""
        idle = [name for name, value in self._training.items() if value and name not in _FINETUNE]
        if idle:
            progress.note(f"no effect here, of TrainingArguments: {', '.join(sorted(idle))}")


class Trainer:
    """A task and its model, to be exported or to predict with."""

    def __init__(
        self,
        args: TrainingArguments | str | Path | Mapping[str, Any] | None = None,
        task: str = "text_generation",
        model: PreTrainedModel | PretrainedConfig | str | Path | None = None,
        model_name: str | None = None,
        *,
        tokenizer: PreTrainedTokenizer | None = None,
        pet_method: str = "",
        image_processor: None = None,
        audio_processor: None = None,
        **training: Any,
    ) -> None:
        """`model`: an object, or what AutoModel takes, None: `model_name`, or that of a yaml file
        or a MindFormerConfig as `args`; `tokenizer`: None takes the model's own; `pet_method`:
        "lora" trains an adapter, as a pet_config of the model does. `training` has train_dataset
        and eval_dataset, paths of files for `finetune`; optimizers and callbacks change nothing.

        Raises ConfigError, ArtifactError.
        """
        check_task(task)
        for name in training:
            if name not in _OBJECTS_OF_TRAINING:
                near = did_you_mean(nearest(name, (*_OBJECTS_OF_TRAINING, "tokenizer", "model")))
                raise ConfigError(f"Trainer: {name}: no such setting{near}")
        absent = {"image_processor": image_processor, "audio_processor": audio_processor}
        for name, value in absent.items():
            if value is not None:
                raise ConfigError(f"Trainer: {name} has no effect with {task}", f"{name}=None")
        if pet_method not in ("", "lora"):
            raise ConfigError(f"Trainer: pet_method: got {pet_method!r}, expected lora or ''")
        of_file = None if isinstance(args, TrainingArguments) else args
        model = model if model is not None else model_name
        if model is None and of_file is not None:
            model = AutoConfig.from_pretrained(of_file)
        if model is None:
            raise ConfigError("Trainer: no model given", "model='smollm2_135m', or a model object")
        if isinstance(model, PretrainedConfig):
            model = AutoModel.from_config(model)
        elif not isinstance(model, PreTrainedModel):
            model = AutoModel.from_pretrained(model)
        self.model = model
        self._args = args if isinstance(args, TrainingArguments) else TrainingArguments()
        self._tokenizer = tokenizer
        self._training, self._lora = training, pet_method == "lora"
        raw: Any = of_file or {}
        if isinstance(raw, str | Path):
            path = Path(raw).expanduser()
            raw = read_yaml(path, "Trainer") if path.suffix in (".yaml", ".yml") else {}
        given = training.get("eval_dataset")
        self._eval_dataset = given or at(raw, "eval_dataset.data_loader.dataset_dir")
        self._metric = at(raw, "metric.type")

    def export(
        self,
        predict_checkpoint: str | Path | None = None,
        auto_trans_ckpt: bool | None = None,
        *,
        overwrite: bool = False,
    ) -> Path:
        """Export as run_mode=export; gives the folder with the graphs, output_dir/<model>_mindir.

        `predict_checkpoint`: weights to take from now on in place of the model's own, which are
        sharded as the ranks need them whatever `auto_trans_ckpt` says. An earlier export is
        replaced. Raises ConfigError where the folder holds anything else, and whatever exporting
        may.
        """
        self._load(predict_checkpoint)
        settings = self.model.config.run_config()
        output = self._output_dir(settings.output_dir)
        folder = f"{output}/{settings.model_name}_mindir"
        launch.launch(
            self.model.config.export_config(
                {
                    "predict_batch_size": self._args.batch_size or self.model.config.batch_size,
                    "output_dir": output,
                    "export_output": folder,
                    "overwrite": overwrite or Path(folder, MANIFEST).is_file(),
                }
            )
        )
        return Path(folder)

    def predict(
        self,
        predict_checkpoint: str | Path | None = None,
        auto_trans_ckpt: bool | None = None,
        *,
        input_data: str | Sequence[str],
        **options: Any,
    ) -> list[dict[str, list[str]]]:
        """The completions of texts; see TextGenerationPipeline for the result and the options,
        and `export` for the checkpoint."""
        self._load(predict_checkpoint)
        if self._args.seed is not None:
            options.setdefault("seed", self._args.seed)
        return TextGenerationPipeline(self.model, self._tokenizer)(input_data, **options)

    def finetune(
        self,
        finetune_checkpoint: str | Path | None = None,
        auto_trans_ckpt: bool | None = None,
        *,
        resume_training: bool = False,
        overwrite: bool = False,
    ) -> Path:
        """Train on the examples of train_dataset as run_mode=finetune, on the CPU; gives the folder
        with the adapter (pet_method="lora", or a pet_config of the model) or the model,
        output_dir/<model>_lora or <model>_finetuned.

        `finetune_checkpoint`: as for `export`. Raises ConfigError without a train_dataset, for a
        folder that is not empty (without `overwrite`), and whatever training may.
        """
        data, evaluated = (self._training.get(f"{name}_dataset") for name in ("train", "eval"))
        if not isinstance(data, str | Path):
            raise ConfigError(
                "Trainer: finetune() needs a train_dataset, the path of a file of examples",
                "a .jsonl, .json, .csv or .mindrecord file",
            )
        self._load(finetune_checkpoint)
        settings = self.model.config.run_config()
        output = self._output_dir(settings.output_dir)
        lora = self._lora_keys()
        folder = f"{output}/{settings.model_name}_{'finetuned' if lora is None else 'lora'}"
        keys = {
            "finetune.data": str(data),
            "finetune.full": str(lora is None),
            **(lora or {}),
            "finetune.resume": str(resume_training),
            "finetune_output": folder,
            "output_dir": output,
            "overwrite": str(overwrite),
            **self._args.finetune_keys(),
        }
        if isinstance(evaluated, str | Path):
            keys["finetune.eval_data"] = str(evaluated)
        self._args.note_idle()
        launch.launch(self.model.config.finetune_config(keys))
        return Path(folder)

    def train(
        self,
        train_checkpoint: str | Path | bool | None = None,
        auto_trans_ckpt: bool | None = None,
        *,
        resume_training: bool = False,
        overwrite: bool = False,
    ) -> Path:
        """As `finetune`, but from random weights unless there is a `train_checkpoint`; True: the
        model's own."""
        checkpoint = None if train_checkpoint is True else train_checkpoint or RANDOM
        return self.finetune(checkpoint, resume_training=resume_training, overwrite=overwrite)

    def evaluate(
        self,
        eval_checkpoint: str | Path | bool | None = None,
        auto_trans_ckpt: bool | None = None,
        *,
        eval_dataset: str | Path | None = None,
        metric_name: str | None = None,
    ) -> dict[str, float]:
        """The metrics of the model over a file, as run_mode=eval computes them.

        `eval_dataset`: JSON lines, CSV, or a text; None: that of the Trainer, or of its yaml file.
        `metric_name`: PerplexityMetric, EmF1Metric or ADGENMetric, or a task of eval.tasks; None:
        that of the yaml file, else PerplexityMetric. See `export` for the checkpoint.

        Raises ConfigError where there is no such data or metric, and whatever a run may.
        """
        self._load(eval_checkpoint if isinstance(eval_checkpoint, str | Path) else None)
        data = eval_dataset or self._eval_dataset
        metric = metric_name or self._metric
        if not isinstance(data, str | Path) or not data:
            raise ConfigError(
                f"Trainer: eval_dataset: got {data!r}, expected the path of a file",
                "trainer.evaluate(eval_dataset='FILE.jsonl', metric_name='EmF1Metric')",
            )
        if metric in built_in():
            found: dict[str, Any] = {"eval": {"tasks": metric, "data": str(data)}}
        else:
            try:
                found = evaluation_of(metric, data)
            except ValueError as error:
                raise ConfigError(f"Trainer: {error}") from None
        output = self._output_dir(self.model.config.run_config().output_dir)
        launch.launch(self.model.config.eval_config({**found, "output_dir": output}))
        result = read_json_object(Path(output, "latest", RESULT))
        if "evaluation" in result:
            perplexity = result["evaluation"]["perplexity"]
            return {"loss": math.log(perplexity), "PPL": perplexity}
        (task,) = result["tasks"]["results"]
        return {one["metric"]: one["value"] for one in task["metrics"]}

    def __repr__(self) -> str:
        return f"Trainer({self.model.described})"

    def _output_dir(self, usual: str) -> str:
        return str(Path(str(self._args.output_dir) or usual).expanduser())

    def _lora_keys(self) -> dict[str, str] | None:
        """The keys of the adapter to train, as the model's pet_config says; None: all weights."""
        pet = as_mapping(getattr(self.model.config, "pet_config", None))
        if not isinstance(pet, Mapping) or str(pet.get("pet_type")).lower() != "lora":
            return {} if self._lora else None
        given = {key: pet.get(name) for name, key in _LORA.items()}
        return {
            f"finetune.lora.{key}": json.dumps(value) if isinstance(value, list) else str(value)
            for key, value in given.items()
            if value is not None
        }

    def _load(self, checkpoint: str | Path | None) -> None:
        if not checkpoint:
            return
        config = self.model.config.copy()
        config.load_checkpoint = str(checkpoint)
        self.model.close()
        self.model = AutoModel.from_config(config)
