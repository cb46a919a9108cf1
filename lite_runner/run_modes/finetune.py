"""run_mode=finetune: a LoRA adapter, or the whole model, trained on examples."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from lite_runner import progress
from lite_runner.architectures import custom_network, parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.config.checks import check_fits
from lite_runner.config.prompt import no_likelihood
from lite_runner.errors import ConfigError
from lite_runner.model.files import ModelFiles
from lite_runner.model.locate import locate_for_plan
from lite_runner.model.tokenizer import side_files, tokenizer_for_plan
from lite_runner.output.report import Result, RunFolder, Timing
from lite_runner.plan.plan import Plan
from lite_runner.records import dataclass
from lite_runner.sizing.memory import Memory, check_memory, model_lines, parameter_count, readable
from lite_runner.system.files import make_folder
from lite_runner.system.processor import cores
from lite_runner.system.signals import Terminated, deferred
from lite_runner.training.adapter import TrainedLora, in_memory, new_lora, opened_lora
from lite_runner.training.data import ExampleSet, read_data
from lite_runner.training.network import TrainedNetwork
from lite_runner.training.options import TrainOptions as Config
from lite_runner.training.options import finetune_errors as errors
from lite_runner.training.tape import Array
from lite_runner.training.trainer import CHECKPOINT, CHUNK, StepMetrics, Trainer, step_count
from lite_runner.weights.lora.adapter_writer import write_adapters
from lite_runner.weights.write import check_folder, write_hugging_face

__all__ = ["Config", "errors", "plan", "run"]

METRICS = "metrics.jsonl"
DEFAULT_LENGTH = 1024  # tokens of an example
PROCESS = 120 << 20  # Python with NumPy and the tokenizer


@dataclass(frozen=True, kw_only=True)
class TrainPlan(Plan):
    """The plan of a training, with its examples; without a tokenizer there are none."""

    data: ExampleSet | None = None


def plan(config: Config) -> Plan:
    """The model and the examples. With dry_run=true nothing is fetched, and without a tokenizer the
    examples are not read. Raises RunnerError."""
    began = time.perf_counter()
    asked, target = config.finetune, config.target
    if not (asked.resume and (target / CHECKPOINT).is_file()):
        check_folder(target, config.overwrite)
    files = locate_for_plan(config.source)
    model = files.model
    check_fits(config, model)
    length = _max_length(config, model)
    lora = None
    if not asked.full:
        lora = _lora(config, model)
    tokenizer = tokenizer_for_plan(config.tokenizer, files, dry_run=config.dry_run)
    data = None
    if tokenizer is not None:
        path = Path(asked.data).expanduser()
        data = read_data(path, tokenizer, asked.template, length)
        _check_ids(data, model, path)
        progress.note(f"data: {data.summary(length)}")
    trained = parameter_count(model) if lora is None else sum(a.size for a in lora.arrays.values())
    longest = max((len(text.ids) for text in data.texts), default=0) if data else length
    memory = _memory(config, model, trained, longest)
    lines = model_lines(config.run_mode, config.model_name, model, files.location())
    lines["trains"] = f"{trained:,} of {parameter_count(model):,} parameters" + (
        "" if lora is None else f", LoRA of {len(lora.deltas)} weights"
    )
    if data is not None:
        steps = step_count(asked, len(data.texts))
        batch = asked.batch_size * asked.accumulate
        mean = data.tokens / len(data.texts)
        lines["data"] = data.summary(length)
        lines["steps"] = (
            f"{steps:,} of {batch} examples, {steps * batch / len(data.texts):.2f} epochs,"
            f" some {round(steps * batch * mean):,} tokens"
        )
    lines["memory"] = f"{readable(memory.total)}: {memory.parts()}"
    lines["writes"] = f"{target}, {'a Hugging Face folder' if asked.full else 'a PEFT adapter'}"
    plan = TrainPlan(
        config=config,
        files=files,
        memory=memory,
        lines=lines,
        tokenizer=tokenizer,
        data=data,
    )
    return replace(plan, seconds=time.perf_counter() - began)


def run(plan: Plan, folder: RunFolder) -> None:
    """Train and write `finetune_output`. Raises RunnerError; KeyboardInterrupt after Ctrl-C, when
    a checkpoint has been written."""
    began = time.perf_counter()
    config = plan.config
    assert isinstance(config, Config) and isinstance(plan, TrainPlan) and plan.data is not None
    assert plan.memory is not None
    check_memory(plan.memory)
    asked, files, target = config.finetune, plan.model, config.target
    weights = _weights(files, full=asked.full)
    lora = None if asked.full else _lora(config, files.model)
    trained = weights if lora is None else lora.arrays
    network = TrainedNetwork(files.model, weights, trained, {} if lora is None else lora.deltas)
    trainer = Trainer(
        network,
        plan.data.texts,
        asked,
        seed=config.seed or 0,
        threads=config.context.threads,
        identity=_identity(config, plan.data),
    )
    checkpoint = target / CHECKPOINT
    if asked.resume and checkpoint.is_file():
        trainer.resume(checkpoint)
        progress.note(f"resumed after step {trainer.done} of {trainer.steps}: {checkpoint}")
    make_folder(target)
    loaded = time.perf_counter() - began
    steps = _train(trainer, folder, checkpoint, asked.save_steps)
    if lora is None:
        beside = side_files(config.tokenizer, files)
        tensors = {name: in_memory(array) for name, array in weights.items()}
        write_hugging_face(target, tensors, files.model, beside)
    else:
        adapters = {"finetune": lora.adapter()}
        write_adapters(adapters, files.model, target, "peft", overwrite=True, listed=False)
    checkpoint.unlink(missing_ok=True)
    seconds = sum(step.seconds for step in steps)
    folder.write_result(
        Result.of(
            plan,
            files.source,
            engine="numpy",
            seed=config.seed or 0,
            timing=Timing(load_s=loaded),
            finetune=_summary(trainer, steps, seconds),
        )
    )
    last = f", loss {steps[0].loss:.4f} to {steps[-1].loss:.4f}" if steps else ""
    progress.note(f"wrote {target}: {len(steps)} steps in {seconds:.1f} s{last}")


def _train(
    trainer: Trainer, folder: RunFolder, checkpoint: Path, every: int | None
) -> list[StepMetrics]:
    """The steps that were made; each is a line of metrics.jsonl. After Ctrl-C a checkpoint is
    written, and KeyboardInterrupt raised."""
    steps: list[StepMetrics] = []
    shown = began = time.monotonic()
    first = trainer.done
    metrics = folder.path / METRICS
    stepping = trainer.run()
    try:
        with metrics.open("a", encoding="utf-8") as file:
            while True:
                with deferred():  # what a step has changed is whole
                    step = next(stepping, None)
                    if step is None:
                        break
                    steps.append(step)
                    file.write(step.line())
                    file.flush()
                    if every and step.step % every == 0 and step.step < trainer.steps:
                        trainer.save(checkpoint)
                now = time.monotonic()
                left = (now - began) / (step.step - first) * (trainer.steps - step.step)
                line = (
                    f"step {step.step} of {trainer.steps}: loss {step.loss:.4f},"
                    f" {step.tokens / step.seconds:,.0f} tokens/s, {_time(left)} left"
                )
                progress.status(line)
                if step.step in (first + 1, trainer.steps) or now - shown > 10:
                    progress.note(line)
                    shown = now
    except (KeyboardInterrupt, Terminated):
        progress.status("")
        if trainer.done > first:
            with deferred():
                trainer.save(checkpoint)
            progress.note(
                f"saved step {trainer.done} of {trainer.steps} to {checkpoint};"
                " finetune.resume=true goes on"
            )
        raise
    finally:
        stepping.close()
    progress.status("")
    return steps


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _summary(trainer: Trainer, steps: list[StepMetrics], seconds: float) -> Mapping[str, object]:
    tokens = sum(step.tokens for step in steps)
    return {
        "steps": trainer.steps,
        "first_loss": steps[0].loss if steps else None,
        "last_loss": steps[-1].loss if steps else None,
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
    if asked is not None and asked > model.seq_length:
        raise ConfigError(
            f"finetune.max_length: got {asked}, expected at most the model's context of"
            f" {model.seq_length} tokens"
        )
    return asked or min(DEFAULT_LENGTH, model.seq_length)


def _lora(config: Config, model: Decoder) -> TrainedLora:
    asked = config.finetune
    if asked.init_adapter:
        return opened_lora(model, Path(asked.init_adapter).expanduser())
    return new_lora(model, asked.lora, config.seed or 0)


def _weights(files: ModelFiles, *, full: bool) -> dict[str, Array]:
    """All weights as float32; of the whole model that is trained, arrays of our own."""
    tensors = files.tensors()
    turned = {one.name for one in parameters(files.model) if one.transposed}
    found = {}
    with progress.step("load weights", total=len(tensors), unit="tensors") as step:
        for name, tensor in tensors.items():
            if tensor.integers is not None and files.quantization.rounds:
                values = tensor.integers.read().float32()  # always [out, in]
                values = values.T if name in turned else values
            else:
                values = tensor.float32()
            found[name] = values.copy() if full else values
            step.advance()
    return found


def _check_ids(data: ExampleSet, model: Decoder, path: Path) -> None:
    """Raise ConfigError for tokens that the model has not."""
    most = max(int(text.ids.max()) for text in data.texts)
    if most >= model.vocab_size:
        raise ConfigError(
            f"finetune.data: {path}: has a token {most}, and the model's vocabulary"
            f" {model.vocab_size}",
            "the tokenizer of the model: processor.tokenizer.tokenizer_file=",
        )


def _memory(config: Config, model: Decoder, trained: int, longest: int) -> Memory:
    """What training takes: weights, gradients and the optimizer's state, and activations."""
    block = max(model.blocks, key=lambda one: one.feed_forward.width)
    attention, width = block.attention, block.feed_forward.width
    experts = block.feed_forward.experts
    wide = width * (3 if experts is None else 3 * experts.chosen)
    heads = (2 * attention.heads + 4 * attention.kv_heads) * attention.head_dim
    tokens = max(longest, CHUNK)
    per_token = model.num_layers * (5 * model.hidden_size + 2 * heads + wide)
    seen = attention.heads * model.num_layers * min(longest, 512) * 2 // 3
    workers = 1 if config.finetune.full else config.context.threads or cores()
    logits = 2 * min(256, tokens) * model.vocab_size
    return Memory(
        weights=4 * parameter_count(model),
        cache=0,
        adapters=4 * 4 * trained if not config.finetune.full else 4 * 3 * trained,
        process=PROCESS,
        work=4 * workers * (tokens * (per_token + seen) + logits),
    )


def _identity(config: Config, data: ExampleSet) -> str:
    """A digest of what a resumed training must have in common with the one before."""
    digest = hashlib.sha256()
    asked = asdict(config.finetune)
    for name in ("steps", "resume", "save_steps", "data", "init_adapter"):
        asked.pop(name)
    settings = {"seed": config.seed or 0, "model": config.checkpoint_source, **asked}
    if config.finetune.schedule != "constant":
        settings["steps"] = config.finetune.steps
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for text in data.texts:
        digest.update(text.ids.tobytes())
        digest.update(text.rows().tobytes())
    return digest.hexdigest()
