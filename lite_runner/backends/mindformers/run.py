"""A run on the real MindFormers: its yaml, options and memory; starting it with a checkpoint; an
export by it.

Ranks that share a model meet on the processor, to agree and to gather results; their workers meet
once more on the device, through a scheduler of their own, and MindFormers shards the model over
them.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lite_runner import progress
from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.backends import OnStep, RunOptions
from lite_runner.backends.lite.export.job import ExportJob
from lite_runner.backends.lite.export.output_paths import OutputPaths
from lite_runner.backends.lite.export.writer import adopt
from lite_runner.backends.mindformers.process import (
    START_SECONDS,
    Batch,
    MindFormersProcess,
    WorkerGroup,
    free_port,
    start_scheduler,
)
from lite_runner.backends.mindformers.releases import (
    MindFormersRelease,
    Sizes,
    choose_release,
    pad_token,
    python_for,
    static_length,
)
from lite_runner.backends.workers.process import WorkerProcess
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.sections import AscendSettings, Context, Release, hccl_timeouts
from lite_runner.errors import ConfigError
from lite_runner.mindir.manifest import Manifest
from lite_runner.model import ModelFiles
from lite_runner.records import dataclass
from lite_runner.sizing import BYTES_OF, Memory, cache_bytes, check_memory, parameter_count
from lite_runner.system.environment import seen_ids
from lite_runner.system.files import atomic_write, temporary_folder
from lite_runner.weights import LazyTensor, cast
from lite_runner.weights.formats.ckpt_file import open_ckpt, write_ckpt
from lite_runner.weights.formats.mindformers import to_mindformers
from lite_runner.weights.write import HEAD

_CACHE = ("key_past", "value_past")
_CPU: Mapping[str, Any] = {"device_target": "CPU", "device_id": 0}
FILE_NAME = "mindformers.yaml"  # in the run folder
KEY = "parallel_config.model_parallel"
# Measured with tiny models and SmolLM2: both processes, and the graphs of each layer.
PROCESS, LAYER = 820 << 20, 7 << 20
WARM_UP = 2  # tokens: a graph for the prompt, and one for the tokens after it
HEAD_COMMENT = "# Written for MindFormers {}, which ran it: what run_mindformer reads.\n"


@dataclass(frozen=True)
class MindFormersRun:
    """Sizes, yaml sections and options that MindFormers gets for a run."""

    release: MindFormersRelease
    model: Decoder
    sizes: Sizes
    beams: int
    fill: Sequence[int]  # a prompt to warm up with
    unused: int  # a token that no prompt has
    trainer: Mapping[str, Any]  # sections of the yaml, as the run's config has them
    tokenizer: Mapping[str, Any]
    device: Mapping[str, Any] = field(default_factory=lambda: dict(_CPU))
    parallel: Mapping[str, Any] = field(default_factory=dict)  # sections, of ranks that share it

    @classmethod
    def of(cls, model: Decoder, options: RunOptions) -> MindFormersRun:
        """Raises ConfigError for what MindFormers cannot compute, EnvironmentFault where another
        release than one of those known is installed for the device."""
        settings, device, prompts = options.settings, options.device, options.prompts
        assert settings.runs_mindformers
        beams = max((one.num_beams for one in options.generation), default=1)
        release = choose_release(
            model,
            settings.source.name,
            wanted=settings.mindformers_release,
            use_past=settings.caches,
            beams=beams,
            export=settings.writes_graphs,
            device=device,
        )
        # Its beam search looks for a pad behind each row.
        wanted = options.length + 1 if beams > 1 else options.length
        if wanted > model.seq_length:
            raise ConfigError(
                f"backend=mindformers: MindFormers' beam search needs one position more than the"
                f" {options.length} tokens of the longest text, the context of the model",
                "fewer new tokens: max_new_tokens=",
            )
        dtype = settings.precision.weights(device)
        assert dtype != "bfloat16", "see mindformers_run_checks"
        used = {token for tokens in prompts for token in tokens}
        free = (token for token in reversed(range(model.vocab_size)) if token not in used)
        return cls(
            release=release,
            model=model,
            sizes=Sizes(
                release.rows_together(
                    model, beams if beams > 1 else options.slots, use_past=settings.caches
                ),
                static_length(model, wanted),
                release.computed_in(model, dtype, use_past=settings.caches),
                settings.caches,
            ),
            beams=beams,
            fill=_shortest_prompt(model, prompts),
            unused=next(free, pad_token(model)),
            trainer={"type": settings.trainer.type, "model_name": settings.source.name},
            tokenizer={"type": settings.processor.tokenizer.type},
            device=_device(settings.context, device),
            parallel=_parallel(
                options.ranks.tensor, settings.parallel.parallel_mode, settings.vocab_parallel
            ),
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

    def note_hidden(self, prompts: Sequence[Sequence[int]]) -> None:
        """Say which prompts hold tokens that MindFormers' attention does not see."""
        for token in self.release.hidden_tokens(self.model, use_past=self.sizes.use_past):
            found = [str(place) for place, tokens in enumerate(prompts) if token in tokens]
            if found:
                progress.note(
                    f"MindFormers hides token {token} from attention, which prompt"
                    f"{'s' if len(found) > 1 else ''} {', '.join(found[:5])} has: its texts may"
                    " differ"
                )

    def yaml(self, checkpoint: str) -> str:
        """The text of its yaml."""
        plain = {
            "run_mode": "predict",
            "use_parallel": bool(self.parallel),
            "load_checkpoint": checkpoint,
            "auto_trans_ckpt": bool(self.parallel),
            "context": {"mode": 0, **self.device, **self.release.context},
            **self.release.sections,
            **self.parallel,
            "trainer": dict(self.trainer),
            "processor": {"tokenizer": dict(self.tokenizer)},
            "model": self.release.model_section(self.model, self.sizes),
        }
        return HEAD_COMMENT.format(self.release.name) + yaml.safe_dump(
            plain, sort_keys=False, allow_unicode=True
        )

    def memory(self, ranks: int) -> Memory:
        """Memory of both processes of a rank, of so many that share the model."""
        model, sizes = self.model, self.sizes
        weights = parameter_count(model) * BYTES_OF[sizes.dtype]
        if Release.of(self.release.name).needs_head(model):
            weights += model.vocab_size * model.hidden_size * BYTES_OF[sizes.dtype]
        cache = 0
        if sizes.use_past:
            cache = cache_bytes(model, sizes.dtype, sizes.batch, sizes.length)
        positions = sizes.batch * sizes.length
        scores = positions * sizes.length * model.num_heads
        logits = positions * model.vocab_size
        return Memory(
            weights // ranks,
            cache // ranks,
            process=PROCESS + LAYER * model.num_layers,
            loading=2 * weights,
            work=4 * (2 * scores + 2 * logits),
        )


