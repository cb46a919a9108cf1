"""Memory and floating-point operations of a training."""

from __future__ import annotations

import math
import time

import numpy as np

from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.sizing import Memory, parameter_count
from lite_runner.system.environment import cores
from lite_runner.training.data import ExampleSet
from lite_runner.training.kernels import Room, use_threads
from lite_runner.training.network import matrices
from lite_runner.training.options import FinetuneOptions
from lite_runner.training.tape import LOGIT_ROWS, Bfloat16Matrix, PanelMatrix, Value
from lite_runner.training.trainer import CHUNK

PROCESS = 120 << 20  # of Python with NumPy and the tokenizer


def memory_of(
    asked: FinetuneOptions,
    model: Decoder,
    trained: int,
    longest: int,
    *,
    threads: int | None,
    panels: bool,
) -> Memory:
    """Memory of training: weights, gradients and the optimizer's state, and activations. `panels`:
    frozen matrices are held twice."""
    block = max(model.blocks, key=lambda one: one.feed_forward.width)
    attention, width = block.attention, block.feed_forward.width
    experts = block.feed_forward.experts
    wide = width * (3 if experts is None else 3 * experts.chosen)
    heads = (2 * attention.heads + 4 * attention.kv_heads) * attention.head_dim
    tokens = max(longest, CHUNK)
    kept = 1 if asked.checkpoint else model.num_layers  # layers whose activations are kept
    per_token = kept * (5 * model.hidden_size + 2 * heads + wide)
    per_token += (model.num_layers - kept) * model.hidden_size
    workers = 1 if asked.full else threads or cores()
    logits = min(LOGIT_ROWS, tokens) * model.vocab_size
    return Memory(
        weights=_weights(asked.dtype, model, panels=panels),
        cache=0,
        adapters=4 * 4 * trained if not asked.full else 4 * 3 * trained,
        process=PROCESS,
        work=4 * workers * (tokens * per_token + logits),
    )


def _weights(dtype: str, model: Decoder, *, panels: bool) -> int:
    """Bytes of the weights in memory."""
    count, names = parameter_count(model), matrices(model)
    table = model.vocab_size * model.hidden_size if model.tie_word_embeddings else 0
    if dtype == "stored":
        return 2 * count + 4 * table
    multiplied = table + sum(math.prod(one.shape) for one in parameters(model) if one.name in names)
    if dtype == "bfloat16":
        return 4 * (count - multiplied + table) + 2 * multiplied
    return 4 * (count + multiplied) if panels else 4 * count


def operations_of(asked: FinetuneOptions, model: Decoder, data: ExampleSet) -> float:
    """Floating-point operations of the products of an epoch, two for each multiplication."""
    experts = None if model.sparse is None else model.sparse.experts
    share = 1.0 if experts is None else experts.chosen / experts.count
    names = matrices(model)
    head = model.vocab_size * model.hidden_size
    weights = 0.0  # of the layers, used by a token
    for one in parameters(model):
        if one.name in names and one.role != "head":
            size = math.prod(one.shape)
            weights += size * share if (one.role or "").startswith("expert_") else size
    again = 1 if asked.checkpoint else 0
    passes = 3 if asked.full else 2  # forward pass, gradients of inputs, gradients of weights
    # Each token attends to half of its text, in two products forwards and four backwards.
    seen = sum(len(text.ids) ** 2 / 2 for text in data.texts)
    width = sum(block.attention.heads * block.attention.head_dim for block in model.blocks)
    work = data.tokens * weights * (passes + again) + data.targets * head * passes
    return 2 * (work + seen * width * 2 * (3 + again))


def product_speed(dtype: str, model: Decoder, threads: int | None, *, panels: bool) -> float:
    """Floating-point operations a second of a product as the layers have it."""
    width = max(model.hidden_size, min(4 * model.hidden_size, model.intermediate_size or 0))
    weight = np.ones((width, model.hidden_size), np.float32)
    x = np.ones((CHUNK, model.hidden_size), np.float32)
    kind = Bfloat16Matrix if dtype == "bfloat16" else PanelMatrix if panels else None
    value = Value(weight, packed=None if kind is None else kind(weight, Room()))
    use_threads(threads or cores())
    least = math.inf
    for _ in range(5):
        began = time.perf_counter()
        value.times(x)
        least = min(least, time.perf_counter() - began)
    return 2 * weight.size * CHUNK / least
