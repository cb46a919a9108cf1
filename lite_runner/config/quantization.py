"""Quantized weights: which matrices of a model become integers, and how fine."""

from __future__ import annotations

from typing import Literal

from lite_runner.records import dataclass

Quant = Literal["none", "a16w8", "a16w4", "a8w8", "a8"]
QuantGroup = Literal[32, 64, 128]
# file: GGUF's blocks as they are, where the native operators compute; quant=null on such a file.
# a8: the same, with inputs of 8 bits.
Held = Literal[Quant, "file"]
CacheType = Literal["fp32", "fp16", "int8"]  # of keys and values; int8: a scale a head and token
DEFAULT_GROUP = 32  # of 4 bits, where quant_group is null: as the blocks of GGUF files


@dataclass(frozen=True)
class Scheme:
    """How a matrix [rows, columns] is held as integers."""

    bits: int  # 8 or 4
    group: int  # columns that share a scale; 0: the whole row

    def nbytes(self, rows: int, columns: int) -> int:
        """What the integers and their scales take, in bytes."""
        count = rows * columns
        if self.bits == 4:
            return count // 2 + 4 * (count // self.group)  # a scale and a minimum, float16 each
        return count + (2 * (count // self.group) if self.group else 4 * rows)

    def __str__(self) -> str:
        return f"{self.bits} bits, " + (f"groups of {self.group}" if self.group else "by row")


@dataclass(frozen=True)
class Quantization:
    """What a run asks for, or a checkpoint holds."""

    quant: Held = "none"
    group: int = 0  # columns of a group of 4 bits; 0 with 8 bits and none

    @classmethod
    def of(cls, quant: Quant | None, group: QuantGroup | None) -> Quantization:
        """The settings `quant` and `quant_group`, null included."""
        if quant is None or quant == "none":
            return cls()
        return cls(quant, (group or DEFAULT_GROUP) if quant == "a16w4" else 0)

    @property
    def rounds(self) -> bool:
        """Whether matrices become integers of the bits that were asked for."""
        return self.quant in ("a16w8", "a16w4", "a8w8")

    @property
    def keeps_blocks(self) -> bool:
        """Whether GGUF's blocks stay as they are."""
        return self.quant in ("file", "a8")

    @property
    def rounds_inputs(self) -> bool:
        """Whether what multiplies integers of 8 bits, or blocks, is rounded to 8 bits too."""
        return self.quant in ("a8w8", "a8")

    @property
    def linear(self) -> Scheme | None:
        """Of the linear layers of the blocks; None: they stay floats."""
        if not self.rounds:
            return None
        return Scheme(4, self.group) if self.quant == "a16w4" else Scheme(8, 0)

    @property
    def table(self) -> Scheme | None:
        """Of the embedding and the head. Four bits would cost them more than the layers."""
        if not self.rounds:
            return None
        return Scheme(8, 32) if self.quant == "a16w4" else Scheme(8, 0)

    @property
    def same_weights(self) -> tuple[Scheme | None, Scheme | None]:
        """Equal where the weights are: a16w8 and a8w8 differ in the activations alone."""
        return self.linear, self.table

    def __str__(self) -> str:
        return f"{self.quant} quant_group={self.group}" if self.group else self.quant
