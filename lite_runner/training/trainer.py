"""The training loop: batches in order, gradients in threads, AdamW, checkpoints, metrics.

AdamW, clipping and learning rates are as PyTorch and transformers compute them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault, NonFiniteError
from lite_runner.records import dataclass
from lite_runner.system.environment import cores
from lite_runner.system.memory import freed_blocks_kept
from lite_runner.training.adapter import in_memory
from lite_runner.training.kernels import Array, use_threads
from lite_runner.training.network import Dropout, Example, TrainedNetwork
from lite_runner.training.options import FinetuneOptions, Schedule
from lite_runner.training.shard import ModelShard
from lite_runner.weights import LazyTensor
from lite_runner.weights.formats.safetensors_file import (
    metadata_of,
    open_safetensors,
    write_safetensors,
)
from lite_runner.weights.sharding.partition import sliced

BETAS = (0.9, 0.999)
EPS = 1e-8


def rate(schedule: Schedule, base: float, step: int, steps: int, warmup: int) -> float:
    """The learning rate of a step, the first being 0."""
    if step < warmup:
        return base * step / warmup
    if schedule == "constant":
        return base
    share = (step - warmup) / max(1, steps - warmup)
    if schedule == "linear":
        return base * max(0.0, 1 - share)
    return base * max(0.0, 0.5 * (1 + math.cos(math.pi * share)))


def squares(arrays: Iterable[Array]) -> float:
    """The sum of squares of all values."""
    return sum(float(np.vdot(one, one)) for one in arrays)


def clipped(gradients: Mapping[str, Array], most: float, total: float | None = None) -> float:
    """The norm of all gradients together, which are scaled in place if it is above `most`; 0: they
    are not. `total`: their squares, with those of other ranks."""
    norm = math.sqrt(squares(gradients.values()) if total is None else total)
    if most and (factor := most / (norm + 1e-6)) < 1:
        for one in gradients.values():
            one *= np.float32(factor)
    return norm


class AdamW:
    """The optimizer, and its state."""

    def __init__(self, trained: Mapping[str, Array], weight_decay: float) -> None:
        """The arrays of `trained` are updated in place."""
        self.trained, self.weight_decay = trained, weight_decay
        self.steps = 0
        self.first = {name: np.zeros_like(array) for name, array in trained.items()}
        self.second = {name: np.zeros_like(array) for name, array in trained.items()}

    def step(self, gradients: Mapping[str, Array], learning_rate: float) -> None:
        """Update the trained arrays."""
        self.steps += 1
        small, large = BETAS
        size = learning_rate / (1 - small**self.steps)
        root = math.sqrt(1 - large**self.steps)
        for name, array in self.trained.items():
            grad = gradients.get(name, np.float32(0))  # 0 for an expert without tokens
            first, second = self.first[name], self.second[name]
            if array.ndim > 1:  # no decay of norms and biases, as in transformers and MindFormers
                array *= np.float32(1 - learning_rate * self.weight_decay)
            first += (grad - first) * np.float32(1 - small)
            second *= np.float32(large)
            second += np.float32(1 - large) * grad * grad
            divisor = np.sqrt(second)
            divisor /= np.float32(root)
            divisor += np.float32(EPS)
            array -= np.float32(size) * (first / divisor)


CHECKPOINT = "checkpoint.safetensors"
BUCKET = 1 << 24  # bytes of gradients exchanged at a time, or a single larger one
CHUNK = 256  # tokens of whole texts that a thread computes at a time; longer texts are alone
ALONE = Ranks()
_KINDS = ("trained", "first", "second")

Item = TypeVar("Item")
Gather = Callable[[bytes], list[bytes]]  # this rank's bytes -> those of all ranks, by rank


@dataclass(frozen=True)
class StepMetrics:
    """A line of metrics.jsonl."""

    step: int  # from 1
    loss: float  # mean cross entropy of the step's targets, before the update
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int  # of the step's examples
    seconds: float
    eval_loss: float | None = None  # mean of the targets to evaluate, after the update

    def line(self) -> str:
        """As JSON."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        return json.dumps(known) + "\n"


def step_size(options: FinetuneOptions, ranks: Ranks) -> int:
    """Examples per step, over all ranks."""
    return options.batch_size * options.accumulate * ranks.data


def step_count(options: FinetuneOptions, examples: int, ranks: Ranks) -> int:
    """The number of steps of a training. Raises ConfigError for a warm-up of more."""
    if options.steps is not None:
        return options.steps
    steps = max(1, math.ceil(options.epochs * examples / step_size(options, ranks)))
    if options.warmup_steps > steps:
        raise ConfigError(
            f"finetune.warmup_steps: got {options.warmup_steps}, expected at most {steps}, the"
            f" steps of finetune.epochs={options.epochs:g}",
            "a smaller finetune.warmup_steps=, or more finetune.epochs=",
        )
    return steps


