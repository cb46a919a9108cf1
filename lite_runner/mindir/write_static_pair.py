"""The static pair: a prefill and an increment graph with the inputs of MindFormers' decoders; or
the prefill graph alone, without a cache.

Shapes: b rows, s maximum positions per row, V vocabulary. Row i of a batch is slot i of a KV cache
in the graphs' Parameters, which have the same names in both graphs.
"""

from __future__ import annotations

import contextlib
import filecmp
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ConfigError
from lite_runner.mindir.graph_inputs import COMMON, LLAMA, inputs_style, specs_of
from lite_runner.mindir.manifest import Graph, GraphName, TensorSpec
from lite_runner.mindir.writer import check_length, write_mindir
from lite_runner.networks.decoder import network_of
from lite_runner.networks.layers import BuildOptions, CacheSize, Weights
from lite_runner.networks.tensor_parallel import TensorParallel


def stems_of(model_name: str, *, alone: bool = False) -> dict[GraphName, str]:
    """MindFormers' names of a pair, or of a full graph `alone`, without `_graph.mindir`."""
    if alone:
        return {"model": model_name}
    return {"prefill": f"{model_name}_prefill", "increment": f"{model_name}_inc"}


# MindFormers' names of the first rank's graphs that run_mode=export writes.
RANK_STEMS: dict[GraphName, str] = {
    "model": "mindir_full_checkpoint/rank_0",
    "prefill": "mindir_full_checkpoint/rank_0",
    "increment": "mindir_inc_checkpoint/rank_0",
}


def stem_of_rank(stem: str, rank: int) -> str:
    """The stem of a rank's graph, from the first rank's, with or without rank_0."""
    base = stem.removesuffix("rank_0")
    return f"{base}rank_{rank}" if base != stem else f"{stem}_rank_{rank}"


Output: TypeAlias = Tensor | tuple[Tensor, Tensor]  # [b, V], or [b, 1] and [b, 1]


class _StaticStep(nn.Cell):
    """Base of the four graphs."""

    def __init__(self, network: nn.Cell, batch_size: int, sampled: bool) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.sampled = sampled
        self.start = Tensor(np.zeros(batch_size, np.int32))
        self.slots = Tensor(np.arange(batch_size, dtype=np.int32))
        self.gather, self.scatter = ops.Gather(), ops.ScatterNd()
        self.argmax = ops.Argmax(-1, ms.int32)
        self.ones = Tensor(np.ones((batch_size, 1), np.float32))

    def output(self, logits: Tensor) -> Output:
        """Logits [b, V]; or ones [b, 1] and the argmax tokens [b, 1]: MindFormers' infer samples
        from the tokens in the second output with the probabilities in the first."""
        if self.sampled:
            return self.ones, self.argmax(logits).reshape(-1, 1)
        return logits


class GPTPrefill(_StaticStep):
    """BLOOM and GPT-2: whole prompts, from position 0."""

    def construct(
        self, input_ids: Tensor, current_index: Tensor, init_reset: Tensor, valid_length: Tensor
    ) -> Output:
        return self.output(self.network(input_ids, self.start, valid_length, self.slots))


class GPTIncrement(_StaticStep):
    """BLOOM and GPT-2: one token per row."""

    def construct(
        self, input_ids: Tensor, current_index: Tensor, init_reset: Tensor, valid_length: Tensor
    ) -> Output:
        return self.output(self.network(input_ids, valid_length - 1, valid_length, None))


class LlamaPrefill(_StaticStep):
    """Llama: whole prompts, from position 0; batch_index: the slot of each row."""

    def construct(
        self, input_ids: Tensor, valid_length: Tensor, batch_index: Tensor, zactivate_len: Tensor
    ) -> Output:
        slots = batch_index.astype(ms.int32)
        return self.output(self.network(input_ids, self.start, valid_length, slots))


