"""Quantized weights: which matrices of a model become integers, and how fine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.records import dataclass

# a8, a16: quantized weights as their file has them, their inputs rounded to 8 or 16 bits, where the
# native operators compute. quant=null means a8 of a GGUF file, and a16 of a folder of other tools.
Quant = Literal["none", "a16w8", "a16w4", "a8w8", "a8", "a16"]
QuantGroup = Literal[32, 64, 128]
OF_BLOCKS: tuple[Quant, ...] = ("a8", "a16")
CacheType = Literal["fp32", "fp16", "int8"]  # of keys and values; int8: a scale a head and token
DEFAULT_GROUP = 32  # of 4 bits, where quant_group is null: as the blocks of GGUF files


def is_narrow(cache: CacheType | None) -> bool:
    """True if a KV cache is to be narrower than float32: only backend=native has that."""
    return cache not in (None, "fp32")


@dataclass(frozen=True)
class Scheme:
    """The integer format of a matrix [rows, columns]."""

    bits: int  # 8 or 4
    group: int  # columns that share a scale; 0: the whole row
    # Of a layout of other tools: bytes of a group's scale and zero point; 0: our own.
    group_bytes: int = 0

    def nbytes(self, rows: int, columns: int) -> int:
        """The size of the integers and their scales, in bytes."""
        count = rows * columns
        if self.group_bytes:
            groups = rows * (columns // self.group if self.group else 1)
            return count * self.bits // 8 + groups * self.group_bytes
        if self.bits == 4:
            return count // 2 + 4 * (count // self.group)  # a scale and a minimum, float16 each
        return count + (2 * (count // self.group) if self.group else 4 * rows)

    def __str__(self) -> str:
        return f"{self.bits} bits, " + (f"groups of {self.group}" if self.group else "by row")


@dataclass(frozen=True)
class Quantization:
    """The quantization of a run or of a checkpoint."""

    quant: Quant = "none"
    group: int = 0  # columns of a group of 4 bits; 0 with 8 bits and none
    kept: tuple[str, ...] = ()  # parts of the names of modules whose matrices stay floats
    finer: tuple[str, ...] = ()  # linear layers that have 8 bits in place of 4, by canonical name

    @classmethod
    def of(
        cls, quant: Quant | None, group: QuantGroup | None, kept: str | Sequence[str] | None = None
    ) -> Quantization:
        """The settings `quant`, `quant_group` and `modules_to_not_convert`, null included."""
        if quant is None or quant == "none":
            return cls()
        names = (kept,) if isinstance(kept, str) else tuple(kept or ())
        return cls(quant, (group or DEFAULT_GROUP) if quant == "a16w4" else 0, names)

    @property
    def rounds(self) -> bool:
        """True if matrices become integers of the bits that were asked for."""
        return self.quant in ("a16w8", "a16w4", "a8w8")

    @property
    def keeps_blocks(self) -> bool:
        """True if the quantized weights of a file stay as they are."""
        return self.quant in OF_BLOCKS

    @property
    def rounds_inputs(self) -> bool:
        """True if what multiplies integers of 8 bits, or blocks, is rounded to 8 bits too."""
        return self.quant in ("a8w8", "a8")

    @property
    def linear(self) -> Scheme | None:
        """The format of linear layers; None: they stay floats."""
        if not self.rounds:
            return None
        return Scheme(4, self.group) if self.quant == "a16w4" else Scheme(8, 0)

    @property
    def table(self) -> Scheme | None:
        """The format of the embedding and the head; four bits cost them more than the layers."""
        if not self.rounds:
            return None
        return Scheme(8, 32) if self.quant == "a16w4" else Scheme(8, 0)

    @property
    def same_weights(self) -> tuple[Scheme | None, Scheme | None, frozenset[str]]:
        """Equal where the weights are: a16w8 and a8w8 differ in the activations alone."""
        return self.linear, self.table, frozenset(self.kept)

    def __str__(self) -> str:
        group = f" quant_group={self.group}" if self.group else ""
        kept = f" modules_to_not_convert=[{','.join(self.kept)}]" if self.kept else ""
        finer = f" and {len(self.finer)} matrices of 8 bits" if self.finer else ""
        return f"{self.quant}{group}{kept}{finer}"


def schemes(model: Decoder, quantization: Quantization) -> dict[str, Scheme]:
    """Canonical name -> scheme of the matrices that are quantized.

    These are the linear layers, the embedding and the head; norms, biases and tables of positions
    stay float32, and so does what `kept` names.
    """
    table = parameters(model)
    ends = {table[0].name, "lm_head.weight"}
    finer = ends.union(quantization.finer)
    wanted = {
        one.name: quantization.table if one.name in finer else quantization.linear
        for one in table
        if one.name in ends or one.is_linear
    }
    kept = {name for part in quantization.kept for name in matrices_of(part, model, wanted)}
    return {
        name: scheme for name, scheme in wanted.items() if scheme is not None and name not in kept
    }


def matrices_of(part: str, model: Decoder, matrices: Iterable[str]) -> list[str]:
    """The `matrices` with this part in the name of their module, as in MindSpore Golden Stick;
    lm_head is the embedding too, where that is the head."""
    shared = parameters(model)[0].name if model.tie_word_embeddings else ""
    modules = {name: name.removesuffix(".weight") for name in matrices}
    return [
        name
        for name, module in modules.items()
        if part in module or (name == shared and part in "lm_head")
    ]
