"""MindRecord files of token ids, as MindFormers' dataset_preprocess scripts write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.system import environment

IDS, LABELS = "input_ids", "labels"
IGNORED = -100  # the label of a token without loss


def is_mindrecord(path: Path) -> bool:
    """True for the name of a MindRecord file, which may be one of several: data.mindrecord0."""
    return path.suffix.lower().rstrip("0123456789") == ".mindrecord"


def read_mindrecord(path: Path) -> Iterator[dict[str, NDArray[np.int64]]]:
    """The token ids of each record, and its labels, if any. Raises ArtifactError."""
    index = path.with_name(f"{path.name}.db")
    if not index.is_file():
        raise ArtifactError(
            f"{path}: its index {index.name} is missing",
            "copy both files that MindSpore has written",
        )
    environment.import_mindspore()
    from mindspore.mindrecord import FileReader

    try:
        reader = FileReader(str(path), num_consumer=1)
        rows: Iterable[Mapping[str, NDArray[np.int64]]] = reader.get_next()
        for row in rows:
            ids = row.get(IDS)
            if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu":
                got = ", ".join(f"{name} {one.dtype}{one.shape}" for name, one in row.items())
                raise ArtifactError(f"{path}: got {got}, expected {IDS}, a list of integers")
            labels = row.get(LABELS)
            if labels is not None and labels.shape != ids.shape:
                raise ArtifactError(
                    f"{path}: {LABELS} of shape {labels.shape}, and {IDS} of {ids.shape}; expected"
                    " a label for each token"
                )
            found = {IDS: ids} if labels is None else {IDS: ids, LABELS: labels}
            yield {name: one.astype(np.int64) for name, one in found.items()}
    except RuntimeError as error:
        raise ArtifactError(
            f"{path}: not a MindRecord file: {str(error).splitlines()[0]}"
        ) from None


def write_mindrecord(
    path: Path, rows: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]], description: str
) -> None:
    """Write token ids and labels as `path` and its index. Raises EnvironmentFault."""
    environment.import_mindspore()
    from mindspore.mindrecord import FileWriter

    field = {"type": "int32", "shape": [-1]}
    try:
        writer = FileWriter(str(path), 1, overwrite=True)
        writer.add_schema({IDS: field, LABELS: field}, description)
        for ids, labels in rows:
            row = {IDS: ids.astype(np.int32), LABELS: labels.astype(np.int32)}
            writer.write_raw_data([row])
        writer.commit()
    except RuntimeError as error:
        raise EnvironmentFault(f"{path}: cannot write: {str(error).splitlines()[0]}") from None
