"""Profile of a process: phases, steps of the scheduler, native layers; as tables and as a trace.

One recorder at a time. Who has something to record asks `profiler.recorder`, which is None as long
as nobody records: one look at a variable, a few times a step of some milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.records import dataclass

MOST_EVENTS = 200_000  # of a trace; the tables count what comes after them too
PHASES = ("start", "plan", "read", "pack", "compile", "prefill", "decode", "sample", "write")
_STEPS = {"pack": "pack", "load": "read", "make": "read", "download": "read", "compile": "compile"}
recorder: Recorder | None = None
folder: Path | None = None  # of the traces, in a run with profile=true


class LayerTime(ctypes.Structure):
    """What a native layer has taken so far (src/layers.h); times are in nanoseconds."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("spent", "calls", "tokens", "seen", "read", "began", "ended")
    ]


@dataclass(frozen=True)
class LayerCost:
    """What a call of a native layer reads and computes."""

    name: str  # attention 0
    kind: str
    weights: int  # bytes read by each call
    macs: int  # multiply-adds of a token
    seen_macs: int = 0  # of a token and a key that it sees
    key_bytes: int = 0  # of a key with its value, as cached
    share: Callable[[float], float] | None = None  # of the weights, by tokens of a call; None: all


@dataclass
class _Layers:
    costs: Sequence[LayerCost]
    times: Any  # an array of LayerTime


@dataclass
class _Open:
    phase: str
    began: float
    inside: float = 0.0  # seconds of phases inside this one


@dataclass
class _Steps:
    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    forward_s: float = 0.0
    sample_s: float = 0.0


