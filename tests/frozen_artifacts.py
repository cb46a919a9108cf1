"""Exported models that users may have: each as `run_lite.py run_mode=export` of one day wrote it.

`python -m tests.frozen_artifacts` adds those of EXPORTS that are missing in
tests/fixtures/frozen/artifacts, with what they compute; `--overwrite` makes all anew, which is for
a change that users are told of. test_frozen_artifacts.py loads and compares.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Regex, decoders, models, pre_tokenizers

from lite_runner.app import main
from tests.conftest import ROOT, Reference
from tests.model_gguf import write_model_gguf

FOLDER = ROOT / "tests/fixtures/frozen/artifacts"
KEY = "infer.enc_key=0123456789abcdef"
MS = ("export.layout=resizable", "infer.model_type=mindir_lite")
PACKED = "export.layout=packed"
SAMPLED = "model.model_config.is_sample_acceleration=true"

# The tiny model of tests/fixtures/reference, and how it was exported.
EXPORTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dynamic": ("llama", ("export.layout=dynamic",)),
    "dynamic_checksum": ("llama", ("export.layout=dynamic",)),  # the first of manifest.json itself
    "dynamic_encrypted": ("gpt2_inner", ("export.layout=dynamic", KEY)),
    "resizable": ("gpt2", ("export.layout=resizable",)),
    "resizable_biases": ("qwen2", ("export.layout=resizable",)),
    "ms": ("llama", MS),
    "ms_fp16": ("bloom", (*MS, "export.weight_fp16=true")),
    "pair": ("bloom_6_heads", ("export.layout=static_pair",)),
    "pair_by_batch_index": ("qwen2", ("export.layout=static_pair",)),
    "pair_sampled": ("gpt2_inner", ("export.layout=static_pair", SAMPLED)),
    "a16w8": ("llama", ("quant=a16w8",)),
    "a16w8_gpt2": ("gpt2", ("quant=a16w8",)),
    "a16w8_kv_fp16": ("qwen2", ("quant=a16w8", "kv_cache=fp16")),
    "a16w8_kv_int8": ("bloom", ("quant=a16w8", "kv_cache=int8")),
    "a16w4": ("bloom", ("quant=a16w4",)),
    "a8w8": ("llama", ("quant=a8w8",)),
    "packed": ("llama", (PACKED,)),
    "packed_general": ("gemma2", (PACKED, "quant=a16w8")),
    "packed_experts": ("mixtral", (PACKED, "quant=a16w4")),
    "packed_blocks": ("llama", (PACKED,)),  # gate and up of different types: a joined matrix
    "packed_blocks_experts": ("mixtral", (PACKED,)),
}
BLOCKS = {"packed_blocks": {"up_proj": "Q8_0"}, "packed_blocks_experts": {}}  # Q5_0 but for these
SIZES = ("predict_batch_size=2", "infer.infer_seq_length=32")
INSTRUCTIONS = "avx512"  # of our own operators, where these were made
PROMPTS = slice(1, 3)  # of the reference's: 5 and 17 tokens, a row each
PREDICT = (
    *("backend=mslite", "predict_data=['some words','another text']", "max_new_tokens=8"),
    "eos_token_id=[]",
)


def predicted(name: str) -> list[dict[str, Any]]:
    """The token ids and the text of each prompt, from the command line in the current folder."""
    key = [KEY] if KEY in EXPORTS[name][1] else []
    assert main([*PREDICT, *key, f"infer.model_dir={FOLDER / name}"]) == 0
    result = json.loads(Path("outputs/latest/result.json").read_text(encoding="utf-8"))
    return [{"token_ids": row["token_ids"], "text": row["text"]} for row in result["results"]]


def logits(name: str) -> NDArray[np.float32] | None:
    """[2, steps + 1, vocab] of PROMPTS; None where the graph gives tokens."""
    from lite_runner.backends.engines.start import EngineOptions, choose_engine
    from lite_runner.backends.exported import open_exported
    from lite_runner.config.secret import encryption_key
    from lite_runner.mindir.manifest import read_manifest

    manifest = read_manifest(FOLDER / name)
    if manifest.sampled:
        return None
    options = EngineOptions(
        choose_engine(manifest.layout, "auto", "CPU"),
        key=encryption_key(KEY.partition("=")[2]) if manifest.encrypted else None,
    )
    graphs = manifest.paths(FOLDER / name)
    model = open_exported(graphs, manifest, options, slots=manifest.batch_size)
    try:
        known = Reference(EXPORTS[name][0])
        known.prompts, known.forced = known.prompts[PROMPTS], known.forced[PROMPTS]
        return known.run(model)
    finally:
        model.close()


def expected_tokens(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def expected_logits(name: str) -> NDArray[np.float32]:
    found: NDArray[np.float32] = np.load(FOLDER / f"{name}.npy")
    return found


def _export(name: str) -> None:
    """Write the artifact and what it computes, from a folder that holds the model."""
    case, settings = EXPORTS[name]
    shutil.copytree(ROOT / "tests/fixtures/reference" / case, case, dirs_exist_ok=True)
    _tokenizer(Path(case) / "tokenizer.json")
    source = [f"load_checkpoint={case}"]
    if name in BLOCKS:
        write_model_gguf(Path(f"{name}.gguf"), Path(case), "Q5_0", mixed=BLOCKS[name])
        source = [f"load_checkpoint={name}.gguf", f"processor.tokenizer.tokenizer_file={case}"]
    to = [f"export_output={FOLDER / name}", "overwrite=true"]
    assert main(["run_mode=export", *source, *SIZES, *settings, *to]) == 0
    text = json.dumps(predicted(name), indent=1, ensure_ascii=False) + "\n"
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
    if (values := logits(name)) is not None:
        np.save(FOLDER / f"{name}.npy", values)


def _tokenizer(path: Path) -> None:
    """One id for each character of ASCII: the tiny models know 96."""
    texts = ["<unk>", "<s>", "</s>", " ", *map(chr, range(34, 126))]
    vocabulary = {text: number for number, text in enumerate(texts)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["LITE_RUNNER_CACHE"] = f"{folder}/cache"
        for one in EXPORTS:
            if (FOLDER / one).exists() and "--overwrite" not in sys.argv:
                print(f"{one}: there already")
            else:
                _export(one)
                print(f"wrote {one}")
