"""What the real MindFormers is told of a run: its yaml, and the options of its generate()."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import yaml

from lite_runner.architectures.spec import Decoder
from lite_runner.backends.mindformers.release import (
    MindFormersRelease,
    Sizes,
    pad_token,
    static_length,
)
from lite_runner.backends.mindformers.releases import choose_release
from lite_runner.config.ascend import AscendSettings
from lite_runner.config.cluster import ranks_of
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.options import ExportedOptions, MindFormersOptions
from lite_runner.errors import ConfigError
from lite_runner.plan.job import Job
from lite_runner.records import dataclass

_CPU: Mapping[str, Any] = {"device_target": "CPU", "device_id": 0}
FILE_NAME = "mindformers.yaml"  # in the run folder
HEAD_COMMENT = "# Written for MindFormers {}, which ran it: what run_mindformer reads.\n"


@dataclass(frozen=True)
class MindFormersRun:
    """What MindFormers is told of a run."""

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
    def of(
        cls, config: MindFormersOptions, model: Decoder, job: Job, device: str = "CPU"
    ) -> MindFormersRun:
        """Raises ConfigError for what MindFormers cannot compute, EnvironmentFault where another
        release than one of those known is installed for the device."""
        beams = job.generation.num_beams
        release = choose_release(
            model,
            config.model_name,
            wanted=config.mindformers_release,
            use_past=config.caches,
            beams=beams,
            export=isinstance(config, ExportedOptions) and config.writes_graphs,
            device=device,
        )
        # Its beam search looks for a pad behind each row.
        wanted = job.length + 1 if beams > 1 else job.length
        if wanted > model.seq_length:
            raise ConfigError(
                f"backend=mindformers: MindFormers' beam search needs a position more than the"
                f" {job.length} tokens of the longest text, the context of the model",
                "fewer new tokens: max_new_tokens=",
            )
        dtype = config.weights_dtype(device)
        assert dtype != "bfloat16", "see mindformers_run_checks"
        prompts = {token for tokens in job.tokens for token in tokens}
        free = (token for token in reversed(range(model.vocab_size)) if token not in prompts)
        return cls(
            release=release,
            model=model,
            sizes=Sizes(
                release.rows_together(
                    model, beams if beams > 1 else job.slots, use_past=config.caches
                ),
                static_length(model, wanted),
                release.computed_in(model, dtype, use_past=config.caches),
                config.caches,
            ),
            beams=beams,
            fill=_shortest_prompt(model, job),
            unused=next(free, pad_token(model)),
            trainer={"type": config.trainer.type, "model_name": config.model_name},
            tokenizer={"type": config.processor.tokenizer.type},
            device=_device(config, device),
            parallel=_parallel(config),
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
            "use_parallel": bool(self.parallel),
            "load_checkpoint": checkpoint,
            "auto_trans_ckpt": bool(self.parallel),
            "context": {
                "mode": 0,
                **self.device,
                **self.release.context,
            },
            **self.release.sections,
            **self.parallel,
            "trainer": dict(self.trainer),
            "processor": {"tokenizer": dict(self.tokenizer)},
            "model": self.release.model_section(self.model, self.sizes),
        }
        return HEAD_COMMENT.format(self.release.name) + yaml.safe_dump(
            plain, sort_keys=False, allow_unicode=True
        )


def _device(config: MindFormersOptions, device: str) -> Mapping[str, Any]:
    """The device in the section `context`, with the run's own settings of Ascend."""
    if device == "CPU":
        return _CPU
    settings = AscendSettings.of(config.context)
    found = {"device_target": device, "device_id": config.context.device_id}
    return found | {key: getattr(settings, key) for key in settings.asked()}


def _parallel(config: MindFormersOptions) -> Mapping[str, Any]:
    """The sections of ranks that share a model: MindSpore's graph compiler cuts it. Empty where
    each rank has a model of its own."""
    if (ranks := ranks_of(config).tensor) == 1:
        return {}
    return {
        "src_strategy_path_or_dir": "",
        "only_save_strategy": False,
        "load_ckpt_format": "ckpt",
        "use_legacy_format": True,
        "parallel": {
            "parallel_mode": config.parallel.parallel_mode,
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
            "vocab_emb_dp": config.parallel_config.vocab_emb_dp,
            "gradient_aggregation_group": 4,
        },
        # Not of predicting, but without sink_mode its transformation of a checkpoint stops.
        "runner_config": {"epochs": 1, "batch_size": 1, "sink_mode": True, "sink_size": 1},
    }


def _shortest_prompt(model: Decoder, job: Job) -> list[int]:
    """Of one token; a prefix LM wants the end of the prefix, and what stands for the text."""
    if model.prefix is not None:
        return [model.prefix.mask_token_ids[0], model.prefix.end_token_id]
    return [next((int(tokens[0]) for tokens in job.tokens if len(tokens)), 0)]
