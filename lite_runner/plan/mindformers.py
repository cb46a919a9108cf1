"""The plan of a run on the real MindFormers: its yaml, its checkpoint, and what it cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lite_runner import progress
from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.mindformers import release
from lite_runner.backends.mindformers.python import MINDFORMERS, RELEASE
from lite_runner.backends.mindformers.release import Sizes
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.options import GenerateOptions
from lite_runner.config.release import Release
from lite_runner.errors import ConfigError
from lite_runner.model.files import ModelFiles
from lite_runner.plan.describe import described
from lite_runner.plan.job import Job
from lite_runner.plan.plan import Plan
from lite_runner.sizing.need import BYTES_OF, Memory, cache_bytes, parameter_count
from lite_runner.weights.derive import cast
from lite_runner.weights.formats.ckpt_file import open_ckpt
from lite_runner.weights.formats.mindformers import to_mindformers
from lite_runner.weights.tensor import LazyTensor
from lite_runner.weights.write import HEAD, write_ckpt

FILE_NAME = "mindformers.yaml"  # in the run folder
HEAD_COMMENT = f"# Written for MindFormers {RELEASE}, which ran it: what run_mindformer reads.\n"
# Measured with tiny models and SmolLM2: both processes, and the graphs of each layer.
PROCESS, LAYER = 820 << 20, 7 << 20
_FAULT = f"backend=mindformers: MindFormers {RELEASE} cannot compute"


@dataclass(frozen=True)
class MindFormersRun:
    """What MindFormers is told of a run."""

    model: Decoder
    sizes: Sizes
    beams: int
    fill: int  # a token to warm up with
    unused: int  # a token that no prompt has
    trainer: Mapping[str, Any]  # sections of the yaml, as the run's config has them
    tokenizer: Mapping[str, Any]

    @classmethod
    def of(cls, config: GenerateOptions, model: Decoder, job: Job) -> MindFormersRun:
        """Raises ConfigError for what MindFormers cannot compute."""
        if reasons := release.unsupported(model):
            raise ConfigError(f"{_FAULT} {config.model_name}: {'; '.join(reasons)}", "backend=ms")
        beams = job.generation.num_beams
        # Its beam search looks for a pad behind each row.
        wanted = job.length + 1 if beams > 1 else job.length
        if wanted > model.seq_length:
            raise ConfigError(
                f"backend=mindformers: MindFormers' beam search needs a position more than the"
                f" {job.length} tokens of the longest text, the context of the model",
                "fewer new tokens: max_new_tokens=",
            )
        dtype = config.weights_dtype("CPU")
        assert dtype != "bfloat16", "see mindformers_run_checks"
        prompts = {token for tokens in job.tokens for token in tokens}
        free = (token for token in reversed(range(model.vocab_size)) if token not in prompts)
        return cls(
            model=model,
            sizes=Sizes(
                release.rows_together(
                    model, beams if beams > 1 else job.slots, use_past=config.use_past
                ),
                release.static_length(model, wanted),
                release.computed_in(model, dtype, use_past=config.use_past),
                config.use_past,
            ),
            beams=beams,
            fill=next((tokens[0] for tokens in job.tokens if len(tokens)), 0),
            unused=next(free, release.pad_token(model)),
            trainer={"type": config.trainer.type, "model_name": config.model_name},
            tokenizer={"type": config.processor.tokenizer.type},
        )

    def options(self, generation: GenerationConfig, seed: int) -> dict[str, Any]:
        """The options of a generation as MindFormers' generate() takes them."""
        return {
            "do_sample": generation.do_sample,
            "temperature": generation.temperature,
            "top_k": generation.top_k,
            "top_p": generation.top_p,
            "repetition_penalty": generation.repetition_penalty,
            "num_beams": generation.num_beams,
            "seed": seed,
        }

    def yaml(self, checkpoint: str) -> str:
        """The text of its yaml."""
        plain = {
            "run_mode": "predict",
            "use_parallel": False,
            "load_checkpoint": checkpoint,
            "auto_trans_ckpt": False,
            "context": {"mode": 0, "device_target": "CPU", "device_id": 0},
            "trainer": dict(self.trainer),
            "processor": {"tokenizer": dict(self.tokenizer)},
            "model": release.model_section(self.model, self.sizes),
        }
        return HEAD_COMMENT + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def plan_mindformers(plan: Plan, share: Job) -> Plan:
    """The plan with memory and dtype; with dry_run=true also the lines to print, and the yaml.

    `share`: the prompts. Raises ConfigError for what MindFormers cannot do, and EnvironmentFault
    where there is no MindFormers.
    """
    config, files = plan.config, plan.model
    assert isinstance(config, GenerateOptions)
    if plan.device != "CPU":
        raise ConfigError(
            f"backend=mindformers runs on the processor, not on {plan.device}",
            "context.device_target=CPU",
        )
    if files.quantization.quant != "none":
        raise ConfigError(
            f"{_FAULT} with quantized weights (quant={files.quantization})", "quant=none"
        )
    run = MindFormersRun.of(config, files.model, share)
    plan = replace(
        plan,
        why=f"MindFormers {RELEASE}'s, on mindspore 2.0.0",
        dtype=run.sizes.dtype,
        memory=_memory(run),
    )
    if config.dry_run:
        plan = described(replace(plan, job=share))
        text = run.yaml(config.checkpoint_source)
        return replace(plan, table=(*plan.table, f"{FILE_NAME}:", text.rstrip()))
    MINDFORMERS.find()
    _note_hidden(run, share)
    return plan


