"""Makes tests/fixtures/mindformers with the real MindFormers 1.0.2; --check compares instead.

tests/fixtures/README.md says what lies there. Runs in the environment of
`scripts/setup.sh mindformers`: Python 3.9, mindspore 2.0.0.
"""

from __future__ import annotations

import argparse
import gzip
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import real_mindformers  # noqa: F401  (before mindformers)

import mindspore  # isort: skip
import numpy as np
from mindformers import (
    BloomConfig,
    BloomLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from mindformers.core.callback import CheckpointMointor
from mindformers.core.optim import FP32StateAdamWeightDecay
from mindformers.pet import get_pet_model
from mindformers.tools import export
from mindformers.tools.register import MindFormerConfig
from mindspore.dataset import NumpySlicesDataset

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "mindformers"
SEQ_LENGTH = 16
LENGTHS = (1, 5, 9)  # of the prompts
STEPS = 6  # greedy tokens after each
TOLERANCE = 1e-3  # relative to the largest |value|: float16, and another machine's kernels
GAP = 2e-2  # between the two best logits, so that rounding cannot turn one token into another

SIZES: dict[str, Any] = {
    "batch_size": 1,
    "seq_length": SEQ_LENGTH,
    "vocab_size": 64,
    "hidden_size": 16,
    "num_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "do_sample": False,
    "repetition_penalty": 1.0,
}
# rope slices: CPU's BatchMatMul does not broadcast, with which the other form swaps halves.
LLAMA = {"num_heads": 4, "n_kv_heads": 2, "intermediate_size": 24, "use_rope_slice": True}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any], str]] = {  # config, network, sizes, LoRA
    # bloom: MindFormers gives every matrix of every adapter the same name, so it cannot save them.
    "bloom": (BloomConfig, BloomLMHeadModel, {"num_heads": 2}, ""),
    "gpt2": (GPT2Config, GPT2LMHeadModel, {"num_heads": 2}, ".*dense1|.*mapping"),
    "llama": (LlamaConfig, LlamaForCausalLM, LLAMA, ".*wq|.*wv|.*w2"),
}
RANK, ALPHA = 3, 6


def build(family: str, dtype: str, **changes: Any) -> Any:
    """A network of `family` to predict with, its parameters not yet those of the fixture."""
    config, network, sizes, _ = FAMILIES[family]
    types = {"param_init_type": dtype, "compute_dtype": dtype}
    model = network(config(**{**SIZES, **sizes, **types, **changes}))
    model.set_train(False)
    return model


def fill(model: Any, family: str) -> None:
    """The same random numbers whatever else the network holds, large enough to matter."""
    for parameter in model.get_parameters():
        name = parameter.name
        if name.endswith("_past"):
            continue
        rng = np.random.default_rng(zlib.crc32(f"{family} {name}".encode()))
        is_norm_scale = name.endswith(("gamma", "norm.weight", "norm_out.weight"))
        # What comes of the layers outweighs the embedding, else each token repeats itself.
        scale = 2.0 if name.endswith("projection.weight") else 0.5
        values = rng.normal(0.0, scale, parameter.shape) + is_norm_scale
        parameter.set_data(mindspore.Tensor(values, parameter.dtype))


class Recorder:
    """A logits processor that changes nothing and keeps what it sees."""

    def __init__(self) -> None:
        self.logits: list[Any] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.logits.append(np.array(scores[0], np.float32))
        return scores


def generate(model: Any, prompt: Any, steps: int = STEPS) -> tuple[Any, Any]:
    """Greedy tokens int32 [steps], or fewer to an end token, and logits float32 [steps, vocab]."""
    seen = Recorder()
    (found,) = model.generate(
        [prompt.tolist()], max_new_tokens=steps, do_sample=False, logits_processor=[seen]
    )
    return found[len(prompt) :].astype(np.int32), np.array(seen.logits, np.float32)


def generate_all(model: Any, prompts: list[Any], steps: int = STEPS) -> tuple[Any, Any]:
    """As `generate`, stacked over the prompts."""
    found = [generate(model, prompt, steps) for prompt in prompts]
    return np.stack([tokens for tokens, _ in found]), np.stack([logits for _, logits in found])


