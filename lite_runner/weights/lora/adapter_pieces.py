"""One rank's pieces of an adapter, cut as the layers are that it changes.

Where a layer is cut along its outputs, B is, and A is whole; where it is cut along its inputs, A is
cut and B whole, and what they make is summed with the layer's own. The embedding's adapter is whole
on every rank: it is added behind the sum of the ranks' parts.
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
    """What `ranks` holds of a whole adapter of `model`."""
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
    """Canonical name -> in and out of a rank's piece of every weight that an adapter may change."""
    how = _cuts(model, ranks, vocab_parallel)
    return {
        site.weight: (
            site.width_in // how[site.weight][0].parts,
            site.width_out // how[site.weight][1].parts,
        )
        for site in sites(model)
    }


def _cuts(model: Decoder, ranks: Ranks, vocab_parallel: bool) -> dict[str, tuple[Cut, Cut]]:
    """How A [r, in] and B [out, r] of each weight are cut."""
    weights = cuts(model, ranks.tensor, vocab_parallel=vocab_parallel)
    # A tied head is cut as the embedding is, though an adapter knows it by a name of its own.
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