def planned_run(files: ModelFiles, options: RunOptions) -> MindFormersRun:
    """As `MindFormersRun.of`. Raises ConfigError also for quantized weights, and for ranks that
    cannot share the model."""
    if files.quantization.rounds:
        raise ConfigError(
            "backend=mindformers: MindFormers cannot compute with quantized weights"
            f" (quant={files.quantization})",
            "quant=none",
        )
    check_ranks(options, files.model)
    return MindFormersRun.of(files.model, options)


def check_ranks(options: RunOptions, model: Decoder) -> None:
    """Raises ConfigError where MindFormers cannot share the model over the ranks of a run."""
    ranks, every, local = options.ranks.tensor, options.ranks.size, options.local_ranks
    if ranks == 1:
        return
    asked = f"backend=mindformers, {KEY}={ranks}"
    if options.device == "CPU":
        raise ConfigError(
            f"{asked}: MindFormers leaves the sharding to MindSpore's graph compiler, which"
            " shards on devices alone (on a CPU it fails with: Invalid communication backend:"
            " CPU)",
            "backend=ms shares a model on processors, too",
        )
    if local < every:
        raise ConfigError(
            f"{asked}: the ranks are on {every // local} machines,"
            " expected one: MindFormers reshards the checkpoint in one folder",
            "backend=ms shares a model over machines",
        )
    if model.n_kv_heads % ranks:
        raise ConfigError(
            f"{asked}: MindFormers gives every rank key/value heads of its own, and the model has"
            f" {model.n_kv_heads}",
            f"{KEY}= a divisor of {model.n_kv_heads}, or backend=ms, whose ranks may hold the same",
        )


def _device(context: Context, device: str) -> Mapping[str, Any]:
    """The device in the section `context`, with the run's own settings of Ascend."""
    if device == "CPU":
        return _CPU
    settings = AscendSettings.of(context)
    found = {"device_target": device, "device_id": context.device_id}
    return found | {key: getattr(settings, key) for key in settings.given_keys()}


def _parallel(ranks: int, mode: int, vocab_parallel: bool) -> Mapping[str, Any]:
    """The sections of ranks that share a model: MindSpore's graph compiler cuts it. Empty where
    each rank has a model of its own."""
    if ranks == 1:
        return {}
    return {
        "src_strategy_path_or_dir": "",
        "only_save_strategy": False,
        "load_ckpt_format": "ckpt",
        "use_legacy_format": True,
        "parallel": {
            "parallel_mode": mode,
            "gradients_mean": False,
            "enable_alltoall": False,
            "full_batch": True,
            "search_mode": "sharding_propagation",
            "enable_parallel_optimizer": False,
            "strategy_ckpt_save_file": "./ckpt_strategy.ckpt",
        },
        "parallel_config": {
            "data_parallel": 1,
            "model_parallel": ranks,
            "pipeline_stage": 1,
            "micro_batch_num": 1,
            "vocab_emb_dp": not vocab_parallel,
            "gradient_aggregation_group": 4,
        },
        # Not of predicting, but without sink_mode its transformation of a checkpoint stops.
        "runner_config": {"epochs": 1, "batch_size": 1, "sink_mode": True, "sink_size": 1},
    }


