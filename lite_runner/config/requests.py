"""What is asked for: the prompts, and the adapter of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lite_runner.config.fields import Fault, fault
from lite_runner.config.prompts import STANDARD_INPUT, prompt_file, read_prompts
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError

BASE = ("", "null", "none", "base")  # what the model without an adapter may be called


def read_requests(config: RunConfig) -> tuple[list[str], list[str | None]]:
    """The prompts of a run and the adapter of each, None for the base model.

    A file of run_mode=slora without adapter_id has lines `adapter<TAB>prompt`; elsewhere no name is
    the base model. Raises ConfigError, also where there are not as many adapters as prompts.
    """
    lines = read_prompts(config)
    ids = config.adapter_id
    if config.run_mode == "slora" and ids is None and prompt_file(config.predict_data) is not None:
        return _split(config, lines)
    if ids is None or isinstance(ids, str):
        return lines, [adapter_name(ids)] * len(lines)
    if text := _miscounted(ids, len(lines)):
        raise ConfigError(text)
    return lines, [adapter_name(one) for one in ids]


def adapter_name(given: str | None) -> str | None:
    """None for one of the names of the base model."""
    return None if given is None or given.lower() in BASE else given


def adapter_names(ids: str | Sequence[str | None] | None) -> list[str]:
    """The adapters that a config's adapter_id names, without the base model."""
    given = [ids] if ids is None or isinstance(ids, str) else ids
    return [name for name in map(adapter_name, given) if name is not None]


def request_faults(config: RunConfig) -> Iterator[Fault]:
    """What of adapters and prompts does not go together, as far as the config shows it."""
    data, ids, keys = config.predict_data, config.adapter_id, ("adapter_id", "adapter_path")
    file = data == STANDARD_INPUT or prompt_file(data) is not None
    if config.run_mode == "slora" and not config.adapter_path:
        yield fault(keys, "run_mode=slora needs adapter_path=lora_adapter.json")
    if config.adapter_path and config.backend == "mslite":
        yield fault(
            ("adapter_path", "backend"),
            "adapter_path has no meaning with backend=mslite, whose models are exported ones;"
            " run_mode=export adapter_id= exports a model with an adapter merged into it",
        )
    if isinstance(ids, tuple) and data and not file:
        text = _miscounted(ids, 1 if isinstance(data, str) else len(data))
        if text:
            yield fault(("adapter_id", "predict_data"), text)


def _miscounted(ids: Sequence[str | None], prompts: int) -> str:
    """What is wrong with the number of adapters, "" where it fits."""
    if len(ids) == prompts:
        return ""
    return (
        f"adapter_id: got {len(ids)} for {prompts} prompt{'s' * (prompts > 1)}, expected one for"
        " each, or one name for all"
    )


def _split(config: RunConfig, lines: Sequence[str]) -> tuple[list[str], list[str | None]]:
    prompts, names = [], []
    for number, line in enumerate(lines, 1):
        name, tab, prompt = line.partition("\t")
        if not tab or not prompt:
            raise ConfigError(
                f"predict_data: {config.predict_data}: prompt {number} has no adapter; expected"
                f" adapter<TAB>prompt, got {line[:40]!r}",
                "or one adapter for all of them: adapter_id=NAME",
            )
        names.append(adapter_name(name.strip()))
        prompts.append(prompt)
    return prompts, names