class LlamaIncrement(_StaticStep):
    """Llama: one token per row; batch_index: the slot of each row."""

    def construct(
        self, input_ids: Tensor, valid_length: Tensor, batch_index: Tensor, zactivate_len: Tensor
    ) -> Output:
        # Rows are permuted into slot order, which is cheaper than gathering the cache.
        slots = batch_index.astype(ms.int32)
        rows = self.scatter(slots.reshape(-1, 1), self.slots, self.slots.shape)
        length = self.gather(valid_length, rows, 0)
        logits = self.network(self.gather(input_ids, rows, 0), length - 1, length, None)
        return self.output(self.gather(logits, slots, 0))


Steps = Mapping[GraphName, Callable[[nn.Cell, int, bool], nn.Cell]]

# By input names; each is called with the network, the batch size and `sampled`.
STEPS: dict[tuple[str, ...], Steps] = {
    COMMON.names: {"prefill": GPTPrefill, "increment": GPTIncrement},
    LLAMA.names: {"prefill": LlamaPrefill, "increment": LlamaIncrement},
}


def export_static_pair(
    model: Decoder,
    weights: Weights,
    folder: Path,
    stems: Mapping[GraphName, str],
    *,
    batch_size: int,
    seq_length: int,
    dtype: str,
    enc_key: bytes | None,
    sampled: bool,
    stored: str | None = None,
    parallel: TensorParallel | None = None,
) -> dict[GraphName, Graph]:
    """Write `<stem>_graph.mindir` for each, above 1 GB with `<stem>_variables/` beside it; a stem
    may include a folder, and {"model": stem} is a full graph. With `parallel` these are one rank's
    graphs, from its `weights`.

    Output: logits [b, V] after each row's last valid token; with `sampled` ones [b, 1] and argmax
    tokens [b, 1] int32, as MindFormers 1.0's bloom.py returns. A row with valid_length 0 in a
    prefill, or seq_length in an increment, only writes the last position of its slot, which is
    never read before it is written. Matrices are held in `stored` where it is not `dtype`, in which
    they are computed with. Raises ConfigError if `seq_length` exceeds the model's, or the
    model's inputs have no steps.
    """
    check_length(model, seq_length)
    style = inputs_style(model)
    if style.names not in STEPS:
        raise ConfigError(
            f"{model.architecture}: registered without the steps of its graphs, which a pair needs",
            "give steps to lite_runner.register_inputs, or run it with backend=ms",
        )
    cache = None if "model" in stems else CacheSize(batch_size, seq_length)
    held = None if stored is None else getattr(ms, stored)
    build = BuildOptions(cache, getattr(ms, dtype), parallel, stored=held)
    mine = model if parallel is None else model.shard(parallel.ranks.tensor)
    network = network_of(mine, weights, build)
    graphs: dict[GraphName, Graph] = {}
    for graph, stem in stems.items():
        kind: GraphName = "prefill" if graph == "model" else graph
        step = STEPS[style.names][kind](network, batch_size, sampled)
        specs = specs_of(style, kind, batch_size, seq_length)
        inputs = [Tensor(np.zeros(spec.shape, spec.dtype)) for spec in specs]
        target = folder / stem
        target.parent.mkdir(exist_ok=True)
        file = target.with_name(write_mindir(step, inputs, target.parent, target.name, enc_key))
        outputs = _outputs(batch_size, model.vocab_size, sampled)
        graphs[graph] = Graph(file.relative_to(folder).as_posix(), specs, outputs)
    _share_variables([folder / f"{stem}_variables" for stem in stems.values()])
    return graphs


def _share_variables(folders: Sequence[Path]) -> None:
    """Let the graphs of a pair have one copy of their weights on disk: the same bytes, by name in
    each graph's own folder, where MindSpore looks for them."""
    first, *others = folders
    for other in others if first.is_dir() else ():
        for path in first.iterdir():
            same = other / path.name
            if same.is_file() and filecmp.cmp(path, same, shallow=False):
                linked = same.with_name(f"{same.name}.link")
                with contextlib.suppress(OSError):  # a disk without links
                    linked.hardlink_to(path)
                    linked.replace(same)


def _outputs(batch: int, vocab: int, sampled: bool) -> tuple[TensorSpec, ...]:
    if sampled:
        ones = TensorSpec("probabilities", (batch, 1), "float32")
        return ones, TensorSpec("tokens", (batch, 1), "int32")
    return (TensorSpec("logits", (batch, vocab), "float32"),)
