"""One rank's shards of an adapter, split as its target layers are.

For a column-parallel layer B is split and A replicated; for a row-parallel layer A is split and B
replicated, and the product joins the layer's all-reduce. The embedding's adapter is replicated: it
is added after the all-reduce.
"""

from __future__ import annotations

from dataclasses import replace

from lite_runner.architectures.spec import Decoder
from lite_runner.config.ranks import Ranks
from lite_runner.weights.lora.adapter import Adapter, LoraPair
from lite_runner.weights.lora.target_modules import HEAD, sites
from lite_runner.weights.sharding.partition import Cut, cuts
from lite_runner.weights.sharding.pieces import sliced


def adapter_pieces(
    adapter: Adapter, model: Decoder, ranks: Ranks, *, vocab_parallel: bool
) -> Adapter:
    """The shards that `ranks` holds of a full adapter of `model`."""
    if ranks.tensor == 1:
        return adapter
    how = _cuts(model, ranks, vocab_parallel)

    def piece(name: str, pair: LoraPair) -> LoraPair:
        of_a, of_b = how[name]
        a = sliced(pair.a, of_a.bounds(pair.a.shape, ranks))
        return LoraPair(a, sliced(pair.b, of_b.bounds(pair.b.shape, ranks)), pair.scale)

    return replace(adapter, pairs={name: piece(name, pair) for name, pair in adapter.pairs.items()})


def piece_shapes(
    model: Decoder, ranks: Ranks, *, vocab_parallel: bool
) -> dict[str, tuple[int, int]]:
    """Canonical name -> (in, out) of a rank's shard of every possible target weight."""
    how = _cuts(model, ranks, vocab_parallel)
    return {
        site.weight: (
            site.width_in // how[site.weight][0].parts,
            site.width_out // how[site.weight][1].parts,
        )
        for site in sites(model)
    }


def _cuts(model: Decoder, ranks: Ranks, vocab_parallel: bool) -> dict[str, tuple[Cut, Cut]]:
    """How A [r, in] and B [out, r] of each weight are sharded."""
    weights = cuts(model, ranks.tensor, vocab_parallel=vocab_parallel)
    # A tied head is sharded as the embedding; adapters have a name of its own for it.
    weights.setdefault(f"{HEAD}.weight", Cut(0, ranks.tensor) if vocab_parallel else Cut())
    found = {}
    for site in sites(model):
        cut = weights[site.weight]
        if cut.axis is None or site.is_embedding:
            found[site.weight] = (Cut(), Cut())
        elif (cut.axis == 0) != site.transposed:  # along the outputs
            found[site.weight] = (Cut(), Cut(0, cut.parts))
        else:
            found[site.weight] = (Cut(1, cut.parts), Cut())
    return found
