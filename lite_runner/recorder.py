"""The recorder of what a process does: phases, steps of the scheduler, native layers, collectives,
requests. profiler.py has the one that records."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lite_runner.profile import (
    PHASES,
    REQUEST,
    CollectiveTime,
    Event,
    KernelTime,
    Process,
    Profile,
    RequestTime,
)
from lite_runner.records import dataclass

_LAYER = ("spent", "calls", "tokens", "seen", "read", "began", "ended")
_EXCHANGES = ("calls", "spent", "waited", "bytes", "began", "ended", "last_waited")


class ExchangeTime(ctypes.Structure):
    """Time of a native layer's exchanges with other ranks so far (src/layers.h)."""

    _fields_ = [(name, ctypes.c_int64) for name in _EXCHANGES]


class LayerTime(ctypes.Structure):
    """Time of a native layer so far (src/layers.h), in nanoseconds."""

    _fields_ = [*((name, ctypes.c_int64) for name in _LAYER), ("exchange", ExchangeTime)]


@dataclass(frozen=True)
class LayerCost:
    """Bytes read and multiply-adds computed by a call of a native layer."""

    name: str  # attention 0
    kind: str
    weights: int  # bytes read by each call
    macs: int  # multiply-adds of a token
    seen_macs: int = 0  # of a token and a key that it sees
    key_bytes: int = 0  # of a key with its value, as cached
    share: Callable[[float], float] | None = None  # of the weights, by tokens of a call; None: all
    collective: str = "all_reduce"  # of what ranks that share the layer compute of it


