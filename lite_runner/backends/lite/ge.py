"""Options of the graph engine (GE) that MindSpore Lite compiles with on Ascend.

They come from conf/ge, or from the user's ini files, which are passed on unchanged.
"""

from __future__ import annotations

import configparser
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from lite_runner.config import Invalid, did_you_mean, nearest, show
from lite_runner.config.sections import Infer
from lite_runner.errors import ConfigError
from lite_runner.model.exported_model import FILE_NAME as FILE_NAME
from lite_runner.records import dataclass
from lite_runner.system.files import atomic_write, read_small

# Lite starts HCCL, and sets ge.exec.isUseHcom, only for a rank table in this section.
CONTEXT, RANK_TABLE = "ascend_context", "rank_table_file"
# Sections that MindSpore Lite 2.2 to 2.7 reads; it ignores unknown ones silently.
SECTIONS = (
    *(CONTEXT, "ge_global_options", "ge_session_options", "ge_graph_options"),
    "graph_kernel_param",
    *("acl_init_options", "acl_build_options", "acl_option_cfg_param"),
    *("aoe_global_options", "aoe_tuning_options", "common_context", "execution_plan"),
    *("model_file", "weight", "ms_cache", "gpu_context", "shared_thread_pool", "om_converter"),
    *("transformer_context", "inner_common", "lite_inner_group", "inner_model_parallel_runner"),
)
# The preset of conf/ge by CANN's name of the processor: Atlas A2 and A3
# (Ascend910B3, Ascend910_9391), then Atlas 800 (Ascend910A, Ascend910B, Ascend910ProA, ...).
PRESETS = (
    (re.compile(r"Ascend910(B\d|_93)"), "atlas_800t_a2"),
    (re.compile(r"Ascend910(A|B|ProA|ProB|PremiumA)$"), "atlas_800"),
)
# MindSpore Lite's defaults that users should know of.
_UNSET = {
    "ge.exec.precision_mode": "all float32 is computed in float16 (force_fp16):"
    " norms, and the mask of attention; must_keep_origin_dtype keeps it",
    "ge.externalWeight": "the two graphs of a pair do not share their weights; 1 shares them",
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

Sections = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class GeConfig:
    """Either the user's files, one for both graphs or (prefill, increment), or sections."""

    files: tuple[Path, ...] = ()
    sections: Sections = field(default_factory=dict)
    rank_table: str = ""  # through which the ranks communicate; laid over the files or sections

    def of_graph(self, index: int) -> Path | Sections:
        """The options of the graph with this index: a file that is passed on unchanged, or
        sections."""
        file = self.files[min(index, len(self.files) - 1)] if self.files else None
        if file is not None and not self.rank_table:
            return file
        sections = self.sections if file is None else read_ini(file)
        if not self.rank_table:
            return sections
        context = {**sections.get(CONTEXT, {}), RANK_TABLE: self.rank_table}
        return {**sections, CONTEXT: context}

    @property
    def names_rank_table(self) -> bool:
        """True if the options of the first graph, which initialize HCCL, have a rank table."""
        first = self.of_graph(0)
        sections = read_ini(first) if isinstance(first, Path) else first
        return bool(sections.get(CONTEXT, {}).get(RANK_TABLE))

    def unset(self) -> list[str]:
        """Notes on MindSpore Lite's defaults for options that are not set; reads the files."""
        sections = [self.sections, *(read_ini(path) for path in self.files)]
        names = {name for one in sections for options in one.values() for name in options}
        return [f"without {name} {does}" for name, does in _UNSET.items() if name not in names]


def preset_of(soc: str) -> str | None:
    """The preset of conf/ge for an Ascend processor; None where there is none."""
    return next((name for pattern, name in PRESETS if pattern.match(soc)), None)


def ge_config(infer: Infer) -> GeConfig | None:
    """The GE options of a valid section; None where it has none."""
    if infer.ge_config_path:
        return GeConfig(files=_files(infer))
    if infer.ge_options is None:
        return None
    sections = {
        section: dict(_flatten(options, "")) for section, options in infer.ge_options.items()
    }
    return GeConfig(sections={name: options for name, options in sections.items() if options})


def in_folder(infer: Infer, folder: Path) -> Infer:
    """The section with the sections of a config written to config.ini in `folder`, of a run; as it
    is where those of this machine's processor come first. Raises EnvironmentFault."""
    ge = None if infer.ge_preset is not None else ge_config(infer)
    if ge is None or not ge.sections:
        return infer
    path = folder / FILE_NAME
    with atomic_write(path) as file:
        file.write(render(ge.sections).encode("utf-8", errors="backslashreplace"))
    return replace(infer, ge_config_path=str(path), ge_options=None)


def ge_errors(infer: Infer) -> Iterator[Invalid]:
    """Validation errors of GE options; reads the user's files."""
    paths, options = infer.ge_config_path, infer.ge_options
    key = "infer.ge_config_path"
    if paths and options is not None:
        yield Invalid(
            (key, "ge"),
            f"{key} and infer.ge_options are both given; a file is taken as it is: ge=none",
        )
    if isinstance(paths, tuple) and paths and len(paths) != 2:
        yield Invalid(
            (key,), f"{key}: got {len(paths)} files, expected one, or two: [prefill, increment]"
        )
    for path in _files(infer):
        try:
            read_ini(path)
        except ConfigError as error:
            yield Invalid((key,), f"{key}: {error.message}")
    for section, entries in (options or {}).items():
        where = f"infer.ge_options.{section}"
        if section not in SECTIONS:
            near = did_you_mean(nearest(section, SECTIONS))
            yield Invalid((where,), f"{where}: MindSpore Lite has no such section{near}")
        elif not isinstance(entries, Mapping):
            yield Invalid((where,), f"{where}: got {show(entries)}, expected a section of options")
        else:
            for name, value in _flatten(entries, ""):
                if _CONTROL.search(value):
                    text = f"{where}.{name}: got {show(value)}, expected one line of text"
                    yield Invalid((f"{where}.{name}",), text)


def ge_notes(infer: Infer) -> list[str]:
    """Notes on sections and lines of the user's files that have no effect."""
    notes: list[str] = []
    for path in _files(infer):
        unknown = unknown_sections(read_ini(path))
        if unknown:
            names = ", ".join(f"[{name}]" for name in unknown)
            notes.append(
                f"{path}: MindSpore Lite has no section {names}, and ignores what is in it"
            )
        ignored = [line for line in _preamble(_lines(path)) if line]
        if ignored:
            notes.append(
                f"{path}: {', '.join(ignored)} before the first [section], where MindSpore Lite"
                " reads nothing; [ascend_context] is the place (the provider is ge without it)"
            )
    return notes


def compiles_with_ge(engine: str, target: str) -> bool:
    """True if GE compiles the graphs of an engine on a target ("CPU" or "Ascend")."""
    return (engine, target) == ("lite", "Ascend")


def render(sections: Sections) -> str:
    """The text of a config.ini."""
    blocks = []
    for section, options in sections.items():
        lines = [f"[{section}]", *(f"{name}={value}" for name, value in options.items())]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def read_ini(path: Path) -> dict[str, dict[str, str]]:
    """The sections of a config.ini, without lines before the first section, which MindSpore Lite
    ignores (config_file.cc). Raises ConfigError: missing, too large, malformed, duplicates.
    """
    lines = _lines(path)
    before = _preamble(lines)
    for number, line in enumerate(before, 1):
        if line and "=" not in line:
            raise ConfigError(f"{path}: line {number}: got {show(line)}, expected name=value")
    # MindSpore Lite has no continuation lines, no default section and case-sensitive names.
    parser = configparser.RawConfigParser(
        delimiters=("=",), comment_prefixes=("#",), default_section="\n"
    )
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    try:
        # Empty lines in place of the preamble keep the line numbers.
        parser.read_string("\n".join(["" for _ in before] + lines[len(before) :]))
    except configparser.Error as error:
        raise ConfigError(f"{path}: {_reason(error)}") from None
    return {name: dict(parser.items(name)) for name in parser.sections()}


def _lines(path: Path) -> list[str]:
    """The stripped lines of a file. Raises ConfigError: missing, too large, not UTF-8."""
    try:
        data = read_small(path, "a file of GE options")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"{show(str(path))}: {error}") from None
    try:
        return [line.strip() for line in data.decode("utf-8").splitlines()]
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text in UTF-8") from None


