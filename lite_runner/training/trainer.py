"""The training loop: batches in their order, gradients in threads, checkpoints, metrics."""

from __future__ import annotations

import ctypes
import json
import math
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lite_runner.errors import ArtifactError, NonFiniteError
from lite_runner.records import dataclass
from lite_runner.system.processor import cores
from lite_runner.training.adapter import in_memory
from lite_runner.training.network import Dropout, Example, TrainedNetwork
from lite_runner.training.optimizer import AdamW, clipped, rate
from lite_runner.training.options import FinetuneOptions
from lite_runner.training.tape import Array
from lite_runner.weights.formats.safetensors_file import (
    metadata_of,
    open_safetensors,
    write_safetensors,
)

CHECKPOINT = "checkpoint.safetensors"
CHUNK = 256  # tokens of whole texts that a thread computes at a time; a longer text is one alone
_KINDS = ("trained", "first", "second")


@dataclass(frozen=True)
class StepMetrics:
    """A line of metrics.jsonl."""

    step: int  # from 1
    loss: float  # mean cross entropy of the step's targets, before the update
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int  # of the step's examples
    seconds: float

    def line(self) -> str:
        """As JSON."""
        return json.dumps(vars(self)) + "\n"


def step_count(options: FinetuneOptions, examples: int) -> int:
    """The steps of a training."""
    if options.steps is not None:
        return options.steps
    return max(1, math.ceil(options.epochs * examples / (options.batch_size * options.accumulate)))


