"""The engine of a run through an exported model: device, GE options, decryption key."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from lite_runner import progress
from lite_runner.backends.engines.start import Device, EngineOptions, choose_engine
from lite_runner.backends.ge_options import ge_of_run, tell_ge
from lite_runner.config.ge import GeConfig, compiles_with_ge, ge_config
from lite_runner.config.options import ExportedOptions
from lite_runner.config.ranks import Ranks
from lite_runner.config.secret import encryption_key
from lite_runner.mindir.manifest import Layout
from lite_runner.system import environment


def device_of(config: ExportedOptions) -> Device:
    """The device of the run; with dry_run=true it need not be here. Raises EnvironmentFault."""
    target = config.context.device_target
    return cast(Device, environment.resolve_device(target, planned=config.dry_run))


def key_of(config: ExportedOptions) -> bytes | None:
    """The key that graphs are encrypted with. Raises ConfigError where it is none."""
    return encryption_key(config.infer.enc_key)


def engine_for(
    config: ExportedOptions,
    layout: Layout,
    ge_files: tuple[Path, ...] = (),
    *,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
) -> EngineOptions:
    """The engine of a run; `ge_files`: the config.ini beside the model, unless the run has its own.

    Raises ConfigError, EnvironmentFault where the one that is asked for cannot run the layout.
    """
    device = device_of(config)
    name = choose_engine(layout, config.engine, device)
    ge = None
    if compiles_with_ge(name, device):
        ge = ge_of_run(config, ge_files)
        tell_ge(config, ge)
    elif config.run_mode != "export":  # which only writes them down
        given = ge_config(config) or (GeConfig(files=ge_files) if ge_files else None)
        if given is not None:
            options = ", ".join(map(str, given.files)) or "ge="
            progress.note(f"{options}: for GE on Ascend; this runs in {name} on {device}")
    return EngineOptions(
        name=name,
        device=device,
        device_id=config.context.device_id,
        rank_id=ranks.rank or config.infer.rank_id,
        threads=config.context.threads,
        ge=ge,
        key=key_of(config),
    )
