"""A MindFormers yaml's training and evaluation, as keys of run_mode=finetune and run_mode=eval."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from lite_runner.config import at, put_at, show
from lite_runner.config.argv import CommandLine, ConfigFile, Setting
from lite_runner.config.sections import RANDOM

# Keys of MindFormers by ours; of several with the same meaning the last that is given counts.
_SAME = {
    "runner_config.epochs": "epochs",
    "train_dataset.batch_size": "batch_size",
    "runner_config.batch_size": "batch_size",
    "runner_config.gradient_accumulation_steps": "accumulate",
    "runner_wrapper.max_grad_norm": "clip",
    "resume_training": "resume",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.learning_rate": "learning_rate",
    "lr_schedule.learning_rate": "learning_rate",
    "lr_schedule.warmup_steps": "warmup_steps",
    "lr_schedule.total_steps": "steps",
    "train_dataset.data_loader.shuffle": "shuffle",
    "model.model_config.seq_length": "max_length",
    "train_dataset.data_loader.dataset_dir": "data",
    "train_dataset.data_loader.data_files": "data",
    "train_dataset.data_loader.num_samples": "take",
    "model.model_config.pet_config.lora_rank": "lora.r",
    "model.model_config.pet_config.lora_alpha": "lora.alpha",
    "model.model_config.pet_config.lora_dropout": "lora.dropout",
    "model.model_config.pet_config.target_modules": "lora.targets",
}
_SCHEDULES = {
    "constantwarmuplr": "constant",
    "linearwithwarmuplr": "linear",
    "cosinewithwarmuplr": "cosine",
}
_OPTIMIZERS = ("adamw", "fp32stateadamweightdecay", "adamweightdecay", "fusedadamweightdecay")
# Further keys of these sections, and their values without effect.
_OTHERS: dict[str, tuple[Any, ...]] = {
    "optimizer.betas": ([0.9, 0.999],),
    "optimizer.beta1": (0.9,),
    "optimizer.beta2": (0.999,),
    "optimizer.eps": (1e-8,),
    "lr_schedule.lr_end": (0, 0.0),
    "lr_schedule.warmup_lr_init": (0, 0.0),
    "lr_schedule.num_cycles": (0.5,),
    "lr_schedule.decay_ratio": (None,),
    "lr_schedule.decay_steps": (None,),
    "runner_config.initial_epoch": (0,),
    "layer_scale": (False,),
    "lr_scale": (False,),
    "layer_decay": (1.0,),
}
_TASKS = {"PerplexityMetric": "texts", "EmF1Metric": "squad", "ADGENMetric": "adgen"}
_DATA = (".jsonl", ".jsonl.gz", ".json", ".csv", ".tsv", ".parquet")
_COLUMNS = ["content", "summary"]
_READ = re.compile(r"\.(jsonl?|csv|mindrecord\d*)$")  # names of files to train on
_EVALUATION = (
    *("do_eval", "eval_dataset", "eval_dataset_task", "eval_step_interval"),
    *("eval_epoch_interval", "metric"),
)
_OFF = (None, "", -1, 0, "None")


def as_finetune(line: CommandLine, file: ConfigFile) -> tuple[CommandLine, ConfigFile, str]:
    """A line and its file of MindFormers' run_mode=train as run_mode=finetune: of all weights,
    unless there is an adapter to train, from random ones, unless a checkpoint is named; and a note
    about that."""
    if file.raw.get("run_mode") == "train":
        file = replace(file, raw={**file.raw, "run_mode": "finetune"})
    if line.last("run_mode") not in (None, "train"):
        return line, file, ""  # another mode is typed, overriding the file's
    settings = [
        replace(one, value="finetune") if one.key == "run_mode" else one for one in line.settings
    ]

    def given(*keys: str) -> bool:
        return any(line.values(key) or at(file.raw, key) not in _OFF for key in keys)

    if not given("finetune.full", "finetune.init_adapter", "model.model_config.pet_config"):
        settings.append(Setting("finetune.full", "true"))
    note = ""
    if not given("load_checkpoint", "pretrained_model_dir"):
        settings.append(Setting("load_checkpoint", RANDOM))
        note = "run_mode=train without load_checkpoint= starts with random weights"
    return replace(line, settings=settings), file, note


def with_training(
    raw: Mapping[str, Any], *, has_data: bool = False
) -> tuple[dict[str, Any], list[str], list[str]]:
    """A file with `finetune` in place of what MindFormers calls otherwise; what of it is computed
    in another way, and validation errors, of its data only unless the run `has_data` of its own."""
    result: dict[str, Any] = copy.deepcopy(dict(raw))
    own: dict[str, Any] = dict(result.get("finetune") or {})
    notes: list[str] = []
    errors: list[str] = []
    found: dict[str, Any] = {}
    for theirs, ours in _SAME.items():
        value = at(raw, theirs)
        if value is not None and not (ours in ("steps", "warmup_steps", "take") and value in _OFF):
            found[ours] = value
    callbacks = raw.get("callbacks")
    for callback in callbacks if isinstance(callbacks, list) else ():
        steps = callback.get("save_checkpoint_steps") if isinstance(callback, Mapping) else None
        if type(steps) is int and steps > 0:
            found["save_steps"] = steps
    kind = at(raw, "lr_schedule.type")
    if kind is not None:
        found["schedule"] = _SCHEDULES.get(str(kind).lower())
        if found["schedule"] is None:
            errors.append(
                f"lr_schedule.type: got {show(kind)}, expected CosineWithWarmUpLR,"
                " LinearWithWarmUpLR or ConstantWarmUpLR"
            )
            del found["schedule"]
    kind = at(raw, "optimizer.type")
    if kind is not None and str(kind).lower() not in _OPTIMIZERS:
        errors.append(f"optimizer.type: got {show(kind)}, expected AdamW, the only one")
    ratio = at(raw, "lr_schedule.warmup_ratio")
    if isinstance(ratio, float) and ratio and "warmup_steps" not in found:
        if isinstance(found.get("steps"), int):
            found["warmup_steps"] = math.ceil(ratio * found["steps"])
        else:
            notes.append(
                f"lr_schedule.warmup_ratio={ratio:g} needs lr_schedule.total_steps;"
                " finetune.warmup_steps= says how many"
            )
    if not has_data:
        errors += _data_errors(raw, found)
    notes += _handled(raw, found)
    if at(raw, "do_eval") is True:
        notes += _evaluated(raw, found)
        for key in _EVALUATION:
            result.pop(key, None)
    if found.get("clip") is not None and at(raw, "runner_wrapper.use_clip_grad") is False:
        found["clip"] = 0
    notes += [
        f"{key}={show(value)} is ignored: it is {show(usual[0])} here"
        for key, usual in _OTHERS.items()
        if (value := at(raw, key)) is not None and value not in usual
    ]
    pet = at(raw, "model.model_config.pet_config")
    settings = at(result, "model.model_config")
    if isinstance(pet, Mapping) and isinstance(settings, dict):
        if str(pet.get("pet_type", "lora")).lower() == "lora":
            del settings["pet_config"]
    elif any(at(raw, key) is not None for key in ("runner_config", "optimizer", "lr_schedule")):
        found["full"] = True
    for section in ("runner_config", "optimizer", "lr_schedule", "train_dataset"):
        result.pop(section, None)
    for key, value in found.items():
        if at(own, key) is None:
            put_at(own, key, value)
    if own:
        result["finetune"] = own
    return result, notes, errors


def _data_errors(raw: Mapping[str, Any], found: dict[str, Any]) -> list[str]:
    """Validation errors of a loader's examples, which are taken out of what was `found`."""
    loader = at(raw, "train_dataset.data_loader")
    if not isinstance(loader, Mapping):
        return []
    data = found.pop("data", None)
    if isinstance(data, list) and len(data) == 1:
        data = data[0]
    named = "data_files" if loader.get("data_files") else "dataset_dir"
    if data in _OFF:
        named, data = "path", loader.get("path")  # of a hub
        if data in _OFF:
            return []
    elif isinstance(data, str) and (_READ.search(data) or _is_folder(loader, data)):
        found["data"] = data
        return []
    return [
        f"train_dataset.data_loader.{named}: got {show(data)} of {loader.get('type')}, which is not"
        " read here; finetune.data= names a .jsonl, .json, .csv or .mindrecord file"
    ]