class Trainer:
    """A training that may be stopped after each step."""

    def __init__(
        self,
        network: TrainedNetwork,
        texts: Sequence[Example],
        options: FinetuneOptions,
        *,
        seed: int,
        threads: int | None = None,
        identity: str = "",
    ) -> None:
        """Changes the arrays that the network trains. `identity`: what a checkpoint must be of to
        be resumed."""
        self.network, self.texts, self.options = network, texts, options
        self.seed, self.identity = seed, identity
        self.threads = threads or cores()
        self.optimizer = AdamW(network.trained, options.weight_decay)
        self.steps = step_count(options, len(texts))
        self.done = 0  # steps

    def run(self) -> Generator[StepMetrics, None, None]:
        """The steps that are left; each is complete when it is yielded."""
        # A full gradient a thread would take as much memory as the model: BLAS has the threads.
        workers = 1 if self.options.full else self.threads
        with blas_threads(self.threads // workers), ThreadPoolExecutor(workers) as pool:
            while self.done < self.steps:
                yield self._step(pool)

    def _step(self, pool: ThreadPoolExecutor) -> StepMetrics:
        began = time.perf_counter()
        options, step = self.options, self.done
        size = options.batch_size * options.accumulate
        numbers = range(step * size, (step + 1) * size)
        texts = [self.texts[self.example(number)] for number in numbers]
        count = sum(text.targets for text in texts)

        def work(chunk: Sequence[int]) -> tuple[float, dict[str, Array]]:
            dropout = self._dropout([(numbers[i], len(texts[i].ids)) for i in chunk])
            return self.network.gradients([texts[i] for i in chunk], 1 / count, dropout)

        loss, gradients = 0.0, dict[str, Array]()
        # In the order of the chunks: the sum is the same however many threads there are.
        for found, some in pool.map(work, _chunks(texts, CHUNK)):
            loss += found
            _add(gradients, some)
        norm = clipped(gradients, options.clip)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise NonFiniteError(
                f"step {step + 1}: the loss is {loss / count:g}, its gradients' norm {norm:g}",
                "a lower finetune.learning_rate=, or finetune.clip=1",
            )
        speed = rate(
            options.schedule, options.learning_rate, step, self.steps, options.warmup_steps
        )
        self.optimizer.step(gradients, speed)
        self.done += 1
        tokens = sum(len(text.ids) for text in texts)
        return StepMetrics(
            self.done, loss / count, norm, speed, tokens, time.perf_counter() - began
        )

    def example(self, number: int) -> int:
        """The index of the example that comes as the `number`-th, in one epoch after another."""
        epoch, place = divmod(number, len(self.texts))
        if not self.options.shuffle:
            return place
        if self._order[0] != epoch:
            generator = np.random.default_rng((self.seed, epoch))
            self._order = epoch, generator.permutation(len(self.texts))
        return int(self._order[1][place])

    _order: tuple[int, Any] = (-1, None)  # the epoch's

    def _dropout(self, examples: Sequence[tuple[int, int]]) -> Dropout | None:
        """Factors by the number and length of each example: the same whatever computes it when."""
        share = self.options.lora.dropout
        if not share or self.options.full:
            return None
        names = {name: place for place, name in enumerate(self.network.trained)}

        def factors(name: str, width: int) -> Array:
            parts = []
            for number, length in examples:
                generator = np.random.default_rng((self.seed, number, names[name]))
                kept = generator.random((length, width), np.float32) >= share
                parts.append(kept * np.float32(1 / (1 - share)))
            return np.concatenate(parts)

        return factors

    def save(self, path: Path) -> None:
        """Write all that a resumed training needs, atomically. Raises EnvironmentFault."""
        tensors = {
            f"{kind}.{name}": in_memory(array)
            for kind, arrays in zip(_KINDS, self._arrays(), strict=True)
            for name, array in arrays.items()
        }
        write_safetensors(path, tensors, {"step": str(self.done), "identity": self.identity})

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint. Raises ArtifactError for one of another training."""
        metadata, tensors = metadata_of(path), open_safetensors(path)
        expected = {
            f"{kind}.{name}": array
            for kind, arrays in zip(_KINDS, self._arrays(), strict=True)
            for name, array in arrays.items()
        }
        shapes = {name: array.shape for name, array in expected.items()}
        same = {name: tensor.shape for name, tensor in tensors.items()} == shapes
        if not same or metadata.get("identity") != self.identity:
            raise ArtifactError(
                f"{path}: a checkpoint of another model, data or settings",
                "the keys of the run that wrote it (all but finetune.steps may be seen in its"
                " config.yaml), or finetune.resume=false overwrite=true to begin anew",
            )
        for name, array in expected.items():
            array[...] = tensors[name].float32()
        self.done = self.optimizer.steps = int(metadata["step"])

    def _arrays(self) -> tuple[Mapping[str, Array], ...]:
        return self.network.trained, self.optimizer.first, self.optimizer.second


def _chunks(texts: Sequence[Example], size: int) -> Iterator[list[int]]:
    """Indices of texts that are computed together."""
    chunk: list[int] = []
    total = 0
    for index, text in enumerate(texts):
        if chunk and total + len(text.ids) > size:
            yield chunk
            chunk, total = [], 0
        chunk.append(index)
        total += len(text.ids)
    yield chunk


def _add(total: dict[str, Array], gradients: Mapping[str, Array]) -> None:
    for name, gradient in gradients.items():
        if name in total:
            total[name] += gradient
        else:
            total[name] = gradient


@contextmanager
def blas_threads(count: int) -> Iterator[None]:
    """Products of NumPy's OpenBLAS take so many threads; does nothing with another library."""
    found = _openblas()
    if found is None:
        yield
        return
    get, put = found
    before = get()
    put(count)
    try:
        yield
    finally:
        put(before)


def _openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """The functions that read and set the number of its threads."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for path in sorted(set(re.findall(r"/\S*openblas\S*\.so\S*", maps))):
        library = ctypes.CDLL(path)
        for start in ("scipy_openblas", "openblas"):
            for end in ("64_", ""):
                get = getattr(library, f"{start}_get_num_threads{end}", None)
                put = getattr(library, f"{start}_set_num_threads{end}", None)
                if get is not None and put is not None:
                    return get, put
    return None