def choose_prompts(model: Any, rng: Any) -> list[Any]:
    """A random prompt of each length after which no choice is close and nothing ends."""
    prompts = []
    while len(prompts) < len(LENGTHS):
        prompt = rng.integers(3, SIZES["vocab_size"], LENGTHS[len(prompts)])
        tokens, logits = generate(model, prompt)
        best = np.sort(logits, axis=-1)
        gap = (best[:, -1] - best[:, -2]).min() / np.abs(best).max()
        if gap > GAP and len(set(tokens.tolist())) > 2 and len(tokens) == STEPS:
            prompts.append(prompt)
    return prompts


def make(family: str, folder: Path) -> None:
    """Every file of one family."""
    plain = build(family, "float32")
    fill(plain, family)
    prompts = choose_prompts(plain, np.random.default_rng(len(family)))
    padded = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
    for row, prompt in zip(padded, prompts):
        row[: len(prompt)] = prompt
    arrays = {"prompts": padded, "lengths": np.array(LENGTHS, np.int32)}
    arrays["tokens"], arrays["logits"] = generate_all(plain, prompts)
    plain.save_pretrained(str(folder / "plain"), family)

    past = build(family, "float16", use_past=True)
    fill(past, family)
    tokens, arrays["past_logits"] = generate_all(past, prompts)
    assert np.array_equal(tokens, arrays["tokens"])
    past.save_pretrained(str(folder / "past"), family)  # with what the cache holds now

    if FAMILIES[family][-1]:
        arrays["lora_logits"] = generate_all(make_lora(family, folder), prompts, 1)[1][:, 0]
    np.savez_compressed(folder / "expected.npz", **arrays)
    make_mindir(family, folder)
    if family == "llama":
        make_training(folder)


def make_lora(family: str, folder: Path) -> Any:
    """A network with an adapter in it, of which what MindFormers trains is saved.

    It must not have run before: it would go on running as it was compiled, without the adapter.
    """
    base = build(family, "float32")
    fill(base, family)
    target = FAMILIES[family][-1]
    pet = {"pet_type": "lora", "lora_rank": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0}
    types = {"param_init_type": "float32", "compute_dtype": "float32"}
    model = get_pet_model(base, {**pet, **types, "target_modules": target})
    model.set_train(False)
    trained = [one for one in model.get_parameters() if "lora" in one.name]
    for parameter in trained:
        rng = np.random.default_rng(zlib.crc32(f"{family} {parameter.name}".encode()))
        parameter.set_data(mindspore.Tensor(rng.normal(0.0, 0.5, parameter.shape), parameter.dtype))
    (folder / "lora").mkdir()
    saved = [{"name": one.name, "data": one} for one in trained]
    mindspore.save_checkpoint(saved, str(folder / "lora" / f"{family}_lora.ckpt"))
    return base


def make_training(folder: Path) -> None:
    """Results of two epochs of two steps of a llama, all of it or an adapter: the checkpoint
    with the optimizer's state, the losses, and the loss of the first batch after them."""
    family = "llama"
    ids = np.random.default_rng(1).integers(3, SIZES["vocab_size"], (4, SEQ_LENGTH + 1))
    arrays = {"ids": ids.astype(np.int32)}
    for kind in ("lora", "full"):
        base = build(family, "float32", eos_token_id=-1, pad_token_id=-1)
        fill(base, family)
        model = base
        if kind == "lora":
            types = {"param_init_type": "float32", "compute_dtype": "float32"}
            pet = {"pet_type": "lora", "lora_rank": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0}
            mindspore.set_seed(1)
            model = get_pet_model(base, {**pet, **types, "target_modules": ".*wq|.*wv"})
            for parameter in model.get_parameters():
                parameter.requires_grad = "lora" in parameter.name
        model.set_train(True)
        data = NumpySlicesDataset({"input_ids": arrays["ids"]}, shuffle=False).batch(2)
        optimizer = FP32StateAdamWeightDecay(
            model.trainable_params(), learning_rate=0.01, weight_decay=0.01
        )
        save = CheckpointMointor(
            prefix=family,
            directory=kind,  # in the current folder
            save_checkpoint_steps=4,
            save_network_params=False,
            append_info=[{"step_num": 0, "epoch_num": 0}],
        )
        step = mindspore.nn.TrainOneStepCell(model, optimizer)
        mindspore.Model(step).train(2, data, callbacks=[save], dataset_sink_mode=False)
        (saved,) = Path(kind).rglob("*.ckpt")
        (folder / f"training_{kind}.ckpt").write_bytes(saved.read_bytes())
        after = model(mindspore.Tensor(arrays["ids"][:2]))
        arrays[f"{kind}_loss"] = np.array(after.asnumpy(), np.float32).reshape(())
    np.savez_compressed(folder / "training.npz", **arrays)