def _preamble(lines: list[str]) -> list[str]:
    """The lines before the first section, comments emptied."""
    before = itertools.takewhile(lambda line: not line.startswith("["), lines)
    return ["" if line.startswith("#") else line for line in before]


def unknown_sections(sections: Iterable[str]) -> list[str]:
    """Section names that MindSpore Lite does not read."""
    return [name for name in sections if name not in SECTIONS]


def _files(infer: Infer) -> tuple[Path, ...]:
    paths = infer.ge_config_path
    if isinstance(paths, tuple):
        return tuple(Path(path).expanduser() for path in paths)
    return (Path(paths).expanduser(),) if paths else ()


def _flatten(options: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Dotted names and values as text; null omits an option."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            yield f"{prefix}{name}", text


def _reason(error: configparser.Error) -> str:
    """The message of a configparser error, without its source name."""
    if isinstance(error, configparser.DuplicateSectionError):
        return f"line {error.lineno}: the section [{error.section}] is given twice"
    if isinstance(error, configparser.DuplicateOptionError):
        return f"line {error.lineno}: {error.option} is given twice in [{error.section}]"
    if isinstance(error, configparser.MissingSectionHeaderError):  # a bracket that nothing closes
        return f"line {error.lineno}: got {show(error.line.strip())}, expected [section]"
    if isinstance(error, configparser.ParsingError):
        line, text = error.errors[0]
        return f"line {line}: got {text[:80]}, expected name=value"
    return str(error)
