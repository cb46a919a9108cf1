"""run_mode=finetune: a LoRA adapter, or the whole model, trained on examples."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import numpy as np

from lite_runner import progress
from lite_runner.architectures import custom_network, native_parts, parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.config import Invalid, invalid
from lite_runner.config.checks import check_fits
from lite_runner.config.groups import exists
from lite_runner.config.prompt import no_likelihood
from lite_runner.config.sections import AdapterFormat, CheckpointFormat, Ranks
from lite_runner.errors import ConfigError
from lite_runner.model import ModelFiles
from lite_runner.model.locate import locate_for_plan, side_files, tokenizer_for_plan
from lite_runner.output import Result, RunFolder, Timing
from lite_runner.plan import Plan
from lite_runner.records import dataclass
from lite_runner.sizing import check_memory, model_lines, parameter_count, shortage
from lite_runner.system.files import make_folder, readable
from lite_runner.system.signals import CutShort, Terminated, deferred
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.training.adapter import TrainedLora, new_lora, opened_lora
from lite_runner.training.costs import memory_of, operations_of, product_speed
from lite_runner.training.data import ExampleSet, read_data
from lite_runner.training.kernels import Array, Room
from lite_runner.training.mindformers_checkpoint import (
    SavedTraining,
    checkpoint_file,
    open_training,
)
from lite_runner.training.network import Example, TrainedNetwork, frozen, matrices
from lite_runner.training.options import TrainOptions as Config
from lite_runner.training.output import TrainingOutput
from lite_runner.training.shard import AllGather, ModelShard
from lite_runner.training.tape import Bfloat16Matrix, FrozenMatrix, PanelMatrix, StoredMatrix
from lite_runner.training.tensorboard import event, event_file, header
from lite_runner.training.trainer import (
    CHECKPOINT,
    Gather,
    StepMetrics,
    Trainer,
    step_count,
    step_size,
)
from lite_runner.weights import LazyTensor
from lite_runner.weights.sharding.partition import sliced
from lite_runner.weights.write import check_folder, check_hugging_face

__all__ = ["Config", "errors", "plan", "run"]

METRICS = "metrics.jsonl"
BEST = "best"  # folder in finetune_output
CURVE = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60
DEFAULT_LENGTH = 1024  # tokens of an example


@dataclass(frozen=True, kw_only=True)
class TrainPlan(Plan):
    """The plan of a training, with its examples; without a tokenizer there are none."""

    data: ExampleSet | None = None
    evaluated: Sequence[Example] = ()
    packs: Sequence[Sequence[Example]] = ()
    saved: SavedTraining | None = None  # a training of MindFormers to go on from
    panels: bool = False  # frozen matrices are in memory twice: see PanelMatrix


def errors(config: Config) -> Iterator[Invalid]:
    """Validation errors of a fine-tuning."""
    if not config.finetune_output:
        yield invalid("finetune_output", "finetune_output is empty; give the folder to write")
    if config.finetune.full and config.convert_format in get_args(AdapterFormat):
        yield invalid(
            ("convert_format", "finetune.full"),
            f"convert_format={config.convert_format} is for adapters; finetune.full=true writes"
            f" a model: {', '.join(get_args(CheckpointFormat))}",
        )
    if config.backend not in ("auto", "native"):
        yield invalid(
            ("backend", "run_mode"),
            f"backend={config.backend} is not available with run_mode=finetune, which computes on"
            " the CPU by itself; expected backend=auto",
        )
    if config.context.device_target == "Ascend":
        yield invalid(
            ("context.device_target", "run_mode"),
            "context.device_target=Ascend is not available with run_mode=finetune, which computes"
            " on the CPU; expected CPU",
        )


def plan(config: Config) -> Plan:
    """The model and the examples. With dry_run=true nothing is fetched, and without a tokenizer the
    examples are not read. Raises RunnerError."""
    began = time.perf_counter()
    asked, target = config.finetune, config.target
    own = asked.resume and (target / CHECKPOINT).is_file()
    if not own:
        check_folder(target, config.overwrite)
    files, saved = _located(config)
    if files.path is not None:
        source = files.path if files.path.is_dir() else files.path.parent
        if source.resolve() == target.resolve():
            raise ConfigError(
                f"finetune_output: {target} holds the model that is trained",
                "choose another folder",
            )
    model = files.model
    check_fits(config, model)
    length = _max_length(config, model)
    lora = None
    if asked.full and model.normed_head:
        raise ConfigError(
            f"finetune.full=true: {model.architecture} computes with a head whose rows are divided"
            " by their lengths, whose gradients are not implemented",
            "finetune.full=false trains an adapter",
        )
    if not asked.full:
        lora = _lora(config, model, saved)
    if config.form == "huggingface":
        check_hugging_face(model)
    tokenizer = tokenizer_for_plan(config.tokenizer, files, dry_run=config.dry_run)
    data, evaluated, packs = None, None, list[list[Example]]()
    if tokenizer is not None:
        data = _data("data", asked.data, config, model, tokenizer, asked.skip, asked.take)
        packs = data.packs(length if asked.packing else None)
        if asked.eval_data:
            evaluated = _data("eval_data", asked.eval_data, config, model, tokenizer)
    trained = parameter_count(model) if lora is None else sum(a.size for a in lora.arrays.values())
    longest = max((len(text.ids) for text in data.texts), default=0) if data else length
    parts, threads = config.ranks.tensor, config.context.threads
    # Rank 0 has all of what ranks train parts of, when it is written.
    held = trained + trained // parts if asked.full and parts > 1 else trained
    need = partial(memory_of, asked, model.shard(parts), held, longest, threads=threads)
    # Less memory may have been asked for, and others may need what is free.
    panels = asked.dtype == "float32" and not (asked.full or asked.checkpoint)
    here = config.cluster.local_worker_num if config.use_parallel else 1
    panels = panels and shortage(need(panels=True), 0.5 / here) is None
    memory = need(panels=panels)
    lines = model_lines(config.run_mode, config.model_name, model, files.location())
    lines["trains"] = f"{trained:,} of {parameter_count(model):,} parameters" + (
        "" if lora is None else f", LoRA of {len(lora.deltas)} weights"
    )
    if data is not None:
        ranks = config.ranks
        steps = step_count(asked, len(packs), ranks)
        if saved is not None and not own and saved.step >= steps:
            raise ConfigError(
                f"finetune.resume=true: {saved.path} was saved after step {saved.step}, got"
                f" finetune.steps={steps}",
                "a larger finetune.steps=, which counts those before too",
            )
        batch = step_size(asked, ranks)
        mean = data.tokens / len(packs)
        lines["data"] = data.summary(length)
        lines["steps"] = (
            f"{steps:,} of {batch} {'packs' if asked.packing else 'examples'},"
            f" {steps * batch / len(packs):.2f} epochs,"
            f" about {round(steps * batch * mean):,} tokens"
        )
        if config.dry_run:
            work = operations_of(asked, model, data) * steps * batch / len(packs)
            speed = product_speed(asked.dtype, model, threads, panels=panels)
            lines["time"] = (
                f"about {progress.duration(work / speed / ranks.size)}, an estimate:"
                f" {work / 1e9:,.1f} GFLOP of matrix products, at the {speed / 1e9:.0f}"
                " GFLOP/s measured just now"
                + (f", by {ranks.size} ranks as fast as this" if ranks.size > 1 else "")
            )
    lines["memory"] = f"{readable(memory.total)}: {memory.parts()}"
    what = "an adapter" if config.form in get_args(AdapterFormat) else "a model"
    lines["writes"] = f"{target}, {what} as {config.form}"
    plan = TrainPlan(
        config=config,
        files=files,
        memory=memory,
        lines=lines,
        tokenizer=tokenizer,
        data=data,
        evaluated=evaluated.texts if evaluated else (),
        packs=packs,
        saved=saved,
        panels=panels,
    )
    return replace(plan, seconds=time.perf_counter() - began)


def run(plan: Plan, folder: RunFolder, interrupted: Callable[[], bool] = lambda: False) -> None:
    """Train and write `finetune_output`, which rank 0 does. Raises RunnerError; KeyboardInterrupt
    after Ctrl-C, when a checkpoint has been written."""
    began = time.perf_counter()
    config = plan.config
    assert isinstance(config, Config) and isinstance(plan, TrainPlan) and plan.data is not None
    assert plan.memory is not None
    check_memory(plan.memory)
    asked, files, target, saved = config.finetune, plan.model, config.target, plan.saved
    shard = None
    if plan.ranks.tensor > 1:
        shard = ModelShard(files.model, plan.ranks, _all_gather(plan.ranks))
    stored = _stored(files, shard) if asked.dtype == "stored" else {}
    tensors = _weights(files, stored, shard)
    others: dict[str, FrozenMatrix] = {}
    if asked.full:
        room = Room()
        weights = {name: room.copied(one) for name, one in tensors}
    else:
        panels = PanelMatrix if plan.panels else None
        kind = Bfloat16Matrix if asked.dtype == "bfloat16" else panels
        weights, others = frozen(files.model, tensors, kind)
        others |= {name: StoredMatrix(read) for name, read in stored.items()}
    lora = None if asked.full else _lora(config, files.model, saved)
    trained = _learned(files.model, weights) if lora is None else lora.arrays
    deltas = {} if lora is None else lora.deltas
    network = TrainedNetwork(
        files.model,
        weights,
        trained,
        deltas,
        others=others,
        recomputes=asked.checkpoint,
        shard=shard,
    )
    trainer = Trainer(
        network,
        plan.packs,
        asked,
        evaluated=plan.evaluated,
        seed=config.seed or 0,
        threads=config.context.threads,
        identity=_identity(config, plan.data, plan.evaluated),
        ranks=plan.ranks,
        gather=_gather(plan.ranks),
        interrupted=interrupted,
    )
    checkpoint = target / CHECKPOINT
    if asked.resume and checkpoint.is_file():
        trainer.resume(checkpoint)
        progress.note(f"resumed after step {trainer.done} of {trainer.steps}: {checkpoint}")
    elif saved is not None:
        trainer.resume_from(saved.step, (saved.first, saved.second))
        progress.note(
            f"resumed after step {trainer.done} of {trainer.steps}: {saved.path}, with the moments"
            " of its optimizer; the order of examples is this program's"
        )
    trainer.check_same_step()
    loaded = time.perf_counter() - began
    if plan.ranks.rank > 0:
        _follow(trainer, moments=config.for_mindformers)
        return
    make_folder(target)
    if trainer.done == trainer.began and (target / BEST).is_dir():
        shutil.rmtree(target / BEST)  # of a training that this one overwrites

    output = TrainingOutput(
        files.model,
        lora,
        config.form,
        target.name,
        partial(_unchanged, files),
        partial(side_files, config.tokenizer, files),
    )
    steps = _train(trainer, folder, config, output)
    state = trainer.state(moments=config.for_mindformers)
    output.write(target, state[0])
    if config.for_mindformers:
        path = output.write_checkpoint(target, state, trainer.done, trainer.epoch_steps)
        progress.note(f"wrote {path}: for MindFormers' resume_training")
    checkpoint.unlink(missing_ok=True)
    _write_curves(folder, steps, charts=asked.charts)
    seconds = sum(step.seconds for step in steps)
    folder.write_result(
        Result.of(
            plan,
            files.source,
            engine="native",
            seed=config.seed or 0,
            timing=Timing(load_s=loaded),
            finetune=_summary(trainer, steps, seconds),
        )
    )
    last = f", loss {steps[0].loss:.4f} to {steps[-1].loss:.4f}" if steps else ""
    if trainer.done < trainer.steps:
        progress.note(f"stopped early: no lower loss in {asked.early_stop} evaluations")
    if trainer.best_step:
        progress.note(
            f"wrote {target / BEST}: step {trainer.best_step}, whose evaluation loss of"
            f" {trainer.best_loss:.4f} is the lowest"
        )
    progress.note(f"wrote {target}: {len(steps)} steps in {seconds:.1f} s{last}")


def _follow(trainer: Trainer, *, moments: bool) -> None:
    """The steps of a rank that writes nothing, which meets rank 0 where that one does; `moments`:
    they are written at the end. Raises KeyboardInterrupt where ranks are stopped."""
    first = trainer.done
    for step in trainer.run():
        due = trainer.is_saved(step)
        if trainer.is_best(step) or due:
            trainer.state(moments=due)
    if trainer.done > first or not trainer.stopped:
        trainer.state(moments=moments or trainer.stopped)
    if trainer.stopped:
        raise CutShort


def _train(
    trainer: Trainer, folder: RunFolder, config: Config, output: TrainingOutput
) -> list[StepMetrics]:
    """The steps that were made; each is a line of metrics.jsonl. The best one is written. After
    Ctrl-C a checkpoint is written, and KeyboardInterrupt raised."""
    steps: list[StepMetrics] = []
    target = config.target
    checkpoint = target / CHECKPOINT
    shown = began = time.monotonic()
    first = trainer.done
    stepping = trainer.run()
    try:
        with (
            (folder.path / METRICS).open("a", encoding="utf-8") as file,
            (folder.path / event_file()).open("ab") as event_log,
        ):
            event_log.write(header())
            while True:
                with deferred():  # the changes of a step are complete
                    step = next(stepping, None)
                    if step is None:
                        break
                    steps.append(step)
                    file.write(step.line())
                    file.flush()
                    event_log.write(event(step))
                    event_log.flush()
                    best, due = trainer.is_best(step), trainer.is_saved(step)
                    state = trainer.state(moments=due) if best or due else []
                    if best:
                        output.write(target / BEST, state[0])
                    if due:
                        trainer.save(checkpoint, state)
                    if due and config.for_mindformers:
                        output.write_checkpoint(target, state, step.step, trainer.epoch_steps)
                now = time.monotonic()
                left = (now - began) / (step.step - first) * (trainer.steps - step.step)
                line = (
                    f"step {step.step} of {trainer.steps}: loss {step.loss:.4f},"
                    f" {step.tokens / step.seconds:,.0f} tokens/s, {progress.duration(left)} left"
                )
                evaluated = step.eval_loss is not None
                if evaluated:
                    line += f", evaluation loss {step.eval_loss:.4f}"
                progress.status(line)
                if step.step in (first + 1, trainer.steps) or evaluated or now - shown > 10:
                    progress.note(line)
                    shown = now
        if trainer.stopped:
            raise CutShort
    except (KeyboardInterrupt, Terminated):
        progress.status("")
        # The other ranks meet this one where all have agreed to stop, not where it was ended.
        if trainer.done > first and (trainer.stopped or not trainer.divided):
            with deferred():
                trainer.save(checkpoint, trainer.state())
            progress.note(
                f"saved step {trainer.done} of {trainer.steps} to {checkpoint};"
                " finetune.resume=true goes on"
            )
        raise
    finally:
        stepping.close()
    progress.status("")
    return steps


def _gather(ranks: Ranks) -> Gather:
    """The collective of several ranks; MindSpore is not imported for one."""
    if ranks.size == 1:
        return lambda payload: [payload]
    from lite_runner.backends.collectives import gather

    return gather


def _all_gather(ranks: Ranks) -> AllGather:
    from lite_runner.backends.collectives import all_gather

    return all_gather(ranks)


def _summary(trainer: Trainer, steps: list[StepMetrics], seconds: float) -> Mapping[str, object]:
    tokens = sum(step.tokens for step in steps)
    return {
        "steps": trainer.steps,
        "first_loss": steps[0].loss if steps else None,
        "last_loss": steps[-1].loss if steps else None,
        "best_step": trainer.best_step or None,
        "best_eval_loss": trainer.best_loss if trainer.best_step else None,
        "tokens": tokens,
        "seconds": seconds,
        "tok_s": tokens / seconds if seconds else None,
    }


def _max_length(config: Config, model: Decoder) -> int:
    """The most tokens of an example. Raises ConfigError for more than the context."""
    asked = config.finetune.max_length
    if model.prefix is not None or custom_network(model) is not None:
        what, hint = no_likelihood("run_mode=finetune")
        raise ConfigError(what, hint)
    experts = None if model.sparse is None else model.sparse.experts
    untrained = native_parts(model)
    if experts is not None and experts.scaled_inputs:
        untrained.append("experts whose inputs are scaled")
    for what in untrained:
        raise ConfigError(
            f"run_mode=finetune: {model.architecture} has {what.rstrip(',')}, which cannot be"
            " trained"
        )
    if asked is not None and asked > model.seq_length:
        raise ConfigError(
            f"finetune.max_length: got {asked}, expected at most the model's context of"
            f" {model.seq_length} tokens"
        )
    return asked or min(DEFAULT_LENGTH, model.seq_length)


def _located(config: Config) -> tuple[ModelFiles, SavedTraining | None]:
    """The model, and the training of MindFormers that load_checkpoint is, if one is resumed. Raises
    RunnerError."""
    asked, source = config.finetune, config.source
    if not asked.resume or not Path(source.checkpoint).expanduser().exists():
        return locate_for_plan(source), None
    path = checkpoint_file(Path(source.checkpoint).expanduser())
    files = locate_for_plan(replace(source, checkpoint=str(path)))
    saved = open_training(path, files.model, asked.lora)
    if saved is None:
        return files, None
    if (saved.lora is None) != asked.full:
        what, full = ("an adapter", "false") if saved.lora else ("all weights", "true")
        raise ConfigError(
            f"finetune.resume=true: {path} is a training of {what}", f"finetune.full={full}"
        )
    return replace(files, held=saved.base), saved


def _lora(config: Config, model: Decoder, saved: SavedTraining | None) -> TrainedLora:
    asked = config.finetune
    if saved is not None and saved.lora is not None:
        return saved.lora
    if asked.init_adapter:
        return opened_lora(model, Path(asked.init_adapter).expanduser())
    return new_lora(model, asked.lora, config.seed or 0)


def _stored(files: ModelFiles, shard: ModelShard | None) -> dict[str, Callable[[], Array]]:
    """A reader of each matrix [out, in] as float32."""
    found: dict[str, Callable[[], Array]] = {}
    tensors = files.tensors()
    for name, turned in matrices(files.model).items():
        read = partial(_values, files, name, tensors[name], turned, shard)
        found[name] = partial(_turned, read) if turned else read
    return found


def _unchanged(files: ModelFiles) -> dict[str, LazyTensor]:
    """The model's tensors; quantized ones as the training has them."""
    table = matrices(files.model)

    def held(name: str, tensor: LazyTensor) -> LazyTensor:
        if tensor.integers is None or not files.quantization.rounds:
            return tensor
        read = partial(_values, files, name, tensor, table.get(name, False), None)
        return LazyTensor(tensor.shape, "F32", read)

    return {name: held(name, tensor) for name, tensor in files.tensors().items()}


