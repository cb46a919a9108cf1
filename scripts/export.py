"""Export a model as MindIR: export.py with MindFormers' flags, over run_mode=export.

    python scripts/export.py --config_path run_bloom_560m.yaml
    python scripts/export.py --model_dir path/to/folder     # one yaml, and the checkpoint

Where the yaml's section `infer` names prefill_model_path and increment_model_path, the graphs are
written there, over what an earlier export left. The exit codes are those of run_lite.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lite_runner.system.own_python import continue_in_own_python

if __name__ == "__main__":
    continue_in_own_python()

from lite_runner import app
from lite_runner.api.context import DEVICE_VARIABLE
from lite_runner.config.model_dir import only_yaml
from lite_runner.errors import ArtifactError

CHECKPOINTS = (".ckpt", ".safetensors", ".gguf")


def parser() -> argparse.ArgumentParser:
    """The flags of MindFormers' export.py."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = flags.add_mutually_exclusive_group(required=True)
    source.add_argument("--config_path", help="yaml file of the model")
    source.add_argument("--model_dir", help="folder with one yaml file, and its checkpoint")
    flags.add_argument("--batch_size", type=int, default=1, help="rows that the graphs compute")
    flags.add_argument("--model_type", type=str.lower, choices=["mindir", "mindir_lite"])
    flags.add_argument("--device_id", type=int)
    flags.add_argument("--device_target", choices=["CPU", "Ascend"], help="whatever the yaml says")
    flags.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as of run_lite.py")
    return flags


def command_line(flags: argparse.Namespace) -> list[str]:
    """The arguments of run_lite.py that mean the same. Raises ArtifactError for the folder."""
    batch = f"predict_batch_size={flags.batch_size}"
    arguments = ["run_mode=export", "overwrite=true", batch]
    # What the yaml says of several cards is for training; run_mindformer has a flag for that too.
    arguments.append("use_parallel=false")
    if flags.model_type is not None:
        arguments.append(f"infer.model_type={flags.model_type}")
    if flags.device_id is not None:
        arguments.append(f"context.device_id={flags.device_id}")
    device = flags.device_target or os.environ.get(DEVICE_VARIABLE)
    if device:
        arguments.append(f"context.device_target={device}")
    arguments += flags.settings
    if flags.model_dir is None:
        return [*arguments, "--config", flags.config_path]
    folder = Path(flags.model_dir).expanduser()
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: no such folder", "--config_path FILE takes a yaml alone")
    config = only_yaml(folder)
    if config is None:
        raise ArtifactError(f"{folder}: no yaml file of the model", "put its config there")
    if any(path.suffix in CHECKPOINTS for path in folder.iterdir()):
        arguments.append(f"load_checkpoint={folder}")
    return [*arguments, "--config", str(config)]


def main() -> int:
    """Export as the flags say; gives the exit code."""
    flags = parser().parse_args()
    return app.guarded(lambda: app.main(command_line(flags)))


if __name__ == "__main__":
    sys.exit(main())
