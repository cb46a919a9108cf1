"""The yaml files to predict or export with of MindFormers' repository, which no package has.

`python -m tests.mindformers_repository FOLDER` makes tests/fixtures/mindformers_repository.json
anew from FOLDER/TAG, the checkouts of the TAGS of https://gitee.com/mindspore/mindformers
(Apache-2.0). Each file is kept as data: without comments, without the contents of sections that
have no effect here, with chat templates shortened; one of another architecture is a name.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lite_runner.architectures import networks
from lite_runner.config.argv import parse
from lite_runner.config.mindformers import IGNORED, arch_of
from lite_runner.errors import ConfigError
from lite_runner.run_modes import heads, resolve

FILE = Path(__file__).parent / "fixtures/mindformers_repository.json"
# research/ is in no package; of configs/ only those of a release without a package.
TAGS = {"v1.0.2": ("research",), "v1.3.2": ("research",), "v1.7.0": ("research", "configs")}
LINE = ("--device_target", "CPU", "--use_parallel", "False", "--run_mode", "predict")
# Ignored under these names, for others are made of them.
TRANSLATED = {
    "moe_config",
    *(
        f"model.model_config.{name}"
        for name in (
            *("extend_method", "has_bias", "hidden_act", "moe_config", "multiple_of"),
            *("boost_model_name", "out_proj_has_bias", "wo_has_bias"),
            *("pet_config", "quantization_config", "scaling_factor"),
        )
    ),
}
MORE = ("--load_checkpoint", "random", "--predict_data", "hello")


def files() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each file kept: its tag and path, what came of it last, and its data."""
    held = json.loads(FILE.read_text(encoding="utf-8"))
    for tag, path, result, numbers in held["files"]:
        raw: dict[str, Any] = {}
        for number in numbers:
            raw |= held["parts"][number]
        yield f"{tag}:{path}", result, raw


def outcome(raw: Mapping[str, Any], path: Path) -> str:
    """The outcome of a file: it runs, or the first line of the error."""
    path.write_text(yaml.dump(raw, Dumper=yaml.CSafeDumper), encoding="utf-8")
    try:
        resolve(parse(["--config", str(path), *LINE, *MORE], heads()))
    except ConfigError as error:
        return error.message.replace(f" (in {path})", "")
    return "runs"


def shortened(raw: dict[str, Any]) -> dict[str, Any]:
    """The parts of a file that can change its outcome; of another architecture that alone."""
    if (arch := arch_of(raw)) not in networks():
        return {"model": {"arch": {"type": arch}}}
    return {key: _kept(value, key) for key, value in raw.items()}


def _kept(value: Any, key: str) -> Any:
    if key in IGNORED - TRANSLATED:
        return None
    if key == "processor.tokenizer.chat_template":
        return "{{ messages }}"
    if isinstance(value, str) and value.startswith("/home/"):  # of an author
        return f"/path/to/{Path(value).name}"
    if isinstance(value, dict):
        return {name: _kept(below, f"{key}.{name}") for name, below in value.items()}
    return value


def _main(folder: Path) -> None:
    entries, parts = [], dict[str, int]()
    for tag, below in TAGS.items():
        paths = (path for part in below for path in (folder / tag / part).rglob("*.yaml"))
        for path in sorted(paths):
            raw = yaml.safe_load(path.read_text(encoding="utf-8"))
            named = re.search("predict|export|infer", path.name)
            if not named and raw.get("run_mode") not in ("predict", "export"):
                continue
            if raw.get("pretrained_model_dir") is not None:  # of any model
                continue
            raw = shortened(raw)
            result = outcome(raw, folder / "file.yaml").partition("; expected one of")[0]
            name = path.relative_to(folder / tag).as_posix()
            texts = (json.dumps({key: value}, ensure_ascii=False) for key, value in raw.items())
            numbers = [parts.setdefault(text, len(parts)) for text in texts]
            entries.append(json.dumps([tag, name, result, numbers]))
    rows = ",\n".join(parts), ",\n".join(entries)
    text = f'{{"parts": [\n{rows[0]}\n], "files": [\n{rows[1]}\n]}}\n'
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
