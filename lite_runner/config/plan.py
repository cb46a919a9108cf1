"""What a run would take, before it takes it: parameters and memory against what is free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lite_runner.config.model import ModelConfig
from lite_runner.config.quantization import CacheType, Quantization, Scheme
from lite_runner.config.schema import DType, RunConfig
from lite_runner.errors import EnvironmentFault

BYTES_OF: dict[DType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """Bytes that a model needs on its device."""

    weights: int
    cache: int  # keys and values of all slots
    adapters: int = 0  # those that are loaded at a time

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.adapters


def parameter_count(model: ModelConfig) -> int:
    """The exact number of parameters; a tied head is counted once."""
    heads = 1 if model.tie_word_embeddings else 2
    return heads * model.vocab_size * model.hidden_size + COUNTS[model.family](model)


def _llama(model: ModelConfig) -> int:
    hidden = model.hidden_size
    bias = (model.num_heads + 2 * model.n_kv_heads) * model.head_dim if model.qkv_has_bias else 0
    layer = _attention(model) + bias + 3 * hidden * model.intermediate_size + 2 * hidden
    return model.num_layers * layer + hidden


def _bloom(model: ModelConfig) -> int:
    norms = 2 * 2 * model.hidden_size  # behind the embedding, and before the head
    return model.num_layers * _classic_layer(model) + norms


def _gpt2(model: ModelConfig) -> int:
    positions = model.seq_length * model.hidden_size
    return model.num_layers * _classic_layer(model) + positions + 2 * model.hidden_size


def _attention(model: ModelConfig) -> int:
    return 2 * model.hidden_size * (model.num_heads + model.n_kv_heads) * model.head_dim


def _classic_layer(model: ModelConfig) -> int:
    hidden, wide = model.hidden_size, model.intermediate_size
    biases = (model.num_heads + 2 * model.n_kv_heads) * model.head_dim + hidden + wide + hidden
    return _attention(model) + 2 * hidden * wide + biases + 4 * hidden


# By family, all but the embedding and the head; lite_runner.register adds to it.
COUNTS: dict[str, Callable[[ModelConfig], int]] = {
    "llama": _llama,
    "bloom": _bloom,
    "gpt2": _gpt2,
}


def matrix_parameters(model: ModelConfig) -> int:
    """Parameters of the linear layers of all blocks."""
    matrices = 3 if model.family == "llama" else 2  # of the feed-forward layer
    wide = matrices * model.hidden_size * model.intermediate_size
    return model.num_layers * (_attention(model) + wide)


def weight_bytes(model: ModelConfig, dtype: DType, quantization: Quantization) -> int:
    """Bytes of the weights, matrices as integers where quantized; scales of rows, and what stays
    float32 beside matrices of 16 bits, within 1 %."""
    linear, table = quantization.linear, quantization.table
    if linear is None or table is None:
        return parameter_count(model) * BYTES_OF[dtype]
    heads = 1 if model.tie_word_embeddings else 2
    layers = matrix_parameters(model)
    rest = parameter_count(model) - layers - heads * model.vocab_size * model.hidden_size
    tables = heads * table.nbytes(model.vocab_size, model.hidden_size)
    return _as_rows(linear, layers, model.hidden_size) + tables + 4 * rest


def _as_rows(scheme: Scheme, count: int, columns: int) -> int:
    """Bytes of `count` weights in rows of `columns`."""
    return scheme.nbytes(count // columns, columns)


def memory_need(
    model: ModelConfig,
    dtype: DType,
    slots: int,
    length: int,
    use_past: bool = True,
    quantization: Quantization = Quantization(),  # noqa: B008  (frozen)
    kv_cache: CacheType = "fp32",
    weights: DType | None = None,
) -> Memory:
    """Bytes for weights, and for a cache of `slots` sequences of `length` tokens.

    `quantization` counts matrices as integers: of a backend that computes with them; `weights` is
    the type of the others where that is not the one that is computed in.
    """
    heads = 2 * model.num_layers * model.n_kv_heads
    sizes = {"fp32": BYTES_OF[dtype] * model.head_dim, "fp16": 2 * model.head_dim}
    sizes["int8"] = model.head_dim + 4  # and a scale
    cache = slots * length * heads * sizes[kv_cache] if use_past else 0
    return Memory(weight_bytes(model, weights or dtype, quantization), cache)


def own_operators(config: RunConfig, device: str) -> bool:
    """Whether this project's operators compute a run, as far as its config tells: whether they
    were built, and have the model's family, is not known here."""
    whole = not config.use_parallel or config.parallel_config.model_parallel == 1
    return device == "CPU" and config.context.kernels and config.use_past and whole