def make_mindir(family: str, folder: Path) -> None:
    """Exports of tools/export.py: prefill and increment with a cache, and a graph without one.

    Its main() chooses an Ascend device; what it then calls is called here.
    """
    _, network, sizes, _ = FAMILIES[family]
    with tempfile.TemporaryDirectory() as work:
        for stem, families, changes in (
            ("cache", ("bloom", "gpt2", "llama"), {"use_past": True}),
            ("sampled", ("bloom",), {"use_past": True, "is_sample_acceleration": True}),
            ("no_cache", ("bloom", "llama"), {"use_past": False}),  # it fails for gpt2
        ):
            if family not in families:
                continue
            model_config = {
                "type": FAMILIES[family][0].__name__,
                **SIZES,
                **sizes,
                "param_init_type": "float16",
                "compute_dtype": "float16",
                "checkpoint_name_or_path": str(folder / "plain" / f"{family}.ckpt"),
                **changes,
            }
            infer = {
                "infer_seq_length": SEQ_LENGTH,
                "prefill_model_path": f"{work}/{stem}_prefill.mindir",
                "increment_model_path": f"{work}/{stem}_inc.mindir" if changes["use_past"] else "",
            }
            config = MindFormerConfig(
                trainer={"model_name": family},
                model={"arch": {"type": network.__name__}, "model_config": model_config},
                infer=infer,
            )
            run = export.export_inc_model if changes["use_past"] else export.export_single_model
            run(config, 1)
        (folder / "mindir").mkdir()
        for path in sorted(Path(work).iterdir()):
            packed = gzip.compress(path.read_bytes(), mtime=0)
            (folder / "mindir" / f"{path.name}.gz").write_bytes(packed)


def compare(fresh: Path, kept: Path) -> None:
    """Raise AssertionError unless `fresh` holds what `kept` holds, numbers within TOLERANCE."""
    names = {str(path.relative_to(fresh)) for path in fresh.rglob("*") if path.is_file()}
    assert names == {str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()}
    for name in sorted(names):
        if name.endswith(".ckpt"):
            _compare_arrays(name, _checkpoint(fresh / name), _checkpoint(kept / name))
        elif name.endswith(".npz"):
            _compare_arrays(name, dict(np.load(fresh / name)), dict(np.load(kept / name)))
        elif name.endswith(".gz"):
            # The order of some nodes differs from run to run.
            sizes = [len(gzip.decompress((root / name).read_bytes())) for root in (fresh, kept)]
            assert abs(sizes[0] - sizes[1]) <= 0.01 * sizes[1], f"{name}: {sizes} bytes"
        else:
            assert (fresh / name).read_bytes() == (kept / name).read_bytes(), name
    print(f"{kept.name}: {len(names)} files agree")


def _checkpoint(path: Path) -> dict[str, Any]:
    return {name: one.asnumpy() for name, one in mindspore.load_checkpoint(str(path)).items()}


def _compare_arrays(where: str, fresh: dict[str, Any], kept: dict[str, Any]) -> None:
    assert list(fresh) == list(kept), where
    for name, values in kept.items():
        found = fresh[name]
        assert (found.shape, found.dtype) == (values.shape, values.dtype), f"{where}: {name}"
        gap = np.abs(found.astype(np.float64) - values).max()
        exact = np.issubdtype(values.dtype, np.integer)
        assert gap <= (0 if exact else TOLERANCE * np.abs(values).max()), f"{where}: {name} {gap}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as work:
            os.chdir(work)  # where MindFormers leaves its log
            fresh = Path(work) / family if check else FIXTURES / family
            fresh.mkdir(parents=True)
            make(family, fresh)
            if check:
                compare(fresh, FIXTURES / family)


if __name__ == "__main__":
    main()