def _is_folder(loader: Mapping[str, Any], data: str) -> bool:
    """True for a folder of MindRecord files."""
    return loader.get("type") == "MindDataset" and not PurePath(data).suffix


def _handled(raw: Mapping[str, Any], found: dict[str, Any]) -> list[str]:
    """Put what the handlers of a loader do beside what was `found`; what of them is not taken."""
    loader = at(raw, "train_dataset.data_loader")
    handlers = loader.get("handler") if isinstance(loader, Mapping) else None
    notes = []
    for one in handlers if isinstance(handlers, list) else [handlers]:
        if not isinstance(one, Mapping):
            continue
        kind = one.get("type")
        if kind == "PackingHandler" and one.get("pack_strategy", "pack") == "pack":
            found["packing"] = True
        elif kind in ("take", "skip") and type(one.get("n")) is int and one["n"] >= 0:
            taken = found.get("take", one["n"] if kind == "take" else None)  # not type-checked yet
            if kind == "take":
                found["take"] = min(one["n"], taken) if type(taken) is int else taken
            else:
                found["skip"] = found.get("skip", 0) + one["n"]
                if type(taken) is int:  # counted after skipping
                    found["take"] = max(taken - one["n"], 0)
        elif kind == "AlpacaInstructDataHandler":
            found["template"] = "alpaca"
            notes.append(
                f"{kind}: the prompts are Alpaca's (finetune.template=alpaca), without the"
                " conversation that MindFormers puts around them"
            )
        else:
            notes.append(
                f"train_dataset.data_loader.handler: {show(kind)} is ignored: the keys of"
                " an example decide how it is read"
            )
            continue
        if one.get("seq_length") is not None:
            found["max_length"] = one["seq_length"]
    return notes