def write_checkpoint(files: ModelFiles, run: MindFormersRun, folder: Path) -> Path:
    """A checkpoint of the model with the names of the release: that of the run itself where it is
    one, else one that is written to `folder`. Raises RunnerError."""
    tensors = _named(files, run.model)
    if files.path is not None and files.path.suffix == ".ckpt" and files.path.is_file():
        stored = open_ckpt(files.path)
        as_it_is = files.adapter is None and all(one.dtype != "BF16" for one in stored.values())
        if as_it_is and tensors.keys() <= stored.keys():
            return files.path
    wide = {
        name: cast(name, tensor, "F32") if tensor.dtype == "BF16" else tensor
        for name, tensor in tensors.items()
    }
    target = folder / "mindformers.ckpt"
    write_ckpt(target, wide)
    return target


def _named(files: ModelFiles, model: Decoder) -> dict[str, LazyTensor]:
    """Every tensor by the name that the release has for it. Raises ArtifactError."""
    tensors = dict(files.whole())
    if Release((1, 0)).needs_head(model):
        tensors[HEAD] = tensors[parameters(model)[0].name]
    named = to_mindformers(tensors, model)
    return {release.tensor_name(model, name): tensor for name, tensor in named.items()}


def _memory(run: MindFormersRun) -> Memory:
    """Of both processes."""
    model, sizes = run.model, run.sizes
    weights = parameter_count(model) * BYTES_OF[sizes.dtype]
    if Release((1, 0)).needs_head(model):
        weights += model.vocab_size * model.hidden_size * BYTES_OF[sizes.dtype]
    cache = 0
    if sizes.use_past:
        cache = cache_bytes(model, sizes.dtype, sizes.batch, sizes.length)
    positions = sizes.batch * sizes.length
    scores = positions * sizes.length * model.num_heads
    logits = positions * model.vocab_size
    return Memory(
        weights,
        cache,
        process=PROCESS + LAYER * model.num_layers,
        loading=2 * weights,
        work=4 * (2 * scores + 2 * logits),
    )


def _note_hidden(run: MindFormersRun, job: Job) -> None:
    """Say which prompts hold tokens that MindFormers' attention does not see."""
    hidden = release.hidden_tokens(run.model, use_past=run.sizes.use_past)
    for token in hidden:
        found = [str(place) for place, tokens in enumerate(job.tokens) if token in tokens]
        if found:
            progress.note(
                f"MindFormers hides token {token} from attention, which prompt"
                f"{'s' if len(found) > 1 else ''} {', '.join(found[:5])} has: its texts may differ"
            )
