"""A mixture of experts of MindSpore's operators.

Every expert computes every token, and what a token did not choose counts nothing: the layer is one
feed-forward network as wide as all experts together, with a mask. Graphs stay small and their
shapes fixed; the native operators read only the chosen experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from lite_runner.architectures.spec import FeedForward
from lite_runner.networks.layers import Array, BuildOptions, Linear, activation_of
from lite_runner.networks.tensor_parallel import Combine


class Mixture(nn.Cell):
    """Router and experts, E of them of width W; a rank's shard has a part of each one's width."""

    def __init__(
        self,
        options: BuildOptions,
        given: FeedForward,
        router: Array,
        gates: Sequence[Array],
        ups: Sequence[Array],
        downs: Sequence[Array],
        combine: Combine | None,
    ) -> None:
        """`router` [E, hidden], `gates` and `ups` [W, hidden], `downs` [hidden, W]."""
        super().__init__()
        experts = given.experts
        assert experts is not None
        self.activation = activation_of(given.function)
        self.chosen, self.renormalized = experts.chosen, experts.renormalized
        self.count = experts.count
        self.router = Linear(options, router)
        self.gate = Linear(options, np.concatenate(gates))
        self.up = Linear(options, np.concatenate(ups))
        self.down = Linear(options, np.concatenate(downs, axis=1), combine=combine)
        self.softmax, self.top = ops.Softmax(-1), ops.TopK(sorted=True)
        self.one_hot, self.sum = ops.OneHot(), ops.ReduceSum(keep_dims=True)
        self.matmul = ops.BatchMatMul()
        self.one, self.zero = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)

    def construct(self, x: Tensor) -> Tensor:
        """x [n, hidden] -> [n, hidden]."""
        factors, chosen = self.top(self.softmax(self.router(x)), self.chosen)
        if self.renormalized:
            factors = factors / self.sum(factors, -1)
        places = self.one_hot(chosen, self.count, self.one, self.zero)  # [n, chosen, E]
        factors = self.matmul(factors.reshape(-1, 1, self.chosen), places)
        inner = self.activation(self.gate(x)) * self.up(x)
        inner = inner.reshape(-1, self.count, self.up.widths[1] // self.count)
        inner = inner * factors.reshape(-1, self.count, 1)
        return self.down(inner.reshape(-1, self.down.widths[0]))