class Trainer:
    """A training that can be stopped after each step."""

    def __init__(
        self,
        network: TrainedNetwork,
        packs: Sequence[Sequence[Example]],
        options: FinetuneOptions,
        *,
        evaluated: Sequence[Example] = (),
        seed: int,
        threads: int | None = None,
        identity: str = "",
        ranks: Ranks = ALONE,
        gather: Gather = lambda payload: [payload],
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Changes the arrays that the network trains. `packs`: the texts of each example;
        `evaluated`: those to evaluate on. `identity`: must match that of a checkpoint to be
        resumed; `gather`: between the `ranks`; `interrupted`: asked before each step, which is the
        last if it is true on one of them."""
        self.network, self.packs, self.options = network, packs, options
        self.evaluated = evaluated
        self.seed, self.identity = seed, identity
        self.ranks, self._gather, self._interrupted = ranks, gather, interrupted
        self._stops = False
        self.threads = threads or cores()
        self.optimizer = AdamW(network.trained, options.weight_decay)
        self.steps = step_count(options, len(packs), ranks)
        self.epoch_steps = max(1, len(packs) // step_size(options, ranks))
        self.eval_steps = options.eval_steps or self.epoch_steps
        self.best_loss, self.best_step = math.inf, 0  # of an evaluation
        self.done = self.began = 0  # steps, and those of a training that it resumes

    @property
    def stopped(self) -> bool:
        """True if a rank was interrupted before the last step."""
        return self._stops and self.done < self.steps and not self.gains_nothing

    @property
    def divided(self) -> bool:
        """True if each rank trains a part."""
        return self._parts is not None

    def run(self) -> Generator[StepMetrics, None, None]:
        """Run the remaining steps; each is complete when it is yielded."""
        # A full gradient per thread would take as much memory as the model: threads share products.
        # Ranks that share a model compute the same chunk at a time.
        workers = 1 if self.options.full or self.ranks.tensor > 1 else self.threads
        use_threads(self.threads // workers)
        with freed_blocks_kept(), ThreadPoolExecutor(workers) as pool:
            while self.done < self.steps and not self._stops and not self.gains_nothing:
                metrics = self._step(pool)
                last = self.done == self.steps
                if self.evaluated and (last or self.done % self.eval_steps == 0):
                    metrics = replace(metrics, eval_loss=self._evaluate(pool))
                yield metrics

    @property
    def gains_nothing(self) -> bool:
        """True where so many evaluations as finetune.early_stop have not found a lower loss."""
        patience = self.options.early_stop
        since = self.done - max(self.best_step, self.began)
        return patience is not None and since >= patience * self.eval_steps

    def _evaluate(self, pool: ThreadPoolExecutor) -> float:
        """The mean cross entropy of the texts to evaluate, of which each rank has its share."""
        own = self.evaluated[self.ranks.data_index :: self.ranks.data]
        parts = [[own[i] for i in chunk] for chunk in _chunks(own)] if own else []
        loss = sum(self._mapped(pool)(self.network.loss, parts))
        loss, _ = self._totals(loss, False)
        loss /= sum(text.targets for text in self.evaluated)
        if loss < self.best_loss:
            self.best_loss, self.best_step = loss, self.done
        return loss

    def _step(self, pool: ThreadPoolExecutor) -> StepMetrics:
        began = time.perf_counter()
        options, step = self.options, self.done
        size, interrupted = step_size(options, self.ranks), self._interrupted()
        numbers = range(step * size, (step + 1) * size)
        packs = [self.packs[self.example(number)] for number in numbers]
        count = sum(text.targets for pack in packs for text in pack)
        tokens = sum(len(text.ids) for pack in packs for text in pack)
        share = size // self.ranks.data
        first = self.ranks.data_index * share
        texts = [text for pack in packs[first : first + share] for text in pack]
        places = [
            (numbers[i], place)
            for i in range(first, first + share)
            for place in range(len(packs[i]))
        ]

        def work(chunk: Sequence[int]) -> tuple[float, dict[str, Array]]:
            dropout = self._dropout([(*places[i], len(texts[i].ids)) for i in chunk])
            return self.network.gradients([texts[i] for i in chunk], 1 / count, dropout)

        loss, gradients = 0.0, dict[str, Array]()
        # In the order of the chunks: the sum does not depend on the number of threads.
        for found, some in self._mapped(pool)(work, _chunks(texts)):
            loss += found
            _add(gradients, some)
        if self.ranks.size > 1:
            loss, self._stops = self._totals(loss, interrupted)
            self._add_up(gradients)
        norm = clipped(gradients, options.clip, self._squares(gradients))
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
        return StepMetrics(
            self.done, loss / count, norm, speed, tokens, time.perf_counter() - began
        )

    def _mapped(self, pool: ThreadPoolExecutor) -> Callable[..., Iterator[Any]]:
        """Ranks exchange values in the main thread alone."""
        return map if self.ranks.tensor > 1 else pool.map

    def _totals(self, loss: float, interrupted: bool) -> tuple[float, bool]:
        """The loss over all ranks, and whether one of them is interrupted."""
        totals = [
            np.frombuffer(one) for one in self._gather(np.array([loss, interrupted]).tobytes())
        ]
        once = totals[:: self.ranks.tensor]  # ranks that share a model report the same loss
        return float(sum(one[0] for one in once)), any(one[1] for one in totals)

    def _add_up(self, gradients: dict[str, Array]) -> None:
        """Put the sums of all ranks in place of this one's. They are added in the order of the
        ranks, so that all have the same bits."""
        for name, array in self.network.trained.items():  # an expert may have no tokens on a rank
            gradients[name] = np.ascontiguousarray(gradients.get(name, np.zeros_like(array)))
        shared = (
            (name, array.nbytes)
            for name, array in self.network.trained.items()
            if len(self._adding(name)) > 1
        )
        for names in _groups(shared, BUCKET):
            payload = b"".join(gradients[name].tobytes() for name in names)
            ends = np.cumsum([gradients[name].size for name in names])[:-1]
            gathered = [
                np.split(np.frombuffer(one, np.float32), ends) for one in self._gather(payload)
            ]
            for place, name in enumerate(names):
                first, *others = (gathered[rank][place] for rank in self._adding(name))
                total = first.copy()
                for other in others:
                    total += other
                gradients[name][...] = total.reshape(gradients[name].shape)

    def _adding(self, name: str) -> list[int]:
        """The ranks whose gradients of a tensor are summed."""
        ranks, shard = self.ranks, self._parts
        if shard is None:
            return list(range(ranks.size))
        own = shard.sharing(name)
        return [ranks.tensor * replica + one for replica in range(ranks.data) for one in own]

    @property
    def _parts(self) -> ModelShard | None:
        """The shard whose parts are trained; None: every rank has all that is trained."""
        return self.network.shard if self.options.full else None

    def _squares(self, gradients: Mapping[str, Array]) -> float | None:
        """Of all ranks' gradients, where each has some of its own; else None."""
        if (shard := self._parts) is None:
            return None
        own, same = list[Array](), list[Array]()
        for name, one in gradients.items():
            if not shard.divides(name):
                same.append(one)
            elif shard.owns(name):
                own.append(one)
        gathered = self._gather(np.array(squares(own)).tobytes())[: self.ranks.tensor]
        return squares(same) + sum(float(np.frombuffer(one)[0]) for one in gathered)

    def state(self, *, moments: bool = True) -> list[dict[str, Array]]:
        """Trained parameters, and with `moments` their first and second moments, all of them whole
        on rank 0. Ranks that train parts must call it together."""
        return [
            {name: self._whole(name, array) for name, array in arrays.items()}
            for arrays in self._arrays()[: None if moments else 1]
        ]

    def _whole(self, name: str, array: Array) -> Array:
        shard = self._parts
        if shard is None or not shard.divides(name):
            return array
        gathered = self._gather(np.ascontiguousarray(array).tobytes())[: self.ranks.tensor]
        if self.ranks.rank > 0:  # only the first rank writes
            return array
        parts = [np.frombuffer(one, np.float32).reshape(array.shape) for one in gathered]
        return shard.joined(name, parts)

    def check_same_step(self) -> None:
        """Raise EnvironmentFault where the ranks have not resumed the same checkpoint."""
        steps = [int(one) for one in self._gather(str(self.done).encode())]
        if len({*steps}) > 1:
            raise EnvironmentFault(
                f"the ranks have resumed after steps {steps}",
                "finetune_output= in a folder that all machines share",
            )

    def example(self, number: int) -> int:
        """The index of the example that comes as the `number`-th, in one epoch after another."""
        epoch, place = divmod(number, len(self.packs))
        if not self.options.shuffle:
            return place
        if self._order[0] != epoch:
            generator = np.random.default_rng((self.seed, epoch))
            self._order = epoch, generator.permutation(len(self.packs))
        return int(self._order[1][place])

    _order: tuple[int, Any] = (-1, None)  # the epoch's

    def _dropout(self, texts: Sequence[tuple[int, int, int]]) -> Dropout | None:
        """Factors by the example of each text, its place in it and its length: the same whatever
        computes it when."""
        share = self.options.lora.dropout
        if not share or self.options.full:
            return None
        names = {name: place for place, name in enumerate(self.network.trained)}

        def factors(name: str, width: int) -> Array:
            parts = []
            for number, place, length in texts:
                generator = np.random.default_rng((self.seed, number, place, names[name]))
                kept = generator.random((length, width), np.float32) >= share
                parts.append(kept * np.float32(1 / (1 - share)))
            return np.concatenate(parts)

        return factors

    def is_best(self, step: StepMetrics) -> bool:
        """True if its evaluation loss is the lowest so far."""
        return step.eval_loss is not None and self.best_step == step.step

    def is_saved(self, step: StepMetrics) -> bool:
        """True if a checkpoint is due after it."""
        every = self.options.save_steps
        return every is not None and step.step % every == 0 and step.step < self.steps

    def save(self, path: Path, state: Sequence[Mapping[str, Array]]) -> None:
        """Write the state for resuming, atomically. Raises EnvironmentFault."""
        tensors = {
            f"{kind}.{name}": in_memory(array)
            for kind, arrays in zip(_KINDS, state, strict=True)
            for name, array in arrays.items()
        }
        metadata = {"step": str(self.done), "identity": self.identity}
        metadata |= {"best_loss": repr(self.best_loss), "best_step": str(self.best_step)}
        write_safetensors(path, tensors, metadata)

    def resume(self, path: Path) -> None:
        """Resume from a checkpoint. Raises ArtifactError for one of another training, ConfigError
        for one of a later step than the last."""
        metadata, tensors = metadata_of(path), open_safetensors(path)
        expected = {
            f"{kind}.{name}": array
            for kind, arrays in zip(_KINDS, self._arrays(), strict=True)
            for name, array in arrays.items()
        }
        same = tensors.keys() == expected.keys() and all(
            self._part(name, tensors[name]).shape == array.shape for name, array in expected.items()
        )
        if not same or metadata.get("identity") != self.identity:
            raise ArtifactError(
                f"{path}: a checkpoint of another model, data or settings",
                "the keys of the run that wrote it (all but finetune.steps may be seen in its"
                " config.yaml), or finetune.resume=false overwrite=true to start over",
            )
        if (step := int(metadata["step"])) > self.steps:
            raise ConfigError(
                f"finetune.resume=true: {path} was saved after step {step}, got"
                f" finetune.steps={self.steps}",
                "a larger finetune.steps=, which counts those before too",
            )
        for name, array in expected.items():
            array[...] = self._part(name, tensors[name]).float32()
        self.done = self.optimizer.steps = step
        self.best_loss, self.best_step = float(metadata["best_loss"]), int(metadata["best_step"])

    def _part(self, name: str, whole: LazyTensor) -> LazyTensor:
        """This rank's trained part of a tensor of a checkpoint."""
        shard, weight = self._parts, name.partition(".")[2]
        if shard is None or not shard.divides(weight):
            return whole
        return sliced(whole, shard.bounds(weight))

    def resume_from(self, step: int, moments: Sequence[Mapping[str, LazyTensor]]) -> None:
        """Go on after a step of another training, with its moments."""
        shard = self._parts
        for own, found in zip(self._arrays()[1:], moments, strict=True):
            for name, array in own.items():
                whole = found[name]
                part = whole if shard is None else sliced(whole, shard.bounds(name))
                array[...] = part.float32()
        self.done = self.began = self.optimizer.steps = step

    def _arrays(self) -> tuple[Mapping[str, Array], ...]:
        return self.network.trained, self.optimizer.first, self.optimizer.second


def _chunks(texts: Sequence[Example]) -> Iterator[list[int]]:
    """Indices of texts computed together."""
    return _groups(((index, len(text.ids)) for index, text in enumerate(texts)), CHUNK)


def _groups(sizes: Iterable[tuple[Item, int]], most: int) -> Iterator[list[Item]]:
    """Consecutive items whose sizes are up to `most` together, or a single larger one."""
    group: list[Item] = []
    total = 0
    for item, size in sizes:
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    yield group


def _add(total: dict[str, Array], gradients: Mapping[str, Array]) -> None:
    for name, gradient in gradients.items():
        if name in total:
            total[name] += gradient
        else:
            total[name] = gradient
