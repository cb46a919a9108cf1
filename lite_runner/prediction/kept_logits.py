"""The logits of a run on disk, to compare those of two backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class KeptLogits:
    """Logits of each step of each text, float32, in the files of a folder."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """`folder` is made where it is missing."""
        self.folder, self._vocab_size = folder, vocab_size
        folder.mkdir(exist_ok=True)

    def add(
        self,
        prompt: int,
        part: int,
        logits: NDArray[np.float32],
        scores: NDArray[np.floating[Any]],
    ) -> None:
        """Append the `logits` [vocab] of a step of text `part` of a prompt: see OnLogits."""
        with self._path(prompt, part).open("ab") as file:
            file.write(np.ascontiguousarray(logits, np.float32).tobytes())

    def steps(self, prompt: int, part: int) -> NDArray[np.float32]:
        """Logits [steps, vocab] of a text, a view of the file; no steps where none were kept."""
        path = self._path(prompt, part)
        if not path.is_file():
            return np.zeros((0, self._vocab_size), np.float32)
        return np.memmap(path, np.float32, "r").reshape(-1, self._vocab_size)

    def _path(self, prompt: int, part: int) -> Path:
        return self.folder / f"{prompt}-{part}.f32"