@dataclass
class _Layers:
    costs: Sequence[LayerCost]
    times: Any  # an array of LayerTime
    waiting_known: bool  # time that exchanges waited for other ranks


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

    def __init__(self, began: float | None, most_events: int) -> None:
        self.began = time.perf_counter() if began is None else began
        self.most_events = most_events
        self.ended = 0.0
        self._phases: dict[str, float] = {}
        self._events: list[Event] = []
        self._collectives: dict[str, CollectiveTime] = {}
        self._requests: dict[str, RequestTime] = {}
        self._open: list[_Open] = []
        self._owner = threading.get_ident()
        self._steps = _Steps()
        self._layers: list[_Layers] = []
        self._left_out = 0
        self._copies: list[tuple[Any, bytes]] = []  # the times of a step's layers, as they were
        self._copied = 0  # layers in these

    @contextmanager
    def phase(self, name: str, event: str = "") -> Iterator[None]:
        """A phase of this thread; phases inside it do not count to it."""
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
        """A finished part of a phase, with its arguments in the trace."""
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

    def gathered(self, began: float, met: float, ended: float, size: int) -> None:
        """Record a collective of all ranks: it waited for the last rank until `met`, and this rank
        gave `size` bytes."""
        more = {"waiting_ms": (met - began) * 1e3, "bytes": size}
        self.slice("gather", "gather", began, ended, **more)
        one = CollectiveTime(
            name="gather", calls=1, seconds=ended - began, waiting_s=met - began, bytes=size
        )
        self._collectives["gather"] = one.plus(self._collectives.get("gather"))

    def request(self, name: str, began: float, ended: float, **more: Any) -> None:
        """An HTTP request that was answered; one that began before is there from the beginning."""
        began = max(began, self.began)
        self._event(name, REQUEST, began, ended, more)
        one = RequestTime(name=name, requests=1, seconds=ended - began, longest_s=ended - began)
        self._requests[name] = one.plus(self._requests.get(name))

    def times_of(self, costs: Sequence[LayerCost], *, waiting_known: bool = True) -> Any:
        """The array that a native model of these layers writes their times to; `waiting_known`: of
        exchanges between ranks, how long they waited."""
        times = (LayerTime * len(costs))()
        self._layers.append(_Layers(costs, times, waiting_known))
        return times

    def layers(self, times: Any) -> None:
        """The layers of a step that is over, for the trace."""
        if self._room() <= 0:
            self._left_out += len(times)
            return
        # Events are made of it in `report`: many a step, they would cost a rank some percent.
        self._copies.append((times, bytes(times)))
        self._copied += len(times)

    def _room(self) -> int:
        return self.most_events - len(self._events) - self._copied

    def _layer_events(self) -> Iterator[Event]:
        """Of the steps whose layers were recorded."""
        for times, copied in self._copies:
            (group,) = (one for one in self._layers if one.times is times)
            then = (LayerTime * len(group.costs)).from_buffer_copy(copied)
            for cost, one in zip(group.costs, then, strict=True):
                yield cost.name, "native", one.began / 1e9, one.ended / 1e9, {}
                last = one.exchange
                if last.began >= one.began > 0:
                    waiting = {"waiting_ms": last.last_waited / 1e6} if group.waiting_known else {}
                    began, ended = last.began / 1e9, last.ended / 1e9
                    yield cost.collective, "collective", began, ended, waiting

    @property
    def has_layers(self) -> bool:
        """True if native layers were timed."""
        return bool(self._layers)

    def report(self, bandwidth: float = 0.0, peak: float = 0.0) -> Profile:
        """The profile so far. `bandwidth`, `peak`: bytes and multiply-adds per second that this
        machine was measured to have; 0: not measured."""
        ended = self.ended or time.perf_counter()
        known = {name: self._phases[name] for name in PHASES if name in self._phases}
        known |= {name: value for name, value in self._phases.items() if name not in known}
        whole = ended - self.began
        kinds: dict[str, _Kind] = {}
        layers: list[KernelTime] = []
        collectives = dict[str, CollectiveTime]()
        for group in self._layers:
            for cost, times in zip(group.costs, group.times, strict=True):
                if times.exchange.calls:
                    exchanged = _collective(cost.collective, times.exchange, group.waiting_known)
                    found = collectives.get(cost.collective)
                    collectives[cost.collective] = exchanged.plus(found)
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
            collectives=[*(collectives | self._collectives).values()],
            requests=[*self._requests.values()],
            bandwidth=bandwidth,
            peak=peak,
            events_left_out=self._left_out,
        )

    def process(
        self, name: str, bandwidth: float = 0.0, peak: float = 0.0, *, met: float = 0.0
    ) -> Process:
        """The profile as one of a job's processes; `met`: when this one and the others left the
        last collective (time.perf_counter())."""
        return Process(
            name=name,
            machine=os.uname().nodename,
            met=met,
            began=self.began,
            profile=self.report(bandwidth, peak),
            events=[*self._events, *self._layer_events()],
        )

    def _event(
        self, name: str, phase: str, began: float, ended: float, more: Mapping[str, Any]
    ) -> None:
        if self._room() > 0:
            self._events.append((name, phase, began, ended, more))
        else:
            self._left_out += 1


def _collective(name: str, time: ExchangeTime, waiting_known: bool) -> CollectiveTime:
    """A native layer's exchanges as a collective; `waiting_known`: with their waiting."""
    return CollectiveTime(
        name=name,
        calls=time.calls,
        seconds=time.spent / 1e9,
        waiting_s=time.waited / 1e9 if waiting_known else None,
        bytes=time.bytes,
    )


@dataclass
class _Kind:
    calls: int = 0
    seconds: float = 0.0
    bytes: int = 0
    macs: int = 0

    def plus(self, cost: LayerCost, times: LayerTime) -> _Kind:
        """Add the work of a layer."""
        share = 1.0 if cost.share is None else cost.share(times.tokens / times.calls)
        self.calls += times.calls
        self.seconds += (times.spent - times.exchange.spent) / 1e9
        self.bytes += round(times.calls * cost.weights * share) + times.read * cost.key_bytes
        self.macs += times.tokens * cost.macs + times.seen * cost.seen_macs
        return self

    def time(self, name: str) -> KernelTime:
        return KernelTime(
            name=name, calls=self.calls, seconds=self.seconds, bytes=self.bytes, macs=self.macs
        )