def _shortest_prompt(model: Decoder, prompts: Sequence[Sequence[int]]) -> list[int]:
    """A prompt of one token; a prefix LM wants the end of the prefix, and what stands for the
    text."""
    if model.prefix is not None:
        return [model.prefix.mask_token_ids[0], model.prefix.end_token_id]
    return [next((int(tokens[0]) for tokens in prompts if len(tokens)), 0)]


@dataclass(frozen=True)
class OpenMindFormers:
    """MindFormers with a network and its weights. See `lite_runner.backends.Completer`."""

    process: MindFormersProcess
    run: MindFormersRun
    work: Path  # a folder for its files
    resources: ExitStack

    @property
    def engine(self) -> str:
        """Name of the engine in result.json."""
        replaced = [f"{name} stand-in" for name in self.process.stand_ins]
        return ", ".join([f"mindformers-{self.run.release.name}", *replaced])

    @property
    def slots(self) -> int:
        return 1 if self.run.beams > 1 else self.run.sizes.batch

    @property
    def length(self) -> int:
        return self.run.sizes.length

    def warm_up(self) -> float:
        """See Completer: by a prompt of one token, or of as few as the model takes."""
        limit = min(WARM_UP, self.length - len(self.run.fill))
        if limit < 1 or self.run.beams > 1:
            return 0.0
        began, rows = time.perf_counter(), self.slots
        prompts, limits = [self.run.fill] * rows, [limit] * rows
        with progress.step("compile", phase="compile"):
            self.complete(prompts, limits, GenerationConfig(), 0, lambda *_: None)
        return time.perf_counter() - began

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        options: GenerationConfig,
        seed: int,
        on_step: OnStep,
        *,
        keep_logits: bool = False,
    ) -> list[int] | None:
        """See Completer. The last prompt is repeated until the batch is full."""
        run, file, steps = self.run, self.work / "logits", count()
        shape = (run.sizes.batch, run.model.vocab_size)
        fill = self.slots - len(prompts)
        file.unlink(missing_ok=True)
        batch = Batch(
            [*prompts, *[prompts[-1]] * fill],
            [*limits, *[0] * fill],
            options.eos_token_id,
            run.unused,
            run.options(options, seed),
            file if keep_logits else None,
        )

        def on_tokens(tokens: list[tuple[int, int]], seconds: float) -> None:
            logits = None
            if keep_logits:
                size = shape[0] * shape[1]
                logits = np.fromfile(file, np.float32, size, offset=4 * size * next(steps))
                logits = logits.reshape(shape)
            on_step(tokens, seconds, logits)

        return self.process.generate(batch, on_tokens)

    def score(self, ids: Sequence[int]) -> list[float]:
        return self.process.score(ids, self.run.unused)

    def close(self) -> None:
        """End the process, and remove its files; idempotent."""
        self.resources.close()


def open_mindformers(files: ModelFiles, options: RunOptions) -> OpenMindFormers:
    """MindFormers with a checkpoint; its yaml stays in the folder of the run. Of ranks that share a
    model the first one writes both for all. Raises RunnerError."""
    ranks, device, folder = options.ranks, options.device, options.folder
    assert folder is not None
    run = MindFormersRun.of(files.model, options)
    check_memory(run.memory(ranks.tensor))
    python = python_for(run.release, device)
    first = ranks.rank - ranks.tensor_index
    settings = folder / (f"{first}-{FILE_NAME}" if first else FILE_NAME)
    with ExitStack() as resources:
        work, variables, scheduler = None, dict[str, str](), None
        if ranks.tensor_index == 0:
            work = resources.enter_context(temporary_folder("mindformers", folder))
            with progress.step("write the checkpoint"):
                checkpoint = write_checkpoint(files, run.release, work)
            with atomic_write(settings) as file:
                file.write(run.yaml(str(checkpoint)).encode("utf-8", errors="backslashreplace"))
        if ranks.tensor > 1:
            work, variables, scheduler = join_group(options, run.release, python, work, resources)
        assert work is not None, "that of the first rank"
        with progress.step("load MindFormers", phase="read"):
            process = MindFormersProcess(
                work,
                run.release,
                threads=options.settings.context.threads,
                python=python,
                device=device,
                variables=variables,
                scheduler=scheduler,
            )
            resources.callback(process.close)
            process.load(settings)
        found = ", ".join(f"{name} {version}" for name, version in process.versions.items())
        progress.detail(f"the worker has {found}")
        if process.stand_ins:
            progress.note(
                f"MindFormers {run.release.name} with stand-ins for what has no kernel on a CPU:"
                f" {', '.join(process.stand_ins)}"
            )
        return OpenMindFormers(process, run, work, resources.pop_all())


