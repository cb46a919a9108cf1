"""How the tensors of a model are cut for tensor parallel, by MindFormers' names.

A column-parallel layer (q, k, v, gate, up) is cut along its outputs, the row-parallel one behind it
(the output projection, down) along its inputs; what follows an all-reduce is whole on every rank.
The embedding and the head are cut along the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from lite_runner.config.model import ModelConfig
from lite_runner.config.ranks import Ranks
from lite_runner.weights.layouts import expected_tensors

_BY_OUTPUT = ("wq", "w1", "w3", "dense1")  # [out, in], and their biases
_BY_KEY_HEADS = ("wk", "wv", "dense2", "dense3")
_BY_INPUT_OUT_IN = ("wo", "w2")  # [out, in]
_BY_VOCABULARY = ("tok_embeddings", "word_embedding", "lm_head")


@dataclass(frozen=True)
class Cut:
    """Equal pieces of a tensor along an axis; `axis` None: whole on every rank.

    Where a model has fewer key/value heads than ranks there are fewer `parts` than ranks, and
    neighbouring ranks hold the same piece.
    """

    axis: int | None = None
    parts: int = 1

    def piece(self, ranks: Ranks) -> int:
        """Which of the pieces a rank holds."""
        return ranks.tensor_index * self.parts // ranks.tensor

    def bounds(self, shape: tuple[int, ...], ranks: Ranks) -> tuple[slice, ...]:
        """The rank's piece of a whole tensor of `shape`, as an index."""
        if self.axis is None:
            return (slice(None),) * len(shape)
        step = shape[self.axis] // self.parts
        start = self.piece(ranks) * step
        whole = [slice(None)] * len(shape)
        whole[self.axis] = slice(start, start + step)
        return tuple(whole)


def cuts(model: ModelConfig, tensor: int, *, vocab_parallel: bool = True) -> dict[str, Cut]:
    """Name -> cut of every tensor of the model, for `tensor` ranks that share a copy of it."""
    return {
        name: _cut(name, len(shape), model, tensor, vocab_parallel)
        for name, shape in expected_tensors(model).items()
    }


def _cut(name: str, axes: int, model: ModelConfig, tensor: int, vocab_parallel: bool) -> Cut:
    *_, layer, _kind = name.split(".")
    if layer in _BY_VOCABULARY:
        return Cut(0, tensor) if vocab_parallel else Cut()
    if layer in _BY_OUTPUT:
        return Cut(0, tensor)
    if layer in _BY_KEY_HEADS:
        return Cut(0, min(tensor, model.n_kv_heads))
    if layer in _BY_INPUT_OUT_IN:
        return Cut(1, tensor)
    if layer == "mapping":  # [in, out], and its bias [out]
        return Cut(axes - 1, tensor)
    if layer == "projection" and axes == 2:  # [in, out]; the bias is added once, when all is summed
        return Cut(0, tensor)
    return Cut()
