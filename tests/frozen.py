"""What must stay as it is while the code behind it changes: names, sizes, bytes, settings.

`python tests/frozen.py` writes what is missing of tests/fixtures/frozen/*.json; `--overwrite` makes
all anew, which is for a change that users are told of. test_frozen.py compares. A digest is used
where the whole would be large.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.paths import ROOT

FOLDER = ROOT / "tests/fixtures/frozen"
REFERENCE = ROOT / "tests/fixtures/reference"
GROUPS = ("model", "parallel", "ge", "run_mode", "backend")
LENGTH, SLOTS, RANK = 48, 2, 4  # of the networks that are exported, of the adapters


def cases() -> list[str]:
    """The tiny models of tests/fixtures/reference that were there when it was frozen."""
    return sorted(stored("tensors"))


def tensors() -> dict[str, list[list[Any]]]:
    """Of each tiny model every tensor: name, shape, names elsewhere, layout, part, heads."""
    from lite_runner.architectures import parameters

    def frozen(one: Any) -> list[Any]:
        names = ("name", "shape", "hugging_face", "gguf", "layout", "part", "rotary_heads")
        return [getattr(one, name) for name in names]

    return {
        case: json.loads(json.dumps([frozen(one) for one in parameters(description(case))]))
        for case in cases()
    }


def counts() -> dict[str, int]:
    """The number of parameters of each conf/model."""
    from lite_runner.config.argv import parse
    from lite_runner.config.groups import options_of
    from lite_runner.run_modes import heads, resolve
    from lite_runner.sizing.memory import parameter_count

    found = {}
    for name in options_of("model"):
        if name != "auto":
            model = resolve(
                parse([f"model={name}", "predict_data=hi", "load_checkpoint=random"], heads())
            )[0].model_config()
            found[name] = parameter_count(model)
    return found


def settings() -> dict[str, dict[str, Any]]:
    """Every setting as composed without overrides, and what each option of a group changes."""
    from lite_runner.config.groups import compose_groups, options_of

    defaults = _flat(compose_groups({}))
    found = {"defaults": defaults}
    for group in GROUPS:
        for option in options_of(group):
            chosen = _flat(compose_groups({group: option}))
            found[f"{group}={option}"] = {
                key: value
                for key, value in chosen.items()
                if key not in defaults or defaults[key] != value
            } | {f"~{key}": None for key in defaults if key not in chosen}
    return found


def packed() -> dict[str, str]:
    """sha256 of every tiny model's layers as our own operators read them."""
    from lite_runner.native.lora_pool import LoraSize
    from lite_runner.native.packed_model import pack
    from lite_runner.weights.lora.adapter import sites
    from lite_runner.weights.read_ahead import QuantizedWeights

    found = {}
    for case in cases():
        config = description(case)
        every = LoraSize(2, RANK, frozenset(site.weight for site in sites(config)))
        for quant in ("none", "a16w8", "a8w8", "a16w4"):
            columns = (
                config.hidden_size,
                config.intermediate_size,
                config.num_heads * config.head_dim,
            )
            if quant == "a16w4" and any(count % 32 for count in columns):
                continue  # no whole groups
            for name, lora in (("", None), ("/lora", every)):
                weights = QuantizedWeights(_tensors(case, quant), config)
                rounds = quant == "a8w8"
                model = pack(config, weights, lora, rounded_input=rounds)
                digest = hashlib.sha256()
                for layer in model:
                    digest.update(layer.block.tobytes())
                found[f"{case}/{quant}{name}"] = digest.hexdigest()
    return found


def graphs() -> dict[str, list[list[Any]]]:
    """Shapes of the inputs, names and shapes of the parameters of exported graphs.

    `dynamic` has the networks of `static_pair`.
    """
    from lite_runner.mindir.skim import read_model

    found = {}
    for case in ("bloom", "gpt2", "llama"):
        with tempfile.TemporaryDirectory() as folder:
            for layout, files in _exports(case, Path(folder)):
                for name, graph in sorted(files.items()):
                    model = read_model(Path(folder) / graph.file).graph
                    inputs = [["input", list(one.tensor[0].dims)] for one in model.input]
                    parameters = [[_stable(one.name), list(one.dims)] for one in model.parameter]
                    found[f"{case}/{layout}/{name}"] = [*inputs, *parameters]
    return found


def _exports(case: str, folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    from lite_runner.mindir.write_resizable import export_resizable
    from lite_runner.mindir.write_static_pair import export_static_pair
    from lite_runner.weights.read_ahead import ReadAhead

    config = description(case)

    def weights() -> ReadAhead:
        return ReadAhead(_tensors(case, "none"))

    sizes = {"batch_size": SLOTS, "seq_length": LENGTH}
    yield "resizable", export_resizable(config, weights(), folder, "resizable", **sizes)
    stems = {"prefill": "prefill", "increment": "increment"}
    pair = export_static_pair(
        config, weights(), folder, stems, dtype="float32", enc_key=None, sampled=False, **sizes
    )
    yield "static_pair", pair


def _stable(name: str) -> str:
    """A parameter's name without what MindSpore counts up in a process, in front of a colon."""
    return name.rpartition(":")[2]


def description(case: str) -> Any:
    """The description of a tiny model."""
    from lite_runner.weights.checkpoint import model_config_of

    return model_config_of(REFERENCE / case)


def _tensors(case: str, quant: Any) -> Any:
    from lite_runner.config.quantization import Quantization
    from lite_runner.weights.checkpoint import open_checkpoint
    from lite_runner.weights.quantization.quantize import with_quantization

    config = description(case)
    tensors = open_checkpoint(REFERENCE / case, config)
    return with_quantization(tensors, config, Quantization.of(quant, None))


def _flat(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in raw.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


FROZEN: dict[str, Callable[[], Any]] = {
    "tensors": tensors,
    "counts": counts,
    "settings": settings,
    "packed": packed,
    "graphs": graphs,
}


def stored(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def _text(value: Any) -> str:
    """A line for each entry of the outer two levels."""
    lines = []
    for key, inner in value.items():
        if isinstance(inner, (dict, list)):
            pairs = inner.items() if isinstance(inner, dict) else ((None, one) for one in inner)
            texts = [
                (f"{json.dumps(name)}: " if name is not None else "")
                + json.dumps(one, ensure_ascii=False)
                for name, one in pairs
            ]
            opening, closing = "{}" if isinstance(inner, dict) else "[]"
            body = ",\n".join(f"  {text}" for text in texts)
            lines.append(f"{json.dumps(key)}: {opening}\n{body}\n {closing}")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(inner)}")
    return "{\n" + ",\n".join(f" {line}" for line in lines) + "\n}\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for what, make in FROZEN.items():
        file = FOLDER / f"{what}.json"
        if file.exists() and "--overwrite" not in sys.argv:
            print(f"{file.name}: there already")
        else:
            file.write_text(_text(make()), encoding="utf-8")
            print(f"wrote {file.name}")
