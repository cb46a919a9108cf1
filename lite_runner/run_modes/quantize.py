"""run_mode=quantize: a checkpoint of any readable format, written with its weights quantized."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lite_runner import progress
from lite_runner.architectures import parameters
from lite_runner.architectures.quantization import Quantization, Scheme, schemes
from lite_runner.config import Invalid, invalid
from lite_runner.config.prompts import is_file
from lite_runner.config.schema import OverwriteOptions
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model import ModelFiles
from lite_runner.model.locate import locate_for_plan, side_files, tokenizer_for_plan
from lite_runner.output import Result, RunFolder
from lite_runner.output.fidelity import WINDOW, fidelity
from lite_runner.plan import Plan
from lite_runner.records import Count, InputPath, OutputPath, Positive, dataclass
from lite_runner.sizing import (
    Memory,
    check_memory,
    float32_bytes,
    memory_lines,
    model_lines,
    parameter_count,
    weight_bytes,
)
from lite_runner.system.environment import cores
from lite_runner.system.files import new_folder, read_small, readable, require_space
from lite_runner.system.memory import free_memory
from lite_runner.text.gguf import gguf_tokenizer
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.training.kernels import product, searched, use_threads
from lite_runner.weights.formats import compressed_tensors, golden_stick
from lite_runner.weights.formats.gguf_writer import GGUFKind, check_writable, gguf_bytes, write_gguf
from lite_runner.weights.formats.packed_layouts import layout_in
from lite_runner.weights.quantization.gptq import (
    SCALE_BYTES,
    KeptLayers,
    Method,
    calibrated,
    working_bytes,
)
from lite_runner.weights.quantization.importance import (
    Importance,
    importance_file,
    measured_importance,
    read_importance,
)
from lite_runner.weights.quantization.mixed_precision import finer_matrices, measured_costs
from lite_runner.weights.quantization.quantize import describe
from lite_runner.weights.quantization.quantized_checkpoint import (
    MANIFEST,
    schemes_of,
    weights_bytes,
    write_quantized,
)
from lite_runner.weights.write import (
    check_folder,
    check_gguf,
    check_not_source,
    check_replaced,
    write_beside,
    write_files,
)

RECEIPT, TEXTS = "receipt.json", "Python's help texts"
IMATRIX = "imatrix.gguf"
IMATRICES = (".dat", ".gguf")  # suffixes of llama.cpp's files
# Formats of other tools: folders with integers around zero.
TOOLS = {one.FORMAT: one for one in (compressed_tensors, golden_stick)}
NAMES = {
    "nearest": "the nearest integers",
    **{"gptq": "GPTQ", "awq": "AWQ", "smoothquant": "SmoothQuant"},
    "imatrix": "an importance matrix",
}
MAX_TEXT = 64 << 20  # bytes
MOST_BITS = 8.5  # of a weight in groups of 32 with a float16 scale
HELD_OUT = 32  # windows at most: 4,064 tokens are scored
LEAST = 4  # windows that are read
OF_NEAREST = 8  # of the nearest integers, which take seconds themselves
MEASURED = 2  # windows of the text that show what 4 bits cost


@dataclass(frozen=True)
class Calibration:
    """Settings of quantizing and writing weights."""

    method: Literal["nearest", Method, "imatrix"]
    data: InputPath  # "": Python's help texts
    tokens: Count
    bits: Positive | None  # of a weight of the linear layers on average; null: 4 and their scales
    format: Literal["folder", "compressed-tensors", "mindformers", GGUFKind]


@dataclass(frozen=True, kw_only=True)
class Config(OverwriteOptions):
    """run_mode=quantize"""

    quantize_output: OutputPath
    quantize: Calibration | None  # null: the nearest integers

    @property
    def calibration(self) -> Calibration | None:
        """The settings of a calibration by a text; None for the nearest integers."""
        return self.quantize if self.quantize and self.quantize.method != "nearest" else None

    @property
    def format(self) -> Literal["folder", "compressed-tensors", "mindformers", GGUFKind]:
        return self.quantize.format if self.quantize else "folder"

    @property
    def wanted(self) -> Quantization:
        """The integers of a calibration, of a GGUF file too."""
        return Quantization("a16w4", 32) if self.gguf else self.quantization

    @property
    def gguf(self) -> GGUFKind | None:
        """The mix of block types of the GGUF file to write; None: a folder."""
        form = self.format
        if form == "folder" or form == "compressed-tensors" or form == "mindformers":
            return None
        return form


def errors(config: Config) -> Iterator[Invalid]:
    """Validation errors of quantizing."""
    if not config.quantize_output:
        yield invalid("quantize_output", "quantize_output is empty; give the folder to write")
    if config.gguf:
        yield from _errors_of_gguf(config, config.gguf)
    elif not config.quantization.rounds:
        yield invalid("quant", "run_mode=quantize needs quant=a16w8, a16w4 or a8w8")
    elif config.format == "compressed-tensors" and config.quant == "a8w8":
        yield invalid(
            ("quantize.format", "quant"),
            "quantize.format=compressed-tensors leaves inputs as they are, got quant=a8w8; "
            "expected quant=a16w8 or quant=a16w4",
        )
    elif config.calibration and config.calibration.method == "imatrix":
        yield invalid(
            ("quantize.method", "quantize.format"),
            "quantize.method=imatrix chooses the blocks of a GGUF file; expected quantize.format="
            "Q4_K_M, Q4_0 or Q4_1, or quantize.method=gptq",
        )
    elif config.calibration:
        method = config.calibration.method
        quant = "a8w8" if method == "smoothquant" else "a16w4"
        if config.quant != quant:
            yield invalid(
                ("quantize.method", "quant"),
                f"quantize.method={method} needs quant={quant}, got quant={config.quant}",
            )
    given = config.quantize
    if given and given.bits is not None:
        yield from _errors_of_bits(config, given, given.bits)
    if given and given.data and not is_file(Path(given.data).expanduser()):
        yield invalid("quantize.data", f"quantize.data: no file {given.data}")
    if given and given.data.endswith(IMATRICES) and given.method != "imatrix":
        yield invalid(
            ("quantize.data", "quantize.method"),
            f"quantize.data={given.data} is an importance matrix, expected a text, or"
            " quantize.method=imatrix",
        )


def _errors_of_bits(config: Config, given: Calibration, bits: float) -> Iterator[Invalid]:
    if given.method not in ("gptq", "awq") or given.format == "mindformers":
        yield invalid(
            ("quantize.bits", "quantize.method", "quantize.format"),
            f"quantize.bits={bits} needs quantize.method=gptq or awq, and another format than"
            " mindformers",
        )
    elif config.gguf or config.quant == "a16w4":
        least = _bits(_formats(config)[0])
        if not least <= bits <= MOST_BITS:
            yield invalid(
                "quantize.bits",
                f"quantize.bits={bits}: expected {least} (all 4 bits and their scales) to"
                f" {MOST_BITS} (all 8)",
            )


def _formats(config: Config) -> tuple[Scheme, Scheme]:
    """The 4-bit and 8-bit schemes of mixed precision."""
    four, eight = config.wanted.linear, config.wanted.table
    assert four is not None and eight is not None
    return (replace(four, group_bytes=SCALE_BYTES) if config.format in TOOLS else four), eight


def _bits(scheme: Scheme) -> float:
    """Of a weight, scales counted."""
    return 8 * scheme.nbytes(1, scheme.group) / scheme.group


def _errors_of_gguf(config: Config, kind: GGUFKind) -> Iterator[Invalid]:
    target, written = config.quantize_output, ("quantize.format", "quantize_output")
    if target and not target.endswith(".gguf"):
        yield invalid(written, f"quantize.format={kind} writes a file, got {target}: add .gguf")
    if config.quant is not None:
        yield invalid(
            ("quant", "quantize.format"),
            f"quant={config.quant} has no effect: quantize.format={kind} names the blocks",
        )
    method = config.calibration.method if config.calibration else "nearest"
    wrong = ""
    if method in ("gptq", "awq") and kind != "Q4_1":
        wrong = "rounds to Q4_1"
    if method == "imatrix" and kind == "Q8_0":
        wrong = "rounds to fewer bits"
    if method == "smoothquant":
        wrong = "is of a folder with quant=a8w8"
    if wrong:
        yield invalid(
            ("quantize.method", "quantize.format"),
            f"quantize.method={method} {wrong}, got quantize.format={kind}",
        )


def plan(config: Config) -> Plan:
    """The checkpoint and what is written. With dry_run=true nothing is fetched. Raises
    RunnerError."""
    target = Path(config.quantize_output).expanduser()
    kind = config.gguf
    if kind is None:
        _check_target(target, config.overwrite)
    else:
        check_gguf(target, config.overwrite)
    files = locate_for_plan(config.source)
    check_not_source("quantize_output", target, files.path)
    if form := TOOLS.get(config.format):
        wanted = config.wanted
        form.check_writable(files.model, wanted, calibrated=config.calibration is not None)
        size = form.tensors_bytes(files.model, wanted)
        what = f"quantize.format={config.format} quant={wanted}"
        files = replace(files, quantization=Quantization())
    elif kind is None:
        size = weight_bytes(files.model, "float32", files.quantization)
        what = f"quant={files.quantization}"
    else:
        check_writable(files.model, kind)
        by_importance = config.calibration is not None and config.calibration.method == "imatrix"
        integers = kind == "Q4_1" and not by_importance
        quantization = config.wanted if integers else Quantization("a16")
        files = replace(files, quantization=quantization)
        size, what = gguf_bytes(files.model, kind), f"quantize.format={kind}"
    if config.quantize and config.quantize.bits is not None:
        least = _bits(_formats(config)[0])
        matrices = schemes(files.model, config.wanted)
        linear = [one for one in parameters(files.model) if one.is_linear and one.name in matrices]
        weights = sum(math.prod(one.shape) for one in linear)
        size += round(weights * (config.quantize.bits - least) / 8)
        what += f", {config.quantize.bits} bits a weight"
    lines = model_lines(config.run_mode, config.model_name, files.model, files.location())
    lines["writes"] = f"{target}: {readable(size)} as {what}"
    if 0 < files.stored_bytes() < size:
        progress.note(
            f"{what} makes the weights larger than in their source,"
            f" {readable(size)} from {readable(files.stored_bytes())}, and less accurate"
        )
    # Of the nearest integers a text only says how good they are.
    needed = kind or config.calibration
    tokenizer = tokenizer_for_plan(config.tokenizer, files, dry_run=config.dry_run or not needed)
    memory = None
    if settings := config.calibration:
        if files.model.side is not None or any(
            block.attention.borrowed is not None for block in files.model.blocks
        ):
            raise ConfigError(
                f"quantize.method={settings.method} computes each layer by itself, and those of"
                f" {config.model_name} take keys of earlier ones, or inputs of their own",
                "quantize.method=nearest",
            )
        lines["calibrated"] = f"by {NAMES[settings.method]} on {settings.data or TEXTS}"
        if settings.method != "imatrix":
            feedback = settings.method == "gptq"
            work = working_bytes(files.model, settings.tokens, feedback=feedback)
            # With the first layer there are the embedding's floats, with the last all integers.
            embedding = 4 * files.model.vocab_size * files.model.hidden_size
            memory = Memory(max(size, embedding), 0, work=work)
            lines |= memory_lines(memory)
    return Plan(config=config, files=files, memory=memory, lines=lines, tokenizer=tokenizer)


def run(plan: Plan, folder: RunFolder) -> None:
    """Write `quantize_output`. Raises RunnerError; nothing half-written gets the final name."""
    began = time.perf_counter()
    config, files = plan.config, plan.model
    assert isinstance(config, Config)
    if plan.memory is not None:
        check_memory(plan.memory)
    target = Path(config.quantize_output).expanduser()
    kind, keys = config.gguf, {}
    if kind and plan.tokenizer is not None:
        keys = gguf_tokenizer(plan.tokenizer)
    beside = {} if kind else side_files(config.tokenizer, files)
    if files.quantization.rounds:
        progress.note(describe(files.whole(), files.quantization))
    settings, source, importance, kept = config.quantize, files, None, None
    windows = None
    # A folder goes on in the form that its source has.
    wanted = files.quantization if config.format == "folder" else config.wanted
    if settings and plan.tokenizer is not None and (config.calibration or _measurable(files)):
        windows = _windows(plan.tokenizer, settings)
    if settings and windows and settings.method != "nearest":
        use_threads(cores())
        if settings.method == "imatrix":
            importance = _importance(files, windows[0], settings)
        else:
            form_of_layers = f"{settings.method} {settings.format} {wanted} {settings.bits}"
            kept = _kept_layers(files, target, windows[0], form_of_layers)
            if settings.bits is not None:
                finer = kept.chosen(partial(_finer, files, windows[0], config, wanted))
                wanted = replace(wanted, finer=finer)
                progress.note(f"{len(finer)} matrices have 8 bits, by the error that 4 cost there")
            around_zero = settings.format in TOOLS
            files = _calibrate(files, windows[0], settings.method, around_zero, wanted, kept)
    if form := TOOLS.get(config.format):
        size = _write_folder(form, files, wanted, beside, target)
    elif kind is None:
        size = _write(files, beside, target)
    else:
        size = _write_gguf(files, kind, keys, target, importance)
    if settings and windows:
        written = _written(files, config, target)
        what = kind or str(files.quantization if files.quantization.rounds else wanted)
        found = {RECEIPT: _receipt(source, written, windows[1], settings, what)}
        if importance is not None and not settings.data.endswith(IMATRICES):
            found[IMATRIX] = importance_file(importance, settings.data or TEXTS, windows[0].size)
        write_files(target, found) if kind is None else write_beside(target, found)
    if kept is not None:
        kept.remove()
    folder.write_result(Result.of_files(plan, files.source, began))
    floats = float32_bytes(files.model)
    progress.note(
        f"wrote {target}: {readable(size)} in place of {readable(floats)} as float32, "
        f"{floats / size:.2f} times smaller"
        + (f"; the source has {readable(files.stored_bytes())}" if files.path else "")
    )


def _measurable(files: ModelFiles) -> bool:
    """True if the nearest integers can be compared with a source, which is in memory then."""
    if not files.stored_bytes() or files.model.seq_length < WINDOW:
        return False
    needed, free = 2 * files.stored_bytes(), free_memory()
    if needed > free:
        progress.note(
            f"quality not measured: that takes about {readable(needed)} of memory, {readable(free)}"
            " is free"
        )
    return needed <= free


def _calibrate(
    files: ModelFiles,
    texts: NDArray[np.int32],
    method: Method,
    around_zero: bool,
    wanted: Quantization,
    kept: KeptLayers,
) -> ModelFiles:
    """The model with its weights quantized, in memory."""
    if done := kept.count:
        progress.note(f"calibrate: {done} of {files.model.num_layers} layers are here already")
    plain = replace(files, quantization=Quantization())
    with progress.step("calibrate", total=files.model.num_layers, unit="layers") as step:
        held = calibrated(
            plain.whole(),
            files.model,
            wanted,
            texts,
            method=method,
            around_zero=around_zero,
            kept=kept,
            product=product,
            advance=step.advance,
        )
    quantization = Quantization("a16") if around_zero else wanted
    return replace(files, held=held, quantization=quantization)


def _finer(
    files: ModelFiles, texts: NDArray[np.int32], config: Config, wanted: Quantization
) -> tuple[str, ...]:
    """The matrices to keep at 8 bits, so that the average is `quantize.bits`."""
    assert config.quantize is not None and config.quantize.bits is not None
    plain = replace(files, quantization=Quantization())
    with progress.step("measure errors", total=files.model.num_layers, unit="layers") as step:
        costs = measured_costs(
            plain.whole(),
            files.model,
            wanted,
            texts[:: -(-len(texts) // MEASURED)],
            around_zero=config.format in TOOLS,
            product=product,
            advance=step.advance,
        )
    return finer_matrices(costs, *_formats(config), config.quantize.bits)


def _kept_layers(
    files: ModelFiles, target: Path, texts: NDArray[np.int32], form: str
) -> KeptLayers:
    """The finished layers of an interrupted run with the same model, text and form."""
    changed = files.path.stat().st_mtime_ns if files.path else files.seed
    text = hashlib.sha256(texts.tobytes()).hexdigest()
    settings = f"{files.source}\n{files.stored_bytes()} {changed}\n{text}\n{form}\n"
    return KeptLayers(target.with_name(f"{target.name}.partial"), settings)


def _importance(files: ModelFiles, texts: NDArray[np.int32], settings: Calibration) -> Importance:
    """The importance matrix of a file of llama.cpp, or of the texts."""
    if settings.data.endswith(IMATRICES):
        return read_importance(Path(settings.data).expanduser(), files.model)
    plain = replace(files, quantization=Quantization())
    with progress.step("calibrate", total=files.model.num_layers, unit="layers") as step:
        return measured_importance(plain.whole(), files.model, texts, product, step.advance)


def _written(files: ModelFiles, config: Config, target: Path) -> ModelFiles:
    quantization = files.quantization if config.format == "folder" else Quantization("a16")
    return replace(
        files, path=target, quantization=quantization, held=None, gguf=None, adapter=None, base=None
    )


def _receipt(
    source: ModelFiles,
    written: ModelFiles,
    held_out: NDArray[np.int32],
    settings: Calibration,
    what: str,
) -> bytes:
    """Measure and note how close the quantized weights are to their source."""
    whole = replace(source, quantization=Quantization("a16"), auto_trans=True)
    found = fidelity(whole, written, held_out)
    # Finer than a run of the file without quant=, so that the weights alone are measured.
    inputs = ", with inputs of 16 bits" if str(written.path).endswith(".gguf") else ""
    progress.note(f"{NAMES[settings.method]}, on text that it did not see{inputs}: {found}")
    receipt = {
        "method": settings.method,
        "quant": what,
        "source": source.source,
        "text": settings.data or TEXTS,
        "tokens": settings.tokens,
        "bits": settings.bits,
        "bits_a_weight": round(8 * written.stored_bytes() / parameter_count(source.model), 3),
        "bytes": written.stored_bytes(),
        "source_bytes": source.stored_bytes(),
        "held_out": asdict(found),
    }
    return (json.dumps(receipt, indent=2) + "\n").encode()


def _windows(
    tokenizer: Tokenizer, settings: Calibration
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Windows of token ids [n, WINDOW] from all over the text, of settings.tokens together, and a
    quarter as many, up to HELD_OUT, that are held out. Raises ArtifactError."""
    if settings.data and not settings.data.endswith(IMATRICES):
        try:
            text = read_small(Path(settings.data).expanduser(), "a text", MAX_TEXT).decode()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ArtifactError(f"quantize.data: {settings.data}: {why}") from error
    else:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
    ids = np.array(tokenizer.encode(text), np.int32)
    read = max(LEAST, settings.tokens // WINDOW)
    held = min(read // 4, HELD_OUT)
    if settings.method == "nearest":  # a text only shows how good these are
        held, read = OF_NEAREST, min(read, max(0, len(ids) // WINDOW - OF_NEAREST))
    count = read + held
    if len(ids) < count * WINDOW:
        wanted, fewer = "", 4 * len(ids) // 5
        hint = "a longer text"
        if settings.method != "nearest":
            wanted = f" for quantize.tokens={settings.tokens}"
            hint += f", or quantize.tokens={fewer}" if fewer >= LEAST * WINDOW else ""
        raise ArtifactError(
            f"quantize.data: {settings.data or TEXTS}: {len(ids):,} tokens, expected"
            f" {count * WINDOW:,}{wanted}",
            hint,
        )
    starts = np.linspace(0, len(ids) - WINDOW, count).astype(np.int64)
    every = ids[starts[:, None] + np.arange(WINDOW)]
    held_out = np.zeros(count, bool)
    held_out[np.arange(1, held + 1) * count // held - 1] = True
    return every[~held_out], every[held_out]


def _write(files: ModelFiles, beside: Mapping[str, bytes], target: Path) -> int:
    """Write the weights as files.quantization has them, and other files `beside` them; returns the
    bytes of the weights. Raises RunnerError; `target` is written atomically."""
    tensors = files.whole()
    quantization, size = files.quantization, weights_bytes(files.model, schemes_of(tensors))
    with new_folder(target) as fresh:
        require_space(fresh, size)
        write_files(fresh, beside)
        with progress.step("quantize", total=len(tensors), unit="tensors") as step:
            write_quantized(fresh, tensors, files.model, quantization, files.source, step.advance)
    return size


def _write_folder(
    form: ModuleType,
    files: ModelFiles,
    wanted: Quantization,
    beside: Mapping[str, bytes],
    target: Path,
) -> int:
    """Write a folder in another tool's form; returns the bytes of its tensors. Raises
    RunnerError."""
    tensors = files.whole()
    size: int = form.tensors_bytes(files.model, wanted)
    with new_folder(target) as fresh:
        require_space(fresh, size)
        write_files(fresh, beside)
        with progress.step("quantize", total=len(tensors), unit="tensors") as step:
            form.write_folder(
                fresh,
                tensors,
                files.model,
                wanted,
                calibrated=files.held is not None,
                advance=step.advance,
            )
    return size


def _write_gguf(
    files: ModelFiles,
    kind: GGUFKind,
    tokenizer: Mapping[str, Any],
    target: Path,
    importance: Importance | None,
) -> int:
    """Write a GGUF file; returns the bytes of its tensors. Raises RunnerError."""
    tensors = files.whole()
    with progress.step("quantize", total=len(tensors), unit="tensors") as step:
        return write_gguf(
            target,
            tensors,
            files.model,
            kind,
            tokenizer,
            step.advance,
            search=searched,
            importance=importance,
            finer=files.quantization.finer,
        )


def _check_target(target: Path, overwrite: bool) -> None:
    """Raise ConfigError where something is in the way that overwrite=true does not cover."""
    check_folder(target, overwrite)
    check_replaced(target, "a quantized checkpoint", ours=_is_written_here(target))


def _is_written_here(target: Path) -> bool:
    if (target / MANIFEST).is_file():
        return True
    layout = layout_in(target)
    ours = layout is not None and layout.method == compressed_tensors.FORMAT
    return ours or (target / golden_stick.FILE).is_file()