def write_checkpoint(files: ModelFiles, release: MindFormersRelease, folder: Path) -> Path:
    """A checkpoint of the model with the names of the release: that of the run itself where it is
    one, else one that is written to `folder`. Raises RunnerError."""
    tensors = _named(files, release)
    if files.path is not None and files.path.suffix == ".ckpt" and files.path.is_file():
        stored = open_ckpt(files.path)
        # One that MindFormers saved has its cache in it, of another batch and length.
        as_it_is = files.adapter is None and not any(
            one.dtype == "BF16" or name.endswith(_CACHE) for name, one in stored.items()
        )
        if as_it_is and tensors.keys() <= stored.keys():
            return files.path.absolute()  # the worker works elsewhere
    wide = {
        name: cast(name, tensor, "F32") if tensor.dtype == "BF16" else tensor
        for name, tensor in tensors.items()
    }
    target = folder / "mindformers.ckpt"
    write_ckpt(target, wide)
    return target


def _named(files: ModelFiles, release: MindFormersRelease) -> dict[str, LazyTensor]:
    """Every tensor by the name that the release has for it. Raises ArtifactError."""
    model = files.model
    tensors = dict(files.whole())
    if Release.of(release.name).needs_head(model):
        tensors[HEAD] = tensors[parameters(model)[0].name]
    named = to_mindformers(tensors, model)
    return {release.tensor_name(model, name): tensor for name, tensor in named.items()}


def join_group(
    options: RunOptions,
    release: MindFormersRelease,
    python: Path,
    work: Path | None,
    resources: ExitStack,
) -> tuple[Path, dict[str, str], WorkerProcess | None]:
    """The folder of the workers that share a model, the environment of this rank's, and their
    scheduler, which the first rank starts and `resources` ends; every rank calls it. `work` is the
    folder, given by the first rank when all is in it. Raises EnvironmentFault."""
    from lite_runner.backends import collectives

    settings, ranks = options.settings, options.ranks
    timeout = settings.parallel.rendezvous_timeout + int(START_SECONDS)  # MindFormers is imported
    scheduler = None
    mine: dict[str, int | str] = {}
    if work is not None:
        port = free_port()
        scheduler = start_scheduler(
            release.python, python, WorkerGroup(ranks.tensor, port, timeout)
        )
        resources.callback(scheduler.close)
        mine |= {"port": port, "work": str(work)}
    on_ascend = options.device == "Ascend"
    if on_ascend:
        mine["device"] = seen_ids()[settings.context.device_id]
    every = [json.loads(text) for text in collectives.gather(json.dumps(mine).encode())]
    first = every[0]
    group = WorkerGroup(
        ranks.tensor,
        first["port"],
        timeout,
        devices=[one["device"] for one in every] if on_ascend else (),
        more=hccl_timeouts(settings.parallel.hccl_timeout) if on_ascend else {},
    )
    return Path(first["work"]), group.variables(ranks.tensor_index), scheduler


def export_with_mindformers(job: ExportJob, paths: OutputPaths, options: RunOptions) -> Manifest:
    """As `export_artifact`: the graph of MindFormers' network without a cache. Raises
    RunnerError."""
    spec, files = job.spec, job.files
    paths.check()
    paths.make_parent()
    with temporary_folder("mindformers") as work, paths.temporary() as folder:
        exported = work / "graph"  # MindSpore takes no path with spaces, as `folder` may be
        exported.mkdir()
        on_cpu = replace(options, folder=work, device="CPU")  # the graph is for any device
        with closing(open_mindformers(files, on_cpu)) as opened:
            with progress.step(f"export {job.settings.source.name} ({spec.layout})"):
                opened.process.export(exported / "model.mindir")
            made_by, release = dict(opened.process.versions), opened.run.release
        _move(exported, folder)
        hidden = release.hidden_tokens(files.model, use_past=False)
        (graph,) = folder.glob("*.mindir")  # MindSpore names large ones model_graph.mindir
        return adopt(folder, graph, job, paths, made_by=made_by, hidden=hidden)


def _move(exported: Path, folder: Path) -> None:
    """Files that MindSpore made readable by the owner only."""
    for path in exported.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    for path in list(exported.iterdir()):
        shutil.move(path, folder)
