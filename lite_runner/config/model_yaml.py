"""A model's sizes as the yaml that MindFormers keeps beside exported graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lite_runner.architectures import architecture_of
from lite_runner.architectures.spec import Decoder
from lite_runner.config.schema import RunConfig

HEAD = "# Written by an export of lite-runner: the sizes of the model beside it.\n"


def model_yaml(model: Decoder, config: RunConfig, seq_length: int, model_type: str) -> str:
    """The text of the yaml; it reads as `--config`.

    `seq_length`: positions that the exported graphs have; `model_type`: mindir or mindir_lite.
    """
    theirs = architecture_of(model).mindformers
    assert theirs is not None, "registered families have no yaml"
    settings = config.model.model_config
    sizes: dict[str, Any] = {
        "type": theirs.config,
        "seq_length": model.seq_length,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_word_embeddings,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": list(model.eos_token_id),
        "pad_token_id": model.pad_token_id,
        "use_past": settings.use_past,
        "is_sample_acceleration": settings.is_sample_acceleration,
        "compute_dtype": settings.compute_dtype,
        **theirs.settings(model),
    }
    plain = {
        "trainer": {"type": config.trainer.type, "model_name": config.trainer.model_name},
        "processor": {"tokenizer": {"type": config.processor.tokenizer.type}},
        "model": {"arch": {"type": theirs.network}, "model_config": sizes},
        "infer": {"infer_seq_length": seq_length, "model_type": model_type},
    }
    return HEAD + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def is_ours(path: Path) -> bool:
    """Whether an export wrote this yaml; any other is the user's own, which stays."""
    with path.open("rb") as file:
        return file.read(len(HEAD)) == HEAD.encode()
