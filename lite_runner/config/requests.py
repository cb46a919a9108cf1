"""The requests of a run: prompts, each with its adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lite_runner.config.fields import Fault, fault
from lite_runner.config.options import GenerateOptions
from lite_runner.config.prompt import Item, Request, adapter_name
from lite_runner.config.prompts import STANDARD_INPUT, prompt_count, prompt_file, read_prompts
from lite_runner.errors import ConfigError


def read_requests(config: GenerateOptions) -> list[Request]:
    """The prompts of a run, each with its adapter, None for the base model.

    A .txt file of run_mode=slora without adapter_id has lines `adapter<TAB>prompt`; elsewhere no
    name means the base model. Raises ConfigError, also where the numbers of adapters and prompts
    differ.
    """
    prompts, ids = read_prompts(config), config.adapter_id
    file, lines = prompt_file(config.predict_data), [one for one in prompts if isinstance(one, str)]
    if config.adapter_lines and ids is None and file is not None and lines:
        return _split_lines(config, lines)
    requests = [Request(prompt=one) if isinstance(one, str) else one for one in prompts]
    if isinstance(ids, tuple) and (text := _count_error(ids, requests)):
        raise ConfigError(text)
    several = ids if isinstance(ids, tuple) else [ids] * len(requests)
    return [
        replace(request, adapter=adapter_name(name if request.adapter is None else request.adapter))
        for request, name in zip(requests, several, strict=True)
    ]


def adapter_names(ids: str | Sequence[str | None] | None) -> list[str]:
    """The adapters that a config's adapter_id names, without the base model."""
    given = [ids] if ids is None or isinstance(ids, str) else ids
    return [name for name in map(adapter_name, given) if name is not None]


def request_faults(config: GenerateOptions) -> Iterator[Fault]:
    """Validation errors of adapters and prompts, without reading prompt files."""
    data, ids = config.predict_data, config.adapter_id
    file = data == STANDARD_INPUT or prompt_file(data) is not None
    if config.adapter_path and config.backend == "mslite" and not config.takes_packed:
        yield fault(
            ("adapter_path", "backend"),
            "adapter_path has no effect with backend=mslite, whose models are exported ones;"
            " run_mode=export adapter_id= exports a model with an adapter merged into it, and"
            " engine=native takes adapters",
        )
    if isinstance(ids, tuple) and data and not file:
        texts = (data,) if isinstance(data, str) else data
        if prompt_count(texts) == len(texts) and (text := _count_error(ids, texts)):
            yield fault(("adapter_id", "predict_data"), text)


def _count_error(ids: Sequence[str | None], prompts: Sequence[Item]) -> str:
    """The error of a wrong number of adapters; "" for none."""
    if any(isinstance(one, Request) and one.adapter is not None for one in prompts):
        return "adapter_id: got a list, and prompts with adapters of their own; give one of them"
    count = len(prompts)
    if len(ids) == count:
        return ""
    return (
        f"adapter_id: got {len(ids)} for {count} prompt{'s' * (count > 1)}, expected one for each,"
        " or one name for all"
    )


def _split_lines(config: GenerateOptions, lines: Sequence[str]) -> list[Request]:
    found = []
    for number, line in enumerate(lines, 1):
        name, tab, prompt = line.partition("\t")
        if not tab or not prompt:
            raise ConfigError(
                f"predict_data: {config.predict_data}: prompt {number} has no adapter; expected"
                f" adapter<TAB>prompt, got {line[:40]!r}",
                "or one adapter for all of them: adapter_id=NAME",
            )
        found.append(Request(prompt=prompt, adapter=adapter_name(name.strip())))
    return found
