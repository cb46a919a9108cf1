"""Fixtures that tests of several packages share."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import yaml
from hypothesis import settings
from numpy.typing import NDArray

from lite_runner import run_modes
from tests import left_behind
from tests.light_msrun import light_package
from tests.paths import ROOT

if TYPE_CHECKING:
    from lite_runner.architectures.quantization import Quant
    from lite_runner.backends import Backend
    from lite_runner.backends.mindspore.backend import MindSporeBackend
    from lite_runner.backends.native.backend import NativeBackend
    from lite_runner.config.schema import RunConfig
    from lite_runner.config.sections import DType
    from lite_runner.weights import LazyTensor


# Derandomized: a run of the tests says the same today and tomorrow. No deadline: machines differ.
settings.register_profile("tests", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("tests")

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

USERS_CACHE = "users"  # in the cache of a session a link to the user's, for downloads only

# Files of minutes: commands of documents, the kernels compiled once more.
LONGEST = ("test_docs.py", "test_sanitizers.py", "test_arm.py")

# Why tests are left out. Of the first setup.sh says it, where there is no Python 3.7.
NO_ARM = "without a compiler for ARM and qemu-aarch64"
NO_BROWSER = "without a browser"
NO_CLIENTS = "without lm-eval and LangChain"
NO_LITE = "without MindSpore Lite"
NO_MINDFORMERS = "without MindFormers"
NO_RAY = "without Ray"
NO_NETWORK = "without a network"
DOWNLOADS = ("smollm2_gguf", "mindformers_package")  # the fixtures that need one


def pytest_runtest_setup() -> None:
    """Ctrl-C, which tests press, is Python's: a graph of MindSpore leaves a handler that ends
    the process, and a shell that starts the tests in the background has it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """One cache for a session, which its workers inherit: what a user's cache holds decides
    nothing. See smollm2_gguf for what is downloaded."""
    if hasattr(config, "workerinput"):
        return
    from lite_runner.system.files import cache_dir
    from lite_runner.weights.source import PACKAGES

    users = cache_dir().absolute()
    users.mkdir(parents=True, exist_ok=True)
    session = tempfile.TemporaryDirectory(prefix="lite_runner-tests-")
    config.add_cleanup(session.cleanup)
    (Path(session.name) / USERS_CACHE).symlink_to(users)
    os.environ["LITE_RUNNER_CACHE"] = session.name
    config.stash[left_behind.BEFORE] = left_behind.checkout()
    config.stash[left_behind.DOWNLOADS] = left_behind.files(users / PACKAGES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m "not network"` leaves out what is downloaded. The longest files come first: a worker that
    begins one at the end would compute alone."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        if not set(DOWNLOADS).isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("network")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Nothing that is imported is garbage: looking for it takes a third of the time."""
    gc.disable()
    try:
        import_a_share(session.config)
        return (yield)
    finally:
        gc.enable()


def import_a_share(config: pytest.Config) -> None:
    """Each worker of a whole run imports other test files first: pytest rewrites the assertions of
    a file once, and keeps it for the workers that come to it later. Of a fresh checkout that is
    half the time of collecting."""
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    first, step = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    share = sorted((ROOT / "tests").rglob("test_*.py"))[first::step]
    # Before them, as pytest does, what says which other modules' assertions are rewritten.
    for path in [*(ROOT / "tests").rglob("conftest.py"), *share]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # told when it is collected
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """MindSpore collects garbage at each compile; tests and what they import are no garbage. It
    looks for the source of each function anew, too, which does not change. And its first operator
    starts the runtime as it is set up then, whichever test that is of."""
    gc.freeze()
    if "mindspore" in sys.modules:
        source_lines = cache(inspect.getsourcelines)
        inspect.getsourcelines = lambda found: source_lines(getattr(found, "__func__", found))
        from lite_runner.backends.mindspore.device import set_device

        set_device("CPU", 0)


@pytest.fixture(scope="session", autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep session fixtures from writing to the checkout: their working folder is another."""
    os.chdir(tmp_path_factory.mktemp("session"))


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test starts in its tmp_path. What it leaves behind of the environment, as a run on Ascend
    does, of verbosity and of plugins is not the next test's."""
    from lite_runner import plugins, progress

    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    registered = plugins.registered()
    yield
    plugins._registered[:] = registered  # those of a folder that is gone serve nobody
    progress.configure(1)
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def float32_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of backend=native keep keys and values in float32 where kv_cache= does not say, as what
    they are compared with does."""
    monkeypatch.setattr("lite_runner.backends.native.CACHE", "fp32")


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """`cli("model=tiny_llama", ...)` runs run_lite.py in a process of its own, in tmp_path.

    Keywords: `stdin` (text), `cwd`, `env` (changes; None removes a name), `timeout` in seconds.
    """

    def run(
        *arguments: str,
        stdin: str = "",
        cwd: Path = tmp_path,
        env: dict[str, str | None] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        changes = env or {}
        environment = {**os.environ, **{k: v for k, v in changes.items() if v is not None}}
        for name in (name for name, value in changes.items() if value is None):
            environment.pop(name, None)
        return subprocess.run(
            [sys.executable, str(ROOT / "run_lite.py"), *arguments],
            input=stdin,
            cwd=cwd,
            env=environment,
            timeout=timeout,
            capture_output=True,
            encoding="utf-8",
        )

    return run


@pytest.fixture(scope="session")
def resolve() -> Callable[..., RunConfig]:
    """The config of a command line."""
    from lite_runner.config.argv import parse

    return lambda *args: run_modes.resolve(parse(args, run_modes.heads()))[0]


@pytest.fixture(scope="session")
def notes() -> Callable[..., list[str]]:
    """The notes for the user of a command line, in full."""

    from lite_runner import run_modes
    from lite_runner.config.argv import parse

    def run(*args: str) -> list[str]:
        found = run_modes.resolve(parse(args, run_modes.heads()))[1]
        return [note.detail or note.text for note in found]

    return run


@pytest.fixture(scope="session")
def faults() -> Callable[..., str]:
    """The message of a command line that is refused."""

    from lite_runner import run_modes
    from lite_runner.config.argv import parse
    from lite_runner.errors import ConfigError

    def run(*args: str) -> str:
        with pytest.raises(ConfigError) as caught:
            run_modes.resolve(parse(args, run_modes.heads()))
        assert caught.value.exit_code == 2
        return caught.value.message

    return run


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports are kept as they are written: to verify one compiles its graphs once more. For tests
    that compare the tokens of a run or read what is written; run_modes/test_export.py verifies."""
    from lite_runner.backends.lite.export import writer

    monkeypatch.setattr(writer, "verify", lambda *_, **__: None)


@pytest.fixture
def light_msrun(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """See tests/light_msrun.py."""
    monkeypatch.setenv("PYTHONPATH", light_package(tmp_path_factory.mktemp("light")))


@pytest.fixture
def llama_called_mine(write_tiny_llama: Callable[..., Path]) -> Path:
    """A folder of a tiny Llama with a tokenizer, whose config.json has the model_type `mine`: one
    that a plugin has to register."""
    from lite_runner.text.tokenizer import byte_tokenizer
    from tests.tokenizer_files import write_tokenizer

    folder = write_tiny_llama("model")
    write_tokenizer(byte_tokenizer(), folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": "mine"}))
    return folder


@pytest.fixture
def small_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small file of Q4_K and Q6_K blocks, with random weights and a tokenizer."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from published import PUBLISHED, write

    path = tmp_path / "small.gguf"
    sizes = {"layers": 2, "hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64}
    write(path, replace(PUBLISHED["llama_7b"], **sizes, intermediate=1024, vocabulary=2048))
    return path


@pytest.fixture
def write_tiny_llama(tmp_path: Path) -> Callable[..., Path]:
    """`write_tiny_llama("model", sizes, **{name: array})` writes a folder in tmp_path: the
    config.json of model=tiny_llama, `sizes` changed, and its weights in MindFormers' names: random
    but for the arrays given. There is no tokenizer in it."""
    from lite_runner.config.argv import parse
    from lite_runner.run_modes import heads, resolve
    from lite_runner.weights import LazyTensor
    from lite_runner.weights.formats import hf_from_model_config
    from lite_runner.weights.formats.safetensors_file import write_safetensors
    from lite_runner.weights.layouts import expected_tensors

    def write(
        name: str, sizes: Mapping[str, int] | None = None, /, **given: NDArray[np.float32]
    ) -> Path:
        changes = [f"model.model_config.{key}={value}" for key, value in (sizes or {}).items()]
        config, _ = resolve(parse(["model=tiny_llama", "predict_data=x", *changes], heads()))
        model = config.model_config()
        assert model is not None
        folder = tmp_path / name
        folder.mkdir()
        generator = np.random.default_rng(0)
        tensors = {}
        for tensor, shape in expected_tensors(model).items():
            values = given.get(tensor, generator.standard_normal(shape).astype(np.float32))
            tensors[tensor] = LazyTensor(shape, "F32", lambda values=values: values)
        write_safetensors(folder / "model.safetensors", tensors, {})
        (folder / "config.json").write_text(json.dumps(hf_from_model_config(model)))
        return folder

    return write


class Reference:
    """A case of tests/fixtures/reference: a tiny model, and what transformers made of it."""

    def __init__(self, case: str) -> None:
        from lite_runner.weights.checkpoint import model_config_of

        self.folder = ROOT / "tests/fixtures/reference" / case
        config = model_config_of(self.folder)
        assert config is not None
        self.config = config
        expected = dict(np.load(self.folder / "expected.npz"))
        pairs = zip(expected["prompts"], expected["lengths"], strict=True)
        self.prompts = [row[:length].astype(np.int32) for row, length in pairs]
        self.forced = expected["continuations"].astype(np.int32)  # [prompts, steps]
        self.length = max(map(len, self.prompts)) + self.forced.shape[1]
        self.logits = expected["logits"]  # [prompts, steps + 1, vocab]
        # Of transformers' `generate`, for what phi3 computes anew: [prompts, steps].
        self.generated, self.beams = expected.get("generated"), expected.get("beams")
        # With dynamic NTK the cached keys keep the rotation that they were written with.
        self.logits_no_cache = expected.get("logits_no_cache", self.logits)

    def tensors(self, quant: Quant = "none", dtype: DType = "float32") -> dict[str, LazyTensor]:
        from lite_runner.architectures.quantization import Quantization
        from lite_runner.weights.checkpoint import open_checkpoint
        from lite_runner.weights.quantization.quantize import with_matrices_in, with_quantization

        tensors = open_checkpoint(self.folder, self.config)
        found = with_quantization(tensors, self.config, Quantization.of(quant, None))
        return with_matrices_in(found, dtype)

    def online(
        self, slots: int, length: int, layers: int | None = None, **options: object
    ) -> MindSporeBackend:
        """With the first `layers` alone: half as much to compile, where nothing is compared with
        `logits`."""
        from lite_runner.backends.mindspore.backend import MindSporeBackend, MindSporeOptions
        from lite_runner.weights.read_ahead import ReadAhead

        chosen = MindSporeOptions(slots=slots, length=length, **options)
        config = replace(self.config, blocks=self.config.blocks[:layers])
        return MindSporeBackend(config, ReadAhead(self.tensors()), chosen)

    def native(
        self,
        slots: int,
        length: int,
        quant: Quant = "none",
        dtype: DType = "float32",
        threads: int | None = None,
        **options: object,
    ) -> NativeBackend:
        from lite_runner.backends.native.backend import NativeBackend, NativeOptions
        from lite_runner.native.packed_model import pack
        from lite_runner.weights.read_ahead import QuantizedWeights

        weights = QuantizedWeights(self.tensors(quant, dtype), self.config)
        chosen = NativeOptions(slots=slots, length=length, **options)
        layers = pack(self.config, weights, chosen.lora, rounded_input=quant == "a8w8")
        return NativeBackend(self.config, layers, chosen, threads=threads)

    def prefill(self, model: Backend) -> NDArray[np.float32]:
        """Logits [prompts, vocab] behind the prompts alone, as `logits[:, 0]`: of a graph backend,
        half as much to compile."""
        from lite_runner.backends import Row

        return model.forward([Row(slot, prompt, 0) for slot, prompt in enumerate(self.prompts)])

    def run(self, model: Backend, slots: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Logits [slots, steps + 1, vocab]: prompt i in slots[i], all together, then the forced
        tokens."""
        from lite_runner.backends import Row

        pairs = list(enumerate(range(len(self.prompts)) if slots is None else slots))
        logits = [model.forward([Row(slot, self.prompts[i], 0) for i, slot in pairs])]
        for step in range(self.forced.shape[1]):
            rows = [
                Row(slot, self.forced[i, step : step + 1], len(self.prompts[i]) + step)
                for i, slot in pairs
            ]
            logits.append(model.forward(rows))
        return np.stack(logits, axis=1)


@pytest.fixture(scope="session")
def reference() -> Callable[[str], Reference]:
    """A case by its name."""
    return cache(Reference)


@pytest.fixture(scope="session")
def scores() -> Callable[[Backend, NDArray[np.int32]], NDArray[np.float64]]:
    """`scores(model, tokens)`: of each token but the first its log-likelihood [n - 1]."""
    from lite_runner.generation.sampling import log_likelihoods, logits_of_text

    def of(model: Backend, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
        logits = np.concatenate(list(logits_of_text(model, tokens[:-1])))
        return log_likelihoods(logits, tokens[1:])[0]

    return of


@pytest.fixture(scope="session")
def relative_error() -> Callable[[NDArray, NDArray], float]:
    """The largest difference, relative to the largest value of the second."""
    return lambda got, expected: float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.fixture
def other_operators(tmp_path: Path) -> Path:
    """The library of our operators as other sources would make it."""
    from lite_runner import native
    from lite_runner.native import fingerprint

    built, ours = native.LIBRARY.read_bytes(), fingerprint.sources().encode()
    assert built.count(ours) == 1
    path = tmp_path / "other_operators.so"
    path.write_bytes(built.replace(ours, ours[::-1]))
    return path


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M as a GGUF of 98 MB: a link to what the user's cache has, where it is kept for
    the next session if it has to be downloaded. Without a network the tests are left out."""
    from lite_runner.errors import ArtifactError
    from lite_runner.system.files import cache_dir
    from lite_runner.weights.source import fetch

    model = yaml.safe_load((ROOT / "conf/model/smollm2_135m.yaml").read_text(encoding="utf-8"))
    uri = model["model"]["model_config"]["checkpoint_name_or_path"]
    session = cache_dir()
    with mock.patch.dict(os.environ, LITE_RUNNER_CACHE=str(session / USERS_CACHE)):
        try:
            found = fetch(uri)
        except ArtifactError as error:
            if "could not be downloaded" in error.message:
                pytest.skip(f"{NO_NETWORK}: {error}")
            raise
    link = session / found.relative_to(session / USERS_CACHE)
    link.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # of another worker
        link.symlink_to(found.resolve())
    return link


@pytest.fixture(scope="session")
def mindformers_package(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder configs/ of a release of mindformers, and beside it the config classes, fetched
    once. Without a network the tests are left out."""
    folder = tmp_path_factory.mktemp("mindformers")

    def configs(release: str) -> Path:
        there = folder / release
        if there.is_dir():
            return there / "configs"
        asked = ["--no-deps", "--only-binary=:all:", f"mindformers=={release}", "-d", str(folder)]
        fetched = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--retries=0", "--timeout=15", *asked],
            capture_output=True,
            text=True,
            timeout=300,
        )
        wheel = next(folder.glob(f"mindformers-{release}-*.whl"), None)
        if wheel is None:
            stderr = fetched.stderr.strip().splitlines()[-1:]
            pytest.skip(f"{NO_NETWORK}: mindformers=={release} could not be fetched: {stderr}")
        with zipfile.ZipFile(wheel) as archive:
            wanted = re.compile(r"configs/|mindformers/models/.*config.*\.py")
            names = [name for name in archive.namelist() if wanted.match(name)]
            archive.extractall(there, names)
        return there / "configs"

    return configs


@pytest.fixture(scope="session")
def lite_python() -> Path:
    """The interpreter of .venv-lite, which has MindSpore Lite; set up where it is missing. Without
    a Python 3.7 on this machine the test is left out, and named at the end."""
    done = subprocess.run(
        [str(ROOT / "scripts/setup.sh"), "lite", "--optional"],
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    if NO_LITE in done.stderr:
        pytest.skip(done.stderr[done.stderr.index(NO_LITE) :])
    return ROOT / ".venv-lite/bin/python"


@pytest.fixture(scope="session")
def mindformers_python() -> Path:
    """The interpreter of .venv-mindformers, which has MindFormers 1.0.2; set up where it is
    missing. Without a Python 3.9 or a network the test is left out, and named at the end."""
    return _set_up("mindformers", NO_MINDFORMERS)


@pytest.fixture(scope="session")
def mindformers_1_9_python() -> Path:
    """The same of .venv-mindformers-1.9, which has MindFormers 1.9.0."""
    return _set_up("mindformers-1.9", NO_MINDFORMERS)


@pytest.fixture(scope="session")
def ray_python() -> Path:
    """The interpreter of .venv-ray, which has Ray Serve; set up where it is missing. Without a
    network the tests are left out, and named at the end."""
    return _set_up("ray", NO_RAY)


def _set_up(target: str, without: str) -> Path:
    done = subprocess.run(
        [str(ROOT / "scripts/setup.sh"), target, "--optional"],
        capture_output=True,
        encoding="utf-8",
    )
    if without in done.stderr:
        pytest.skip(done.stderr[done.stderr.index(without) :])
    if done.returncode:
        pytest.skip(f"{without}: its packages could not be installed: {done.stderr[-300:]}")
    return ROOT / f".venv-{target}/bin/python"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tests that write to the checkout, or to what the user has downloaded, fail all of them:
    which one it was, no worker knows."""
    from lite_runner.system.files import cache_dir
    from lite_runner.weights.source import PACKAGES

    stash = session.config.stash
    if left_behind.BEFORE not in stash:
        return
    changed = left_behind.changes(stash[left_behind.BEFORE], left_behind.checkout())
    before = stash[left_behind.DOWNLOADS]
    after = left_behind.files(cache_dir() / USERS_CACHE / PACKAGES)
    changed += left_behind.changes(before, {path: after[path] for path in before if path in after})
    stash[left_behind.CHANGED] = changed
    if changed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name files of the checkout that tests changed, and skipped tests with the reason."""
    changed = terminalreporter.config.stash.get(left_behind.CHANGED, [])
    if changed:
        terminalreporter.section("the checkout changed during the tests", red=True, bold=True)
    for line in changed:
        terminalreporter.line(line)
    for why in (NO_ARM, NO_BROWSER, NO_CLIENTS, NO_LITE, NO_MINDFORMERS, NO_NETWORK, NO_RAY):
        skipped = [
            report
            for report in terminalreporter.stats.get("skipped", [])
            if isinstance(report.longrepr, tuple) and why in report.longrepr[2]
        ]
        if not skipped:
            continue
        terminalreporter.section(f"left out: {len(skipped)} tests, {why}", red=True, bold=True)
        for report in sorted(skipped, key=lambda report: report.nodeid):
            terminalreporter.line(report.nodeid)
        reason = skipped[0].longrepr[2].removeprefix("Skipped: ")
        terminalreporter.line(reason.strip().replace("set-up:", ""))


@pytest.fixture
def registry() -> Iterator[None]:
    """Remove registrations of a test after it."""
    from lite_runner.architectures import KNOWN
    from lite_runner.mindir import graph_inputs, write_static_pair

    tables: list[MutableMapping[Any, Any]] = [KNOWN, graph_inputs.MAPPING, write_static_pair.STEPS]
    before = [dict(table) for table in tables]
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)