def _turned(read: Callable[[], Array]) -> Array:
    return read().T


def _values(
    files: ModelFiles, name: str, tensor: LazyTensor, turned: bool, shard: ModelShard | None
) -> Array:
    """A tensor of the model as it is held, or the shard's part of it."""
    if tensor.integers is None or not files.quantization.rounds:
        return (tensor if shard is None else sliced(tensor, shard.bounds(name))).float32()
    values = tensor.integers.read().float32()  # always [out, in]
    values = values.T if turned else values
    return values if shard is None else values[shard.bounds(name)].copy()


def _weights(
    files: ModelFiles, without: Collection[str], shard: ModelShard | None
) -> Iterator[tuple[str, Array]]:
    """Weights as float32, by name."""
    tensors = files.tensors()
    turned = {one.name for one in parameters(files.model) if one.transposed}
    with progress.step("load weights", len(tensors), "tensors", phase="read") as step:
        for name, tensor in tensors.items():
            if name not in without:
                yield name, _values(files, name, tensor, name in turned, shard)
            step.advance()


def _learned(model: Decoder, weights: Mapping[str, Array]) -> dict[str, Array]:
    """The weights that have gradients: those that only choose experts have none."""
    fixed = {one.name for one in parameters(model) if one.role == "choice_bias"}
    return {name: array for name, array in weights.items() if name not in fixed}


