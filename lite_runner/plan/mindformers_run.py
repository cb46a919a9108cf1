"""What the real MindFormers is told of a run: its yaml, and the options of its generate()."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from lite_runner.architectures.spec import Decoder
from lite_runner.backends.mindformers import release
from lite_runner.backends.mindformers.python import RELEASE
from lite_runner.backends.mindformers.release import Sizes
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.options import GenerateOptions
from lite_runner.errors import ConfigError
from lite_runner.plan.job import Job

FILE_NAME = "mindformers.yaml"  # in the run folder
HEAD_COMMENT = f"# Written for MindFormers {RELEASE}, which ran it: what run_mindformer reads.\n"
CANNOT = f"backend=mindformers: MindFormers {RELEASE} cannot compute"


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
            raise ConfigError(f"{CANNOT} {config.model_name}: {'; '.join(reasons)}", "backend=ms")
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
