"""The text of --help, made from conf/ itself: its options, keys and comments."""

from __future__ import annotations

import re
import textwrap

from lite_runner.config.compose import GROUPS, conf_dir, options_of

_USAGE = """\
Run an LLM job on MindSpore.

usage: run_lite.py [key=value ...] [flags]

  run_lite.py run_mode=predict model=smollm2_135m predict_data='The capital of France is'
  run_lite.py model=llama2_7b load_checkpoint=/models/llama2 predict_data=prompts.txt
  run_lite.py model=auto load_checkpoint=/models/folder predict_data=- < prompt.txt
  run_lite.py model=tiny_llama predict_data=hi do_sample=true temperature=0.7 seed=1,2,3 -m
  run_lite.py run_mode=convert model=bloom_560m convert_format=ckpt convert_output=bloom.ckpt
  run_lite.py run_mode=quantize model=smollm2_135m quant=a16w8 quantize_output=smollm2_a16w8
  run_lite.py run_mode=eval model=smollm2_135m eval_data=text.txt
  run_lite.py --config FILE --run_mode predict --load_checkpoint X --predict_data 'Hi'
"""
_FLAGS = """\
Flags
  -h, --help                       this text
  --version                        the version
  -c, --cfg job                    print the composed config and stop
  -m, --multirun                   run every combination of seed=1,2 'model=glob(tiny_*)'
  -sc, --shell-completion ACTION   eval "$(python run_lite.py -sc install=bash)"

Flags of run_mindformer.py, each as --key value
  --config FILE (a yaml of MindFormers)  --run_mode  --predict_data TEXT ...  --load_checkpoint
  --use_parallel  --device_target  --device_id  --mode  --seed  --output_dir  --predict_batch_size
  --do_sample  --options key=value ...  --section.key value
"""
_KEY = re.compile(r"^(\w+): (.*?)  # (.*)$")


def help_text() -> str:
    """Usage, groups with their options, top-level keys with their meaning, and flags."""
    lines = [_USAGE, "Groups (group=option; the first line of conf/GROUP/OPTION.yaml says more)"]
    for group in GROUPS:
        options = ", ".join(options_of(group))
        lines.append(_wrapped(f"  {group:<10}", options))
    lines += ["", "Keys (key=value; --cfg job shows all sections)"]
    for line in (conf_dir() / "config.yaml").read_text(encoding="utf-8").splitlines():
        match = _KEY.match(line)
        if match:
            name, default, meaning = match.groups()
            lines.append(f"  {name + '=' + default:<32} {meaning}")
    return "\n".join([*lines, "", _FLAGS])


def _wrapped(head: str, text: str) -> str:
    indent = " " * len(head)
    return textwrap.fill(
        text, 98, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    )