def _evaluated(raw: Mapping[str, Any], found: dict[str, Any]) -> list[str]:
    """Put the evaluation during a training beside what was `found`; what of it is not taken."""
    data = at(raw, "eval_dataset.data_loader.dataset_dir")
    if not _READ.search(str(data)):
        return [
            f"do_eval=true: eval_dataset.data_loader.dataset_dir is {show(data)}, which is not read"
            " here; finetune.eval_data= names a .jsonl, .json, .csv or .mindrecord file"
        ]
    found["eval_data"] = data
    steps, epochs = at(raw, "eval_step_interval"), at(raw, "eval_epoch_interval")
    if steps not in _OFF:
        found["eval_steps"] = steps
    elif epochs not in (*_OFF, 1):
        return [
            f"eval_epoch_interval={show(epochs)} is ignored: each epoch is evaluated;"
            " finetune.eval_steps= says after how many steps"
        ]
    return []


def evaluation_of(metric: Any, data: Any) -> dict[str, Any]:
    """The settings of run_mode=eval for a metric of MindFormers over a file or folder. Raises
    ValueError with why there are none."""
    metric = metric or "PerplexityMetric"
    if metric not in _TASKS:
        raise ValueError(f"metric.type: got {show(metric)}, expected one of {', '.join(_TASKS)}")
    if str(data).endswith(".txt") and metric == "PerplexityMetric":
        return {"eval_data": str(data)}
    if not str(data).endswith(_DATA):
        raise ValueError(
            f"eval_dataset.data_loader.dataset_dir: {show(data)} is not read here; with {metric} a"
            f" file of JSON lines or CSV is{', or a .txt' if metric == 'PerplexityMetric' else ''}"
        )
    return {"eval": {"tasks": _TASKS[metric], "data": str(data)}}


def with_evaluation(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A file with our keys of an evaluation in place of MindFormers' data and metric; what of it is
    not taken."""
    data = at(raw, "eval_dataset.data_loader.dataset_dir")
    if data in _OFF:
        return dict(raw), []
    columns = at(raw, "eval_dataset.data_loader.origin_columns")
    metric = at(raw, "metric.type")
    if metric == "ADGENMetric" and columns not in (None, _COLUMNS):
        return dict(raw), [
            f"eval_dataset.data_loader.origin_columns: got {show(columns)}, expected {_COLUMNS};"
            " other columns are a task of your own: eval.tasks=TASK.yaml"
        ]
    try:
        found = evaluation_of(metric, data)
    except ValueError as error:
        return dict(raw), [str(error)]
    window = at(raw, "model.model_config.seq_length")
    if "eval_data" in found and window is not None:
        found["eval_window"] = window
    taken = ("metric", "eval_dataset", "eval_dataset_task")
    return {**{key: value for key, value in raw.items() if key not in taken}, **found}, []
