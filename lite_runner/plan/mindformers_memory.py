"""The memory that a run on the real MindFormers takes."""

from __future__ import annotations

from lite_runner.config.release import Release
from lite_runner.plan.mindformers_run import MindFormersRun
from lite_runner.sizing.need import BYTES_OF, Memory, cache_bytes, parameter_count

# Measured with tiny models and SmolLM2: both processes, and the graphs of each layer.
PROCESS, LAYER = 820 << 20, 7 << 20


def memory_of(run: MindFormersRun, ranks: int) -> Memory:
    """Of both processes of a rank, of so many that share the model."""
    model, sizes = run.model, run.sizes
    weights = parameter_count(model) * BYTES_OF[sizes.dtype]
    if Release.of(run.release.name).needs_head(model):
        weights += model.vocab_size * model.hidden_size * BYTES_OF[sizes.dtype]
    cache = 0
    if sizes.use_past:
        cache = cache_bytes(model, sizes.dtype, sizes.batch, sizes.length)
    positions = sizes.batch * sizes.length
    scores = positions * sizes.length * model.num_heads
    logits = positions * model.vocab_size
    return Memory(
        weights // ranks,
        cache // ranks,
        process=PROCESS + LAYER * model.num_layers,
        loading=2 * weights,
        work=4 * (2 * scores + 2 * logits),
    )
