"""Disturbs a server under load: `python -m fuzz.chaos` (make chaos).

It is stopped, short of memory and of disk, killed and started again, its adapters are swapped and
its clock is moved; then the same befalls two replicas on Ray, but for the clock. Every answer has
to be the one that the request gets alone, or an error that says so: a status and a message, or a
connection that ends early. A wrong text, a stream that ends as if it were whole, or no answer in a
minute is a finding.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import random
import re
import resource
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM
from typing import Any

import httpx2
import psutil

from lite_runner.native.fingerprint import compiler
from tests.doc_folder import write_adapter
from tests.paths import ROOT
from tests.tiny_gguf import write_tiny_gguf

HANG_S = 60.0
REPLACED_S = 300.0  # Ray starts another process, with a model of its own
ATTEMPTS = 3  # to start it
TOO_SLOW = "The current node timed out during startup"  # after 30 s, which are in Ray's code
CLIENTS = 6
ADAPTERS = ("first", "second")  # folders of what is served as SWAPPED in turn
SWAPPED = "swapped"
OPTIONS = (
    *("run_mode=serve", "model=tiny.gguf", "serve.port=0", "seed=1", "prefix_cache=disk"),
    *("adapter_path=first", "serve.load_adapters=true", "adapter_root=.", "max_loaded_adapters=3"),
)
RAY = ("serve.engine=ray", "serve.replicas=2", "context.threads=1")
LARGE = 8_000_000  # bytes of a prompt that a server without free memory cannot read
DAY = 86400
# Loaded before libc: the time of day is what that says, and as many seconds more as a file holds.
CLOCK = """
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static const volatile long* moved;
__attribute__((constructor)) static void start() {
  void* place = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, open(getenv("CLOCK"), O_RDONLY), 0);
  if (place == MAP_FAILED) abort();
  moved = (const volatile long*)place;
}
extern "C" int clock_gettime(clockid_t id, struct timespec* now) noexcept {
  typedef int (*Real)(clockid_t, struct timespec*);
  static Real real = (Real)dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(id, now);
  if (!code && id == CLOCK_REALTIME && moved) now->tv_sec += *moved;
  return code;
}
extern "C" int gettimeofday(struct timeval* now, void*) noexcept {
  struct timespec exact;
  int code = clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
  return code;
}
extern "C" time_t time(time_t* now) noexcept {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  return now ? *now = exact.tv_sec : exact.tv_sec;
}
"""


class Chaos:
    """One server, clients that compare its answers, and what was found."""

    def __init__(self, folder: Path, seed: int, seconds: float, ray: Path | None) -> None:
        """`ray`: a Python with Ray, for a server of two replicas."""
        self.folder, self.seconds, self._ray = folder, seconds, ray
        self.findings: list[str] = []
        self.done: dict[str, Counter[str]] = {}  # fault -> outcomes
        self._random = random.Random(seed)
        self._bodies = [self._body(number) for number in range(12)]
        self._alone: dict[str, set[str]] = {}  # body -> texts that are right
        self._outcomes: Counter[str] = Counter()

    async def run(self) -> None:
        """Every fault in turn."""
        self._start()
        try:
            async with httpx2.AsyncClient(timeout=HANG_S) as http:
                await self._learn(http)
                if nicer := {process.nice() for process in self._computing()} - {os.nice(0)}:
                    self.findings.append(f"a lower priority than other processes: nice {nicer}")
                for fault in (self.stopped, self.short_of_disk, self.adapters_swapped):
                    await self._under(fault, http)
                killed = self.replica_killed if self._ray else self.killed
                for fault in (self.short_of_memory, killed):
                    await self._under(fault, http)
                    await self._under(self.undisturbed, http)
                if not self._ray:
                    await self._under(self.clock_moved, http)
                self._process.send_signal(SIGTERM)
                if code := await asyncio.to_thread(self._process.wait, HANG_S):
                    self.findings.append(f"the end: exit code {code}")
        finally:
            self._process.kill()
            self._process.wait()

    async def undisturbed(self, http: httpx2.AsyncClient) -> None:
        """Afterwards everything is answered again."""
        await asyncio.sleep(self.seconds)

    async def stopped(self, http: httpx2.AsyncClient) -> None:
        """The process does not run for a while, three times."""
        for _ in range(3):
            for signal in (SIGSTOP, SIGCONT):
                for process in self._computing():
                    process.send_signal(signal)
                await asyncio.sleep(self.seconds / 6)

    async def killed(self, http: httpx2.AsyncClient) -> None:
        """Killed in the middle of answers, then started again on what it left."""
        await asyncio.sleep(self.seconds / 2)
        await self._answered()
        self._process.send_signal(SIGKILL)
        self._process.wait()
        await asyncio.sleep(0.2)
        await asyncio.to_thread(self._start)
        await self._load(http, ADAPTERS[0])

    async def replica_killed(self, http: httpx2.AsyncClient) -> None:
        """Killed in the middle of answers, until there is another one."""
        await asyncio.sleep(self.seconds / 2)
        await self._answered()
        before = self._computing()
        before[0].kill()
        ends = time.monotonic() + REPLACED_S
        while not (len(after := self._computing()) == len(before) and before[0] not in after):
            assert time.monotonic() < ends, "the replica was not replaced"
            await asyncio.sleep(0.1)
        self._outcomes["replaced"] += 1

    async def clock_moved(self, http: httpx2.AsyncClient) -> None:
        """The time of day is that of tomorrow, then of yesterday, while all else goes on."""
        for moved in (DAY, -DAY, 0):
            with self._clock.open("r+b") as clock:  # which the server has mapped: never cut
                clock.write(bytes(ctypes.c_long(moved)))
            answer = await http.post(f"{self._url}/v1/completions", json=self._bodies[0])
            told = answer.json().get("created", 0) - time.time()
            if abs(told - moved) > HANG_S:
                self.findings.append(f"clock moved: by {told:.0f} s, expected {moved}")
            await asyncio.sleep(self.seconds / 3)

    async def short_of_disk(self, http: httpx2.AsyncClient) -> None:
        """No file may grow: neither the log nor cached prefixes."""
        with self._limited(resource.RLIMIT_FSIZE, 0):
            await asyncio.sleep(self.seconds)

    async def short_of_memory(self, http: httpx2.AsyncClient) -> None:
        """No more address space than it has now: what needs none goes on, and what does is told."""
        with self._limited(resource.RLIMIT_AS, None):
            if self._ray is None:  # replicas may end then
                await self._large(http)
            await asyncio.sleep(self.seconds)

    async def _large(self, http: httpx2.AsyncClient) -> None:
        """A body for which there is no memory."""
        body = {"model": "tiny", "prompt": "a" * LARGE, "max_tokens": 1}
        answer = await http.post(f"{self._url}/v1/completions", json=body)
        if answer.status_code == 503 and "memory" in answer.json()["error"]["message"]:
            self._outcomes["out of memory"] += 1
        else:
            self.findings.append(f"short of memory: {answer.status_code} {answer.text[:200]}")

    async def adapters_swapped(self, http: httpx2.AsyncClient) -> None:
        """Another adapter under the same name, again and again."""
        ends, place = time.monotonic() + self.seconds, 0
        while time.monotonic() < ends:
            place += 1
            await http.post(f"{self._url}/v1/unload_lora_adapter", json={"lora_name": SWAPPED})
            await self._load(http, ADAPTERS[place % 2])
            self._outcomes["swaps"] += 1

    @contextmanager
    def _limited(self, kind: int, most: int | None) -> Iterator[None]:
        """`most`: None: what each process has."""
        limited = self._computing()
        before = resource.prlimit(limited[0].pid, kind)
        for process in limited:
            has = process.memory_info().vms if most is None else most
            resource.prlimit(process.pid, kind, (has, before[1]))
        try:
            yield
        finally:
            for process in limited:
                with suppress(ProcessLookupError):  # it has ended, and Ray has started another one
                    resource.prlimit(process.pid, kind, before)

    def _computing(self) -> list[psutil.Process]:
        """The processes with a model: the server, or its replicas."""
        server = psutil.Process(self._process.pid)
        if self._ray is None:
            return [server]
        found = []
        for process in server.children(recursive=True):
            with suppress(psutil.Error):  # it ends
                if "".join(process.cmdline()).startswith("ray::ServeReplica:"):
                    found.append(process)
        return found

    def _start(self) -> None:
        command = [self._ray or sys.executable, ROOT / "run_lite.py", *OPTIONS]
        environment = {**os.environ, "LITE_RUNNER_CACHE": str(self.folder / "cache")}
        if self._ray:
            command += RAY
            environment |= {"RAY_TMPDIR": str(self.folder), "RAY_USAGE_STATS_ENABLED": "0"}
            environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        else:  # Ray waits for times of day, which the kernel knows and the library does not move
            environment |= {"LD_PRELOAD": str(self._library()), "CLOCK": str(self._clock)}
        for _ in range(ATTEMPTS):
            if TOO_SLOW not in (said := self._started(command, environment)):
                break
        assert not said, f"the server did not start: {said}"

    def _started(self, command: list[Any], environment: dict[str, str]) -> str:
        """Empty once it answers; otherwise the last that it has said."""
        self._process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        lines, found, seen = self._process.stderr, None, deque[str](maxlen=30)
        while found is None:
            if not (line := lines.readline()):
                return "".join(seen)
            seen.append(line)
            found = re.search(r"on (http://\S+)", line)
        self._url = found[1]
        threading.Thread(target=lambda: deque(lines, 0), daemon=True).start()
        return ""

    @property
    def _clock(self) -> Path:
        """The seconds by which the server's time of day is wrong."""
        return self.folder / "clock"

    def _library(self) -> Path:
        """CLOCK, compiled once."""
        library = self.folder / "clock.so"
        if not library.exists():
            self._clock.write_bytes(bytes(ctypes.c_long(0)))
            source = self.folder / "clock.cc"
            source.write_text(CLOCK)
            flags = ("-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl")
            subprocess.run([*compiler(), *flags], check=True)
        return library

    async def _learn(self, http: httpx2.AsyncClient) -> None:
        """Answers that every request gets alone, with either adapter."""
        for adapter in ADAPTERS:
            await http.post(f"{self._url}/v1/unload_lora_adapter", json={"lora_name": SWAPPED})
            await self._load(http, adapter)
            for body in self._bodies:
                answer = await http.post(f"{self._url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                text = answer.json()["choices"][0]["text"]
                self._alone.setdefault(json.dumps(body), set()).add(text)

    async def _load(self, http: httpx2.AsyncClient, adapter: str) -> None:
        made = {"lora_name": SWAPPED, "lora_path": adapter}
        answer = await http.post(f"{self._url}/v1/load_lora_adapter", json=made)
        assert answer.status_code == 200, answer.text

    def _body(self, number: int) -> dict[str, Any]:
        return {
            "model": ("tiny", "first", SWAPPED)[number % 3],
            "prompt": [self._random.randint(97, 122) for _ in range(self._random.randint(1, 60))],
            "max_tokens": self._random.randint(20, 60),
            "seed": number,
            "temperature": number % 2 * 1.5,
        }

    async def _under(
        self, fault: Callable[[httpx2.AsyncClient], Awaitable[None]], http: httpx2.AsyncClient
    ) -> None:
        """A fault while clients ask."""
        self._outcomes = self.done.setdefault(fault.__name__, Counter())
        over = asyncio.Event()
        clients = [asyncio.create_task(self._client(http, over)) for _ in range(CLIENTS)]
        try:
            await fault(http)
            if self._ray:
                await self._all_ready(http)
            await self._answered()
        finally:
            over.set()
            await asyncio.gather(*clients)
        outcomes = " ".join(f"{kind}={count}" for kind, count in sorted(self._outcomes.items()))
        print(f"{fault.__name__.replace('_', ' ')}: {outcomes}", flush=True)
        harmless = ("undisturbed", "stopped", "clock_moved")
        if fault.__name__ in harmless and self._outcomes.keys() - {"right"}:
            self.findings.append(f"{fault.__name__}: not every request was answered")

    async def _answered(self) -> None:
        """Until a client has its answer, however busy the machine is."""
        ends = time.monotonic() + HANG_S
        while not self._outcomes["right"] and time.monotonic() < ends:
            await asyncio.sleep(0.01)

    async def _all_ready(self, http: httpx2.AsyncClient) -> None:
        """Until each replica has its model: too little memory ends both, one after the other."""
        ends = time.monotonic() + REPLACED_S
        while True:
            answer = await http.get(f"{self._url}/metrics")
            if len(set(re.findall(r'replica="(\w+)"', answer.text))) == 2:
                return
            assert time.monotonic() < ends, "no second replica"
            await asyncio.sleep(0.1)

    async def _client(self, http: httpx2.AsyncClient, over: asyncio.Event) -> None:
        while not over.is_set():
            body = self._random.choice(self._bodies)
            try:
                asked = self._streamed if self._random.random() < 0.5 else self._whole
                outcome = await asked(http, body)
            except httpx2.TimeoutException:
                outcome = "hang"
            except httpx2.TransportError:
                outcome = "cut off"
                await asyncio.sleep(0.05)
            self._outcomes[outcome] += 1
            if outcome not in ("right", "refused", "cut off"):
                self.findings.append(f"{outcome}: {json.dumps(body)}")

    async def _whole(self, http: httpx2.AsyncClient, body: dict[str, Any]) -> str:
        answer = await http.post(f"{self._url}/v1/completions", json=body)
        if answer.status_code != 200:
            return "refused" if answer.json()["error"]["message"] else "refused without a reason"
        right = answer.json()["choices"][0]["text"] in self._alone[json.dumps(body)]
        return "right" if right else "wrong"

    async def _streamed(self, http: httpx2.AsyncClient, body: dict[str, Any]) -> str:
        text, ended, told = "", False, False
        asked = {**body, "stream": True}
        async with http.stream("POST", f"{self._url}/v1/completions", json=asked) as answer:
            if answer.status_code != 200:
                return "refused"
            async for line in answer.aiter_lines():
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    told = told or "error" in chunk
                    text += "".join(choice["text"] for choice in chunk.get("choices", ()))
        if told:
            return "refused"
        if not ended:
            return "a stream that ends too early"
        return "right" if text in self._alone[json.dumps(body)] else "wrong"


def chaos(folder: Path, seed: int, seconds: float, ray: Path | None = None) -> Chaos:
    """A server in `folder`, or replicas on Ray, with each fault for so long."""
    write_tiny_gguf(folder / "tiny.gguf")
    for number, name in enumerate(ADAPTERS):
        write_adapter(folder / name, number)
    made = Chaos(folder, seed, seconds, ray)
    asyncio.run(made.run())
    return made


def main() -> int:
    """1 where anything was found."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each fault (10)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    given = parser.parse_args()
    print(f"seed {given.seed}")
    found = []
    for ray in (None, ROOT / ".venv-ray/bin/python"):
        if ray is not None:
            print("replicas on Ray")
        # Ray's sockets are below it, and their paths must be short.
        with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as folder:
            found += chaos(Path(folder), given.seed, given.seconds, ray).findings
    print(*dict.fromkeys(found), f"{len(found)} findings", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
