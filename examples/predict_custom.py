"""A script with flags of its own: predict_custom.py [--model NAME] [--checkpoint_path FOLDER]."""

from __future__ import annotations

import argparse
from pathlib import Path

from lite_runner import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    ContextConfig,
    get_last_checkpoint,
    get_real_rank,
    init_context,
    pipeline,
    str2bool,
)


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--model", default="smollm2_135m", help="a model of conf/model")
    flags.add_argument("--device_target", default="auto", help="CPU, Ascend or auto")
    flags.add_argument("--device_id", default=0, type=int)
    flags.add_argument("--use_past", default=True, type=str2bool, help="keep keys and values")
    flags.add_argument("--checkpoint_path", help="folder with rank_0, which has checkpoints")
    given = flags.parse_args()

    init_context(context_config=ContextConfig(0, given.device_target, given.device_id))
    config = AutoConfig.from_pretrained(given.model)
    config.use_past = given.use_past
    if given.checkpoint_path:
        folder = Path(given.checkpoint_path) / f"rank_{get_real_rank()}"
        config.checkpoint_name_or_path = get_last_checkpoint(folder)

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    network = AutoModel.from_config(config)
    generate = pipeline(task="text_generation", model=network, tokenizer=tokenizer)
    for output in generate(["what color is the sky?", "Translate to English: Je t'aime."]):
        print(output)


if __name__ == "__main__":
    main()
