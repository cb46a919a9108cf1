"""What users of other programs type, and its equivalent here: for the hints of faults."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

_PROMPT = "predict_data='TEXT'"
_TOKENS = "max_new_tokens=N"
_CHECKPOINT = "model=PATH (a folder or file; model=hf://REPO for the hub)"
_THREADS = "context.threads=N"
_DEVICE = "context.device_target=CPU (or Ascend)"
_DTYPE = "model.model_config.compute_dtype=float16 (or bfloat16, float32)"
_RANKS = "parallel=tp2 (or tp4, tp8)"
_CHAT = "chat=true"
_BATCH = "predict_batch_size=N"
# Flags of llama.cpp, transformers, vLLM, mlx-lm and Hydra, without dashes in front.
_HERE = {
    **dict.fromkeys(("p", "prompt", "text", "input"), _PROMPT),
    **dict.fromkeys(("f", "file", "prompt_file"), "predict_data=FILE.txt (one prompt per line)"),
    **dict.fromkeys(
        ("model_path", "model_name_or_path", "model_id", "pretrained", "checkpoint", "ckpt"),
        _CHECKPOINT,
    ),
    **dict.fromkeys(("hf", "hfr", "hf_repo", "repo", "repo_id"), "model=hf://REPO"),
    **dict.fromkeys(("n", "n_predict", "predict", "max_tokens", "num_predict"), _TOKENS),
    **dict.fromkeys(("ctx_size", "max_model_len", "n_ctx", "max_seq_len"), "max_length=N"),
    **dict.fromkeys(("t", "threads", "n_threads", "num_threads"), _THREADS),
    **dict.fromkeys(("s",), "seed=N"),
    **dict.fromkeys(("temp",), "do_sample=true temperature=X"),
    **dict.fromkeys(("repeat_penalty",), "repetition_penalty=X"),
    **dict.fromkeys(("cnv", "conversation", "chat_template", "interactive"), _CHAT),
    **dict.fromkeys(("ngl", "gpu_layers", "n_gpu_layers", "device", "device_map", "gpu"), _DEVICE),
    **dict.fromkeys(("dtype", "torch_dtype", "precision"), _DTYPE),
    **dict.fromkeys(("tp", "tensor_parallel_size", "num_gpus"), _RANKS),
    **dict.fromkeys(("b", "bs", "batch", "ubatch_size"), _BATCH),
    **dict.fromkeys(("lora", "adapter", "adapter_file", "lora_path"), "adapter_path=FOLDER"),
    **dict.fromkeys(("load_in_8bit", "w8"), "quant=a16w8"),
    **dict.fromkeys(("load_in_4bit", "w4"), "quant=a16w4"),
    **dict.fromkeys(("quantize", "quantization"), "quant=a16w8 (or a16w4, a8w8)"),
    **dict.fromkeys(("ctk", "cache_type_k", "kv_cache_dtype"), "kv_cache=fp16"),
    **dict.fromkeys(("o", "out", "output", "save_dir"), "output_dir=FOLDER"),
    **dict.fromkeys(("json", "jsonl", "format", "output_json"), "output_format=jsonl"),
    **dict.fromkeys(("sys", "system_prompt"), "system='TEXT' chat=true"),
    **dict.fromkeys(("v", "verbose", "debug"), "verbosity=2"),
    **dict.fromkeys(("q", "quiet", "silent", "log_disable"), "verbosity=0"),
    **dict.fromkeys(("no_stream",), "stream=false"),
    **dict.fromkeys(("reverse_prompt", "r", "stop_sequence"), "stop='TEXT'"),
    **dict.fromkeys(
        ("config_name", "cn", "config_path", "cp"), "--config FILE, and --config-dir DIR"
    ),
    **dict.fromkeys(("package", "resolve"), "--cfg job, which prints all, resolved"),
    **dict.fromkeys(("hydra_help",), "--help"),
    **dict.fromkeys(("run",), "run_mode=predict"),
    **dict.fromkeys(("experimental_rerun",), "--config outputs/latest/config.yaml"),
}
CHECKPOINTS = (".gguf", ".safetensors", ".ckpt", ".bin")


def equivalent_of(flag: str) -> str:
    """What to type in place of a flag of another program; "" for one that is not known."""
    return _HERE.get(flag.lstrip("-").replace("-", "_").lower(), "")


def command_meant(
    words: Sequence[str], prompt: str | None, models: Collection[str], run_modes: Collection[str]
) -> str:
    """The arguments that words without a key stand for: a checkpoint, a yaml, a model, a text.

    `prompt` is predict_data as typed before them, which they then go on with; None: it was not.
    """
    meant, texts = [], [] if prompt is None else [prompt]
    for word in words:
        path = Path(word)
        if word in models or word.endswith(CHECKPOINTS) or "://" in word or _is_folder(path):
            meant.append(f"model={shlex.quote(word)}")
        elif word in run_modes:
            meant.append(f"run_mode={word}")
        elif path.suffix in (".yaml", ".yml"):
            meant.append(f"--config {shlex.quote(word)}")
        else:
            texts.append(word)
    if texts or not meant[0].startswith("run_mode="):
        text = " ".join(texts)
        meant.append(f"predict_data={shlex.quote(text)}" if text else _PROMPT)
    return " ".join(meant)


def _is_folder(path: Path) -> bool:
    try:
        return path.expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, no such user
        return False