def _data(
    key: str,
    source: str,
    config: Config,
    model: Decoder,
    tokenizer: Tokenizer,
    skip: int = 0,
    take: int | None = None,
) -> ExampleSet:
    """The examples that the `key` of finetune names. Raises ConfigError, also for tokens that the
    model has not."""
    path, length = Path(source).expanduser(), _max_length(config, model)
    template = config.finetune.template
    data = read_data(path, tokenizer, template, length, key=f"finetune.{key}", skip=skip, take=take)
    progress.note(f"{key}: {data.summary(length)}")
    most = max(int(text.ids.max()) for text in data.texts)
    if most >= model.vocab_size:
        raise ConfigError(
            f"finetune.{key}: {path}: token {most}, expected less than the model's vocabulary of"
            f" {model.vocab_size}",
            "the tokenizer of the model: processor.tokenizer.tokenizer_file=",
        )
    return data


def _write_curves(folder: RunFolder, steps: Sequence[StepMetrics], *, charts: bool) -> None:
    """The losses as a chart, and as a line of text."""
    if len(steps) < 2:
        return
    if charts and find_spec("matplotlib") is not None:
        from lite_runner.bench.charts import Line, Panel, draw
        from lite_runner.bench.report import Spread

        lines = [Line("training", [(one.step, Spread.of([one.loss])) for one in steps])]
        evaluated = [
            (one.step, Spread.of([one.eval_loss])) for one in steps if one.eval_loss is not None
        ]
        if evaluated:
            lines.append(Line("evaluation", evaluated))
        drawing = draw([Panel("loss", "step", "cross entropy", lines, curve=True)])
        folder.write_bytes("loss.png", drawing.png)
        folder.write_bytes("loss.svg", drawing.svg)
    progress.note(f"loss {_curve([one.loss for one in steps])}")


