"""Writes a MindIR under a fixed name, and the checks before that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mindspore as ms
from mindspore import Tensor, nn
from mindspore.train import mind_ir_pb2

from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.system.files import temporary_folder

GRAPH_SUFFIX = "_graph.mindir"
ASCEND_GROUP = "hccl_world_group"  # of all ranks


def write_mindir(
    network: nn.Cell, inputs: Sequence[Tensor], folder: Path, stem: str, enc_key: bytes | None
) -> str:
    """Write `<stem>_graph.mindir`, above 1 GB with `<stem>_variables/` beside it; its name.

    Shapes of inputs may contain None. Raises EnvironmentFault if it cannot be written.
    """
    encryption = {} if enc_key is None else {"enc_key": enc_key, "enc_mode": "AES-GCM"}
    network.set_train(False)
    try:
        with temporary_folder() as plain:
            # MindSpore accepts no path with spaces or non-ASCII characters.
            to = plain / "to"
            to.symlink_to(folder.resolve(), target_is_directory=True)
            ms.export(
                network, *inputs, file_name=str(to / stem), file_format="MINDIR", **encryption
            )
    except OSError as error:
        raise EnvironmentFault(
            f"{folder}: cannot write {stem}{GRAPH_SUFFIX}: {error}",
            "make room, or name another folder with output_dir=",
        ) from error
    whole = folder / f"{stem}.mindir"  # MindSpore's name without separate variables
    if whole.exists():
        whole.rename(folder / f"{stem}{GRAPH_SUFFIX}")
    for path in (folder / f"{stem}{GRAPH_SUFFIX}", *folder.glob(f"{stem}_variables/*")):
        path.chmod(0o644)  # MindSpore makes them readable by the owner only
    for path in folder.glob(f"{stem}_variables"):
        path.chmod(0o755)
    return f"{stem}{GRAPH_SUFFIX}"


def name_group(path: Path, group: str) -> None:
    """Set the communication group of a graph's collectives: each device has its own name for the
    group of all ranks. Weights beside the graph stay unchanged."""
    model = mind_ir_pb2.ModelProto.FromString(path.read_bytes())
    for owner in (*model.primitives, *model.graph.node):
        for attribute in owner.attribute:
            if attribute.name == "group":
                attribute.s = group.encode()
    path.write_bytes(model.SerializeToString())


def check_length(model: Decoder, seq_length: int) -> None:
    """Raise ConfigError if a cache is longer than the model's maximum sequence length."""
    if seq_length > model.seq_length:
        raise ConfigError(
            f"an export for sequences of {seq_length} tokens, but the model supports at most "
            f"{model.seq_length}",
            f"use a sequence length of at most {model.seq_length}",
        )
