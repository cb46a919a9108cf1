"""The weights of a model as MindSpore's Parameters, for scripts that read or load them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
from mindspore import Parameter, Tensor

from lite_runner.weights.tensor import LazyTensor


class Parameters:
    """A Parameter for each tensor of the checkpoint, in float32, under MindFormers' names.

    A second copy of the weights: it is made only where a script asks for one.
    """

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        self.by_name = {
            name: Parameter(Tensor(tensor.float32()), name=name) for name, tensor in tensors.items()
        }
        self._as_read = self._checksums()

    def written(self) -> tuple[int, ...]:
        """Checksums of the values, () where no script has written to them.

        Every byte is read, since a Parameter can be written to in many ways.
        """
        now = self._checksums()
        return () if now == self._as_read else now

    def _checksums(self) -> tuple[int, ...]:
        return tuple(
            zlib.crc32(np.ascontiguousarray(one.asnumpy()).data) for one in self.by_name.values()
        )

    def tensors(self) -> dict[str, LazyTensor]:
        """The values as they are now."""
        return {name: _lazy(one) for name, one in self.by_name.items()}


def _lazy(parameter: Parameter) -> LazyTensor:
    return LazyTensor(
        tuple(parameter.shape), "F32", lambda: np.ascontiguousarray(parameter.asnumpy())
    )