class Recorder:
    """Records from its making on, or from the `began` (time.perf_counter()) that it is given."""

    def __init__(self, began: float | None = None) -> None:
        self.began = time.perf_counter() if began is None else began
        self.ended = 0.0
        self._phases: dict[str, float] = {}
        self._events: list[tuple[str, str, float, float, Mapping[str, Any]]] = []
        self._open: list[_Open] = []
        self._owner = threading.get_ident()
        self._steps = _Steps()
        self._layers: list[_Layers] = []
        self._left_out = 0

    @contextmanager
    def phase(self, name: str, event: str = "") -> Iterator[None]:
        """A phase of this thread; what is recorded inside does not count to it."""
        self._open.append(_Open(name, time.perf_counter()))
        try:
            yield
        finally:
            one = self._open.pop()
            self.slice(event or name, name, one.began, time.perf_counter(), inside=one.inside)

    def slice(
        self,
        event: str,
        phase: str,
        began: float,
        ended: float,
        *,
        inside: float = 0.0,
        **more: Any,
    ) -> None:
        """A part of a phase that is over, with what the trace is to say of it."""
        self._phases[phase] = self._phases.get(phase, 0.0) + ended - began - inside
        if self._open and threading.get_ident() == self._owner:
            self._open[-1].inside += ended - began
        self._event(event, phase, began, ended, more)

    def step(
        self, began: float, computed: float, ended: float, rows: int, prompt: int, new: int
    ) -> None:
        """A step of the scheduler: forward until `computed`, then sampling. Its tokens of prompts
        and new ones have equal shares."""
        steps, tokens = self._steps, max(1, prompt + new)
        steps.steps += 1
        steps.rows += rows
        steps.prompt_tokens += prompt
        steps.new_tokens += new
        steps.forward_s += computed - began
        steps.sample_s += ended - computed
        between = began + (computed - began) * prompt / tokens
        more = {"rows": rows, "prompt_tokens": prompt, "new_tokens": new}
        if prompt:
            self.slice("prefill", "prefill", began, between, **more)
        if new or not prompt:
            self.slice("decode", "decode", between, computed, **more)
        self.slice("sample", "sample", computed, ended)

    def times_of(self, costs: Sequence[LayerCost]) -> Any:
        """The array that a native model of these layers writes their times to."""
        times = (LayerTime * len(costs))()
        self._layers.append(_Layers(costs, times))
        return times

    def layers(self, times: Any) -> None:
        """The layers of a step that is over, for the trace."""
        if len(self._events) >= MOST_EVENTS:
            self._left_out += len(times)
            return
        (costs,) = (one.costs for one in self._layers if one.times is times)
        for cost, one in zip(costs, times, strict=True):
            self._event(cost.name, "native", one.began / 1e9, one.ended / 1e9, {})

    @property
    def has_layers(self) -> bool:
        """True if native layers were timed."""
        return bool(self._layers)

    def report(self, bandwidth: float = 0.0, peak: float = 0.0) -> Profile:
        """What was recorded until now. `bandwidth`, `peak`: bytes and multiply-adds per second that
        this machine was measured to have; 0: not measured."""
        ended = self.ended or time.perf_counter()
        known = {name: self._phases[name] for name in PHASES if name in self._phases}
        known |= {name: value for name, value in self._phases.items() if name not in known}
        whole = ended - self.began
        kinds: dict[str, _Kind] = {}
        layers: list[KernelTime] = []
        for group in self._layers:
            for cost, times in zip(group.costs, group.times, strict=True):
                if times.calls:
                    one = _Kind().plus(cost, times)
                    kinds.setdefault(cost.kind, _Kind()).plus(cost, times)
                    layers.append(one.time(cost.name))
        return Profile(
            seconds=whole,
            phases={**known, "other": max(0.0, whole - sum(known.values()))},
            steps=dict(vars(self._steps)),
            kernels=[one.time(kind) for kind, one in kinds.items()],
            layers=layers,
            bandwidth=bandwidth,
            peak=peak,
            events_left_out=self._left_out,
        )

    def trace(self) -> str:
        """The events as Chrome's trace format, which Perfetto reads; times since `began`."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in enumerate(("run", "native kernels"), 1)
        ]
        for name, phase, began, ended, more in sorted(self._events, key=lambda one: one[2]):
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": 2 if phase == "native" else 1,
                    "cat": phase,
                    "name": name,
                    "ts": round((began - self.began) * 1e6, 3),
                    "dur": round((ended - began) * 1e6, 3),
                    "args": dict(more),
                }
            )
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})

    def _event(
        self, name: str, phase: str, began: float, ended: float, more: Mapping[str, Any]
    ) -> None:
        if len(self._events) < MOST_EVENTS:
            self._events.append((name, phase, began, ended, more))
        else:
            self._left_out += 1


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """Native layers, one or all of a kind."""

    name: str
    calls: int
    seconds: float
    bytes: int  # read: weights, keys and values
    macs: int

    @property
    def bytes_s(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def macs_s(self) -> float:
        return self.macs / self.seconds if self.seconds else 0.0


@dataclass
class _Kind:
    calls: int = 0
    seconds: float = 0.0
    bytes: int = 0
    macs: int = 0

    def plus(self, cost: LayerCost, times: LayerTime) -> _Kind:
        """With what a layer has done."""
        share = 1.0 if cost.share is None else cost.share(times.tokens / times.calls)
        self.calls += times.calls
        self.seconds += times.spent / 1e9
        self.bytes += round(times.calls * cost.weights * share) + times.read * cost.key_bytes
        self.macs += times.tokens * cost.macs + times.seen * cost.seen_macs
        return self

    def time(self, name: str) -> KernelTime:
        return KernelTime(
            name=name, calls=self.calls, seconds=self.seconds, bytes=self.bytes, macs=self.macs
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The tables of a profile."""

    seconds: float  # from the start of the process
    phases: Mapping[str, float]  # seconds of each, without those inside it
    steps: Mapping[str, float]
    kernels: Sequence[KernelTime]  # by kind
    layers: Sequence[KernelTime]
    bandwidth: float  # bytes/s of this machine; 0: not measured
    peak: float  # multiply-adds/s
    events_left_out: int  # of the trace

    def to_json(self) -> dict[str, Any]:
        """Plain data, of rates too."""

        def row(one: KernelTime) -> dict[str, Any]:
            return {
                "name": one.name,
                "calls": one.calls,
                "seconds": one.seconds,
                "bytes_s": one.bytes_s,
                "macs_s": one.macs_s,
            }

        return {
            "seconds": self.seconds,
            "phases": dict(self.phases),
            "steps": dict(self.steps),
            "kernels": [row(one) for one in self.kernels],
            "layers": [row(one) for one in self.layers],
            "bandwidth": self.bandwidth,
            "peak_macs_s": self.peak,
            "events_left_out": self.events_left_out,
        }

    def table(self) -> list[str]:
        """As lines of text."""
        rows = [["phase", "seconds", "share"]]
        for name, seconds in self.phases.items():
            rows.append([name, f"{seconds:.3f}", f"{seconds / self.seconds:.1%}"])
        rows.append(["whole process", f"{self.seconds:.3f}", ""])
        lines = _aligned(rows)
        if self.steps["steps"]:
            lines.append(
                "{steps:.0f} steps of {rows:.0f} rows: {prompt_tokens:.0f} tokens of prompts and"
                " {new_tokens:.0f} new ones".format(**self.steps)
            )
        if not self.kernels:
            return lines
        head = [
            "native kernels",
            "calls",
            "seconds",
            "GB/s",
            "of measured",
            "GMAC/s",
            "of measured",
        ]
        rows = [head]
        for one in self.kernels:
            rows.append(
                [
                    one.name,
                    str(one.calls),
                    f"{one.seconds:.3f}",
                    f"{one.bytes_s / 1e9:.1f}",
                    f"{one.bytes_s / self.bandwidth:.0%}" if self.bandwidth else "-",
                    f"{one.macs_s / 1e9:.1f}",
                    f"{one.macs_s / self.peak:.0%}" if self.peak else "-",
                ]
            )
        lines += _aligned(rows)
        if self.bandwidth:
            lines.append(
                f"measured: {self.bandwidth / 1e9:.1f} GB/s read by all threads,"
                f" {self.peak / 1e9:.1f} GMAC/s of float32 products"
            )
        return lines


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, figures on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


def _process_start() -> float:
    """The start of this process as time.perf_counter() counts."""
    now = time.perf_counter()
    with Path("/proc/self/stat").open(encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now - max(0.0, age)


def start(*, whole_process: bool = False) -> Recorder:
    """Record from now on, or with `whole_process` from the process's start, until `stop`."""
    global recorder
    began = _process_start() if whole_process else None
    recorder = Recorder(began)
    if began is not None:
        recorder.slice("start", "start", began, time.perf_counter())
    progress.observe(_observed)
    return recorder


def stop() -> Recorder | None:
    """Stop recording; what was recorded, None where nothing was."""
    global recorder
    found, recorder = recorder, None
    progress.observe(None)
    if found is not None:
        found.ended = time.perf_counter()
    return found


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A phase, where somebody records."""
    if recorder is None:
        yield
        return
    with recorder.phase(name):
        yield


@contextmanager
def _observed(name: str) -> Iterator[None]:
    """A step of the progress, as a phase if it is one."""
    found = _STEPS.get(name.partition(" ")[0])
    if recorder is None or found is None:
        yield
        return
    with recorder.phase(found, name):
        yield
