"""Tables and traces of recordings, those of the processes of a job together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from lite_runner.records import dataclass

PHASES = (
    *("start", "import", "meet", "plan", "read", "pack", "compile", "prefill", "decode", "sample"),
    *("gather", "write", "ranks"),
)
RANKS = "ranks"  # the launcher's phase while they work
REQUEST = "request"
Event = tuple[str, str, float, float, Mapping[str, Any]]  # name, phase, began, ended, more
_THREADS = {"native": 2, "collective": 2}
_KERNELS = ["native kernels", "calls", "seconds", "GB/s", "of measured", "GMAC/s", "of measured"]


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """A collective between ranks, all calls of it."""

    name: str
    calls: int
    seconds: float
    waiting_s: float | None  # of these, until the last rank had come; None: not known
    bytes: int  # that this rank gave

    @property
    def moving_s(self) -> float | None:
        return None if self.waiting_s is None else self.seconds - self.waiting_s

    def plus(self, other: CollectiveTime | None) -> CollectiveTime:
        """Both together."""
        if other is None:
            return self
        waits = (self.waiting_s, other.waiting_s)
        return CollectiveTime(
            name=self.name,
            calls=self.calls + other.calls,
            seconds=self.seconds + other.seconds,
            waiting_s=None if None in waits else sum(one or 0.0 for one in waits),
            bytes=self.bytes + other.bytes,
        )


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """Native layers, one or all of a kind."""

    name: str
    calls: int
    seconds: float  # without collectives
    bytes: int  # read: weights, keys and values
    macs: int

    @property
    def bytes_s(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def macs_s(self) -> float:
        return self.macs / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class RequestTime:
    """HTTP requests to a path, which overlap."""

    name: str
    requests: int
    seconds: float
    longest_s: float

    def plus(self, other: RequestTime | None) -> RequestTime:
        """Both together."""
        if other is None:
            return self
        return RequestTime(
            name=self.name,
            requests=self.requests + other.requests,
            seconds=self.seconds + other.seconds,
            longest_s=max(self.longest_s, other.longest_s),
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The tables of a profile."""

    seconds: float  # from the start of the process
    phases: Mapping[str, float]  # seconds of each, without those inside it
    steps: Mapping[str, float]
    kernels: Sequence[KernelTime]  # by kind
    layers: Sequence[KernelTime]
    collectives: Sequence[CollectiveTime]  # with other ranks
    requests: Sequence[RequestTime]  # of a server
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
            "collectives": [{**asdict(one), "moving_s": one.moving_s} for one in self.collectives],
            "requests": [asdict(one) for one in self.requests],
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
        if self.requests:
            rows = [["requests", "count", "seconds each", "longest"]]
            for one in self.requests:
                each = f"{one.seconds / one.requests:.3f}"
                rows.append([one.name, str(one.requests), each, f"{one.longest_s:.3f}"])
            lines += _aligned(rows)
        if not self.kernels:
            return lines
        lines += _aligned([_KERNELS, *self.kernel_rows()])
        if self.bandwidth:
            lines.append(f"measured: {self.measured()}")
        return lines

    def kernel_rows(self) -> list[list[str]]:
        return [
            [
                one.name,
                str(one.calls),
                f"{one.seconds:.3f}",
                f"{one.bytes_s / 1e9:.1f}",
                f"{one.bytes_s / self.bandwidth:.0%}" if self.bandwidth else "-",
                f"{one.macs_s / 1e9:.1f}",
                f"{one.macs_s / self.peak:.0%}" if self.peak else "-",
            ]
            for one in self.kernels
        ]

    def measured(self) -> str:
        """Measured bandwidth and peak of this machine."""
        return (
            f"{self.bandwidth / 1e9:.1f} GB/s read by all threads,"
            f" {self.peak / 1e9:.1f} GMAC/s of float32 products"
        )


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process of a job that was recorded."""

    name: str
    machine: str  # whose clock it has
    met: float  # when it left the last collective of all ranks, on its clock; 0: it took no part
    began: float
    profile: Profile
    events: Sequence[Event]

    def to_bytes(self) -> bytes:
        """ASCII JSON."""
        return json.dumps({**vars(self), "profile": asdict(self.profile)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Process:
        raw = json.loads(data)
        profile = raw.pop("profile")
        for name in ("kernels", "layers"):
            profile[name] = [KernelTime(**one) for one in profile[name]]
        profile["collectives"] = [CollectiveTime(**one) for one in profile["collectives"]]
        profile["requests"] = [RequestTime(**one) for one in profile["requests"]]
        return cls(profile=Profile(**profile), **raw)

    def shortened(self, count: int) -> Process:
        """This process with the first `count` events alone."""
        left_out = self.profile.events_left_out + max(0, len(self.events) - count)
        profile = replace(self.profile, events_left_out=left_out)
        return replace(self, profile=profile, events=self.events[:count])

    def with_ranks(self, ended: float) -> Process:
        """This launcher, with its ranks at work from its own end to `ended`."""
        began = self.began + self.profile.seconds
        profile = replace(
            self.profile,
            seconds=ended - self.began,
            phases={**self.profile.phases, RANKS: ended - began},
        )
        event = (RANKS, RANKS, began, ended, dict[str, Any]())
        return replace(self, profile=profile, events=[*self.events, event])


def with_rates(ranks: Sequence[Process]) -> list[Process]:
    """Each with the most that one of them has measured: with fewer cores than ranks some had to
    wait for others."""
    bandwidth = max(one.profile.bandwidth for one in ranks)
    peak = max(one.profile.peak for one in ranks)
    return [
        replace(one, profile=replace(one.profile, bandwidth=bandwidth, peak=peak)) for one in ranks
    ]


def job_profile(processes: Sequence[Process]) -> dict[str, Any]:
    pairs = zip(processes, _starts(processes), strict=True)
    return {
        "seconds": max(start + one.profile.seconds for one, start in pairs),
        "processes": [{"name": one.name, **one.profile.to_json()} for one in processes],
    }


def job_table(processes: Sequence[Process]) -> list[str]:
    every = [(one.name, one.profile) for one in processes]
    phases = [name for name in (*PHASES, "other") if any(name in one.phases for _, one in every)]
    rows = [["seconds", *phases, "whole process"]]
    for name, one in every:
        spent = [f"{one.phases[phase]:.3f}" if phase in one.phases else "-" for phase in phases]
        rows.append([name, *spent, f"{one.seconds:.3f}"])
    lines = _aligned(rows)
    rows = [["forward passes", "steps", "prompt tokens", "new tokens", "seconds"]]
    for name, one in every:
        if one.steps["steps"]:
            counts = [f"{one.steps[key]:.0f}" for key in ("steps", "prompt_tokens", "new_tokens")]
            rows.append([name, *counts, f"{one.steps['forward_s']:.3f}"])
    lines += _aligned(rows) if rows[1:] else []
    rows = [[f"{name} {kernel}", *row] for name, one in every for kernel, *row in one.kernel_rows()]
    lines += _aligned([_KERNELS, *rows]) if rows else []
    rows = [["collectives", "calls", "seconds", "waiting", "moving", "MB"]]
    for name, one in every:
        for each in one.collectives:
            parts = (each.seconds, each.waiting_s, each.moving_s)
            spent = ["-" if part is None else f"{part:.3f}" for part in parts]
            size = f"{each.bytes / 1e6:.2f}"
            rows.append([f"{name} {each.name}", str(each.calls), *spent, size])
    lines += _aligned(rows) if rows[1:] else []
    if rates := [one.measured() for _, one in every if one.bandwidth]:
        lines.append(f"measured, all ranks at once, the fastest: {rates[-1]}")
    return lines


def trace(processes: Sequence[Process]) -> str:
    """The events as Chrome's trace format, which Perfetto reads; times since the first of them
    began."""
    events: list[dict[str, Any]] = []
    starts = _starts(processes)
    for pid, (process, start) in enumerate(zip(processes, starts, strict=True), 1):
        names = [("process_name", 0, process.name), ("thread_name", 1, "run")]
        for kind, tid, name in (*names, ("thread_name", 2, "native kernels")):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}})
        shift = start - process.began
        in_order = sorted(process.events, key=lambda one: one[2])
        for id, (name, phase, began, ended, more) in enumerate(in_order):
            one = {"pid": pid, "tid": _THREADS.get(phase, 1), "cat": phase, "name": name}
            start, dur = (round(each * 1e6, 3) for each in (began + shift, ended - began))
            if phase == REQUEST:  # they overlap
                first = {**one, "ph": "b", "id": id, "ts": start, "args": dict(more)}
                events += [first, {**one, "ph": "e", "id": id, "ts": start + dur}]
            else:
                events.append({**one, "ph": "X", "ts": start, "dur": dur, "args": dict(more)})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _starts(processes: Sequence[Process]) -> list[float]:
    """Start of each process, in seconds after the first of them.

    Processes of a machine have one clock. That of another is compared where all ranks left their
    last collective.
    """
    clock = next((one for one in processes if one.met), processes[0])
    starts = [
        one.began + (0.0 if one.machine == clock.machine else clock.met - one.met)
        for one in processes
    ]
    return [start - min(starts) for start in starts]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, figures on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
