"""Writes a MindIR under a fixed name, and checks before writing."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import mindspore as ms
from mindspore import Tensor, nn
from mindspore.train import mind_ir_pb2

from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ConfigError, EnvironmentFault

GRAPH_SUFFIX = "_graph.mindir"
ASCEND_GROUP = "hccl_world_group"  # of all ranks


def write_mindir(
    network: nn.Cell, inputs: Sequence[Tensor], folder: Path, stem: str, enc_key: bytes | None
) -> str:
    """Write `<stem>_graph.mindir`, above 1 GB with `<stem>_variables/` beside it; its name.

    Inputs may have shapes with None. A full disk is an EnvironmentFault.
    """
    encryption = {} if enc_key is None else {"enc_key": enc_key, "enc_mode": "AES-GCM"}
    network.set_train(False)
    try:
        with tempfile.TemporaryDirectory() as plain:
            # MindSpore takes no path with spaces or letters beyond ASCII in it.
            to = Path(plain) / "to"
            to.symlink_to(folder.resolve(), target_is_directory=True)
            ms.export(
                network, *inputs, file_name=str(to / stem), file_format="MINDIR", **encryption
            )
    except OSError as error:
        raise EnvironmentFault(
            f"{folder}: cannot write {stem}{GRAPH_SUFFIX}: {error}",
            "make room, or name another folder with output_dir=",
        ) from error
    whole = folder / f"{stem}.mindir"  # so MindSpore calls it where nothing was split off
    if whole.exists():
        whole.rename(folder / f"{stem}{GRAPH_SUFFIX}")
    for path in (folder / f"{stem}{GRAPH_SUFFIX}", *folder.glob(f"{stem}_variables/*")):
        path.chmod(0o644)  # MindSpore makes them readable to their owner alone
    for path in folder.glob(f"{stem}_variables"):
        path.chmod(0o755)
    return f"{stem}{GRAPH_SUFFIX}"


def name_group(path: Path, group: str) -> None:
    """Let the collectives of a graph be of another group of communication: each device calls the
    one of all ranks its own name. Weights beside the graph stay as they are."""
    model = mind_ir_pb2.ModelProto.FromString(path.read_bytes())
    for owner in (*model.primitives, *model.graph.node):
        for attribute in owner.attribute:
            if attribute.name == "group":
                attribute.s = group.encode()
    path.write_bytes(model.SerializeToString())


def check_length(model: Decoder, seq_length: int) -> None:
    """A cache longer than the model has positions is a ConfigError."""
    if seq_length > model.seq_length:
        raise ConfigError(
            f"an export for sequences of {seq_length} tokens, but the model takes at most "
            f"{model.seq_length}",
            f"use a sequence length of at most {model.seq_length}",
        )