def _curve(losses: Sequence[float]) -> str:
    """A line of text with the means of CURVE_WIDTH parts."""
    count = min(CURVE_WIDTH, len(losses))
    means = [float(part.mean()) for part in np.array_split(losses, count)]
    least, range = min(means), max(means) - min(means) or 1.0
    heights = (round((mean - least) / range * (len(CURVE) - 1)) for mean in means)
    return f"{losses[0]:.4f} {''.join(CURVE[height] for height in heights)} {losses[-1]:.4f}"


def _identity(config: Config, data: ExampleSet, evaluated: Sequence[Example]) -> str:
    """A digest of the settings that a resumed training must share with the one before."""
    digest = hashlib.sha256()
    asked = asdict(config.finetune)
    for name in ("steps", "resume", "save_steps", "data", "eval_data", "init_adapter", "charts"):
        asked.pop(name)
    source = config.checkpoint_source  # as typed, or from the root, as in config.yaml
    model = str(Path(source).expanduser().absolute()) if exists(source) else source
    settings = {"seed": config.seed or 0, "model": model, **asked}
    # On fewer ranks with a larger batch_size the sums are the same but for their rounding.
    if (ranks := config.ranks.data) > 1:
        settings["ranks"] = ranks
    if config.finetune.schedule != "constant":
        settings["steps"] = config.finetune.steps
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for text in (*data.texts, *evaluated):
        digest.update(text.ids.tobytes())
        digest.update(text.rows().tobytes())
    return digest.hexdigest()