def run_memory(
    config: RunConfig,
    model: ModelConfig,
    quantization: Quantization,
    *,
    device: str,
    own: bool,
    slots: int,
    length: int,
) -> Memory:
    """What a run of one process takes; `own`: by this project's operators, which alone compute
    with the integers of `quantization` and with weights of 16 bits on a CPU."""
    return memory_need(
        model,
        config.compute_dtype(device),
        slots,
        length,
        config.use_past,
        quantization if own else Quantization(),
        config.kv_cache,
        config.held_dtype(device, own=own),
    )


def free_memory() -> int:
    """Bytes this process may still take: the machine's, or its container's if that is less."""
    import psutil  # type: ignore[import-untyped]

    free = int(psutil.virtual_memory().available)
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or no limit ("max")
        return free
    # File pages count as used but are given back when asked for.
    return max(0, min(free, limit - used + int(stat.get("file", 0))))


def check_memory(need: Memory, free: int) -> None:
    """Raises EnvironmentFault where weights and cache do not fit `free` bytes."""
    if need.total > free:
        raise EnvironmentFault(
            f"memory: the weights need {readable(need.weights)} and the cache"
            f" {readable(need.cache)}"
            + (f" and the adapters {readable(need.adapters)}" if need.adapters else "")
            + f", but {readable(free)} is free",
            "a smaller model, predict_batch_size, max_new_tokens or max_length, or a machine"
            " with more memory",
        )


def plan(
    config: RunConfig,
    model: ModelConfig,
    *,
    device: str,
    slots: int,
    length: int,
    adapters: int = 0,
    checkpoint: str = "",
) -> list[str]:
    """The lines of dry_run=true, for a cache of `slots` sequences of `length` tokens and `adapters`
    bytes of those that are loaded at a time. `checkpoint` is where the weights are; "": not known.
    """
    own = own_operators(config, device)
    quantization = config.quantization if own else Quantization()
    need = run_memory(
        config, model, quantization, device=device, own=own, slots=slots, length=length
    )
    need = replace(need, adapters=adapters)
    free = free_memory()
    held: str = config.held_dtype(device, own=own)
    if quantization.quant != "none":
        held = f"integers (quant={quantization})"
    lines = about_model(config, model, checkpoint or config.checkpoint_source) | {
        "weights": f"{readable(need.weights)} as {held}",
        "cache": f"{readable(need.cache)} for {slots} x {length} tokens"
        if config.use_past
        else "none (use_past=false)",
    }
    if adapters:
        lines["adapters"] = f"{readable(adapters)} for those loaded at a time"
    if device == "CPU" and not config.use_parallel:
        fits = "enough" if need.total <= free else "NOT enough: the run would be refused"
        lines["memory"] = f"needs {readable(need.total)}, {readable(free)} is free: {fits}"
    lines |= {
        "backend": config.backend,
        "device": device,
        "ranks": str(config.parallel_config.data_parallel * config.parallel_config.model_parallel),
        "output": config.output_dir,
    }
    return aligned(lines)


def about_model(config: RunConfig, model: ModelConfig, checkpoint: str) -> dict[str, str]:
    """What dry_run=true says of every run: the model, and where its weights are."""
    kv = "" if model.n_kv_heads == model.num_heads else f" ({model.n_kv_heads} key/value)"
    return {
        "run mode": config.run_mode,
        "model": config.model_name,
        "architecture": f"{model.family}: {model.num_layers} layers, hidden {model.hidden_size},"
        f" {model.num_heads} heads{kv}, vocabulary {model.vocab_size}, context {model.seq_length}",
        "parameters": f"{parameter_count(model):,}",
        "checkpoint": checkpoint,
    }


def aligned(lines: Mapping[str, str]) -> list[str]:
    """Names and values as lines of text."""
    return [f"{name:<13} {value}" for name, value in lines.items()]


def readable(size: int) -> str:
    """A number of bytes for people: 538.1 MB."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"
