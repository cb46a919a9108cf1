"""The wheel: its contents, and a run far from the checkout; and the pins."""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import lite_runner
from lite_runner import native
from lite_runner.native import fingerprint
from tests.paths import ROOT

# mindspore_lite: a vendor's wheel, or in a Python of its own (`make lite`); matplotlib: the extra
# `bench`, asked for only where charts are wanted; pyarrow: where a task's data is in parquet files.
# Of an extra, or of environments of their own.
NOT_REQUIRED = {
    "lite_runner",
    "mindformers",
    "mindspore_lite",
    "matplotlib",
    "jieba",
    "pyarrow",
    "ray",
}
SOURCES = ROOT / "lite_runner/native/src"
STATIC = ROOT / "lite_runner/serving/static"


def run(*command: str | Path, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    # Without PYTHONPATH: nothing but what is installed may be found.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | changes
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that the checkout stays as it is."""
    source = tmp_path_factory.mktemp("source")
    files = ("setup.cfg", "setup.py", "pyproject.toml", "run_lite.py", "MANIFEST.in")
    for name in (*files, "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*_cache", "*.so")
    for name in ("lite_runner", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    return source


# Stands in for the compiler: `make test` has compiled these very sources with this setup.py, which
# takes most of a minute. It wants every source, and their fingerprint with each.
COMPILED_BEFORE = """#!/bin/sh
for last; do :; done
case "$*" in
  *"-shared "*) [ $(ls "${last%%/*}"/*.o | wc -l) = %d ] && exec cp '%s' "$last" ;;
  *-DLITE_RUNNER_SOURCES=\\"%s\\"*" -c "*) exec touch "$last" ;;
esac
exit 1
"""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """$CXX; the real one where the checkout's library is not of its sources."""
    digest = fingerprint.sources()
    if not native.LIBRARY.exists() or digest.encode() not in native.LIBRARY.read_bytes():
        return {}
    program = tmp_path_factory.mktemp("compiler") / "c++"
    count = len(list(SOURCES.glob("*.cc")))
    program.write_text(COMPILED_BEFORE % (count, native.LIBRARY, digest))
    program.chmod(0o755)
    return {"CXX": str(program)}


def wheel_of(source: Path, folder: Path, **env: str) -> Path:
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    done = run(*pip, "--no-index", "--wheel-dir", folder, source, cwd=folder, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(source: Path, compiler: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(source, tmp_path_factory.mktemp("wheel"), **compiler)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installation_of(wheel, tmp_path_factory.mktemp("environment"))


def installation_of(wheel: Path, home: Path) -> Path:
    """The bin folder of a fresh environment with the wheel in it.

    The dependencies come from the environment of the tests, by a .pth file. Such a folder's own
    .pth files are not obeyed, so an editable lite_runner there stays out of sight.
    """
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    done = run(*pip, wheel, cwd=home)
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_wheel_holds_every_module_and_yaml(wheel: Path) -> None:
    expected = {
        *(f"lite_runner/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")),
        *(str(path.relative_to(ROOT)) for path in (ROOT / "lite_runner").rglob("*.py")),
        *(str(path.relative_to(ROOT)) for path in SOURCES.iterdir()),
        *(str(path.relative_to(ROOT)) for path in STATIC.iterdir()),
        *(str(path.relative_to(ROOT)) for path in (ROOT / "lite_runner").rglob("tasks/*.yaml")),
        "run_lite.py",
        "lite_runner/py.typed",
        "lite_runner/native/operators.so",
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected


CROSS = "aarch64-linux-gnu-g++"
# The kernels themselves are compiled for ARM, and run, by tests/native/test_arm.py. Of all sources
# this one makes their fingerprint.
CROSSED = f"""#!/bin/sh
for last; do :; done
case "$*" in
  *"-shared "*)
    echo 'extern const char sources[] = "%s";' | {CROSS} -shared -x c++ - -o "$last" && exit ;;
  *" -c "*) echo "$*" >> "$0.asked" && exec touch "$last" ;;
esac
exit 1
"""


@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"no {CROSS}: apt install g++-{CROSS[:17]}")
def test_a_wheel_for_aarch64_is_crossed(source: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(CROSSED % fingerprint.sources())
    compiler.chmod(0o755)
    built = wheel_of(source, tmp_path, CXX=str(compiler))
    assert re.search(r"-py3-none-(manylinux_2_\d+|linux)_aarch64\.whl$", built.name)
    asked = Path(f"{compiler}.asked").read_text().split()
    compiled = sorted(Path(word).name for word in asked if word.endswith(".cc"))
    assert compiled == sorted(path.name for path in SOURCES.glob("*.cc"))  # each once
    library = Path(zipfile.ZipFile(built).extract("lite_runner/native/operators.so", tmp_path))
    assert fingerprint.sources().encode() in library.read_bytes()


def test_wheel_is_for_every_python_and_older_systems(wheel: Path) -> None:
    """auditwheel calls it manylinux_2_27, which pip of a newer system takes as well."""
    machine = sysconfig.get_platform().rpartition("-")[2]
    assert wheel.stem.endswith(f"-py3-none-manylinux_2_28_{machine}")


def test_wheel_with_newer_symbols_is_for_this_system(source: Path, tmp_path: Path) -> None:
    setup = tmp_path / "source"
    shutil.copytree(source, setup, ignore=shutil.ignore_patterns("build"))
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\nprintf "\\0GLIBC_2.38\\0" > "$last"\n')
    compiler.chmod(0o755)
    newer = wheel_of(setup, tmp_path, CXX=str(compiler))
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert newer.stem.endswith(f"-py3-none-{platform}")


def test_runs_without_mindspore(wheel: Path, tmp_path: Path) -> None:
    """A run that needs it says the command that installs it."""
    bin_folder = installation_of(wheel, tmp_path / "environment")
    (site,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    (site / "dependencies.pth").unlink()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        wanted = not entry.name.startswith(("mindspore", "__editable__", "lite_runner"))
        if wanted and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    cache = {"LITE_RUNNER_CACHE": str(tmp_path / "cache")}
    words = ("model=tiny_llama", "predict_data=hi", "max_new_tokens=2")
    done = run(bin_folder / "run-lite", *words, cwd=tmp_path, **cache)
    assert done.returncode == 0, done.stderr
    assert "backend=native" in done.stderr
    needing = [(*words, "backend=ms"), (*words, "use_parallel=true", "parallel=tp2")]
    for line in (*needing, ("run_mode=export", "model=tiny_llama")):
        refused = run(bin_folder / "run-lite", *line, cwd=tmp_path, **cache)
        assert refused.returncode == 3, refused.stderr
        error, remedy = refused.stderr.splitlines()[-2:]
        assert error == "error: mindspore is not installed in this Python"
        assert remedy.endswith('-m pip install "mindspore<3,>=2.10" "numpy<2,>=1.25"')
    planned = run(bin_folder / "run-lite", *words, "dry_run=true", cwd=tmp_path, **cache)
    assert "ms: mindspore is not installed" in planned.stdout
    output = run(bin_folder / "run-lite", "run_mode=doctor", cwd=tmp_path, **cache)
    assert "warn  mindspore " in output.stdout and "msrun" not in output.stdout


def test_without_a_compiler_mindspores_operators_serve(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    """`wheel`: what its build has left behind must not come back."""
    plain = wheel_of(source, tmp_path, CXX="/bin/false")
    packed, whole = (set(zipfile.ZipFile(path).namelist()) for path in (plain, wheel))
    assert whole - packed == {"lite_runner/native/operators.so"} and packed <= whole
    bin_folder = installation_of(plain, tmp_path / "environment")
    arguments = ("model=tiny_llama", "predict_data=hi", "max_new_tokens=2")
    done = run(bin_folder / "run-lite", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "outputs/latest/result.json").exists()


@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/compiler"])
def test_a_failed_build_leaves_no_library(source: Path, tmp_path: Path, compiler: str) -> None:
    """It says so in one line, and takes away what fitted the sources before."""
    shutil.copytree(source, tmp_path / "source", ignore=shutil.ignore_patterns("build"))
    library = tmp_path / "source/lite_runner/native/operators.so"
    library.write_bytes(b"older")
    build = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    done = run(*build, cwd=tmp_path / "source", CXX=compiler)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert compiler in line and line.endswith(": lite_runner goes without its own operators")
    assert not list(tmp_path.glob("source/**/*.so"))


def test_a_checkout_takes_its_library_from_a_wheel(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    """Of the same sources alone, and only where no compiler was asked for."""
    copy = tmp_path / "source"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("build"))
    (copy / "dist").mkdir()
    shutil.copy(wheel, copy / "dist")
    library = copy / "lite_runner/native/operators.so"
    build = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    done = run(*build, cwd=copy, CXX="", PATH="")
    assert "operators: those of dist/mindspore_lite_runner" in done.stderr
    built = zipfile.ZipFile(wheel).read("lite_runner/native/operators.so")
    assert library.read_bytes() == built
    (copy / "dist").rename(copy / "elsewhere")
    editable = (sys.executable, "setup.py", "-q", "editable_wheel", "--dist-dir", tmp_path)
    assert "no C++ compiler" not in run(*editable, cwd=copy, CXX="", PATH="").stderr
    assert library.read_bytes() == built
    os.utime(copy / "setup.py")  # which may say other flags
    assert "no C++ compiler" in run(*editable, cwd=copy, CXX="", PATH="").stderr
    assert "/bin/false" in run(*build, cwd=copy, CXX="/bin/false").stderr
    with (copy / "lite_runner/native/src/operators.cc").open("a") as file:
        file.write("// changed\n")
    assert "no C++ compiler" in run(*build, cwd=copy, CXX="", PATH="").stderr
    assert not library.exists()


def test_sdist_holds_what_is_compiled_and_served(source: Path, tmp_path: Path) -> None:
    build = (sys.executable, "setup.py", "-q", "sdist", "--dist-dir", tmp_path)
    done = run(*build, cwd=source)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    for folder in (SOURCES, STATIC):
        files = {str(path.relative_to(ROOT)) for path in folder.iterdir()}
        assert len(files) > 5 and files <= names
    assert not any(name.endswith((".so", ".o")) for name in names)


def test_wheel_describes_itself(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    fields = archive.read(name).decode()
    assert f"\nVersion: {lite_runner.__version__}\n" in fields
    assert "\nLicense-Expression: Apache-2.0\n" in fields
    assert "\nRequires-Python: <3.14,>=3.10\n" in fields
    for extra in ("serve", "bench", "dev"):
        assert f"\nProvides-Extra: {extra}\n" in fields
    assert "Requires-Dist: numpy<2,>=1.25" in fields


def test_the_image_gets_what_the_wheel_is_made_of() -> None:
    """And nothing else is sent to its builder."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copies = [
        line.split()[1:-1] for line in lines if line.startswith("COPY") and "--from" not in line
    ]
    copied = {name for each in copies for name in each}
    assert all((ROOT / name).exists() for name in copied)
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in sent if line.startswith("!")} == copied
    needed = {"setup.cfg", "setup.py", "pyproject.toml", "run_lite.py", "LICENSE", "README.md"}
    assert copied >= {*needed, "lite_runner", "conf"}


def test_run_lite_says_its_version(installed: Path, tmp_path: Path) -> None:
    done = run(installed / "run-lite", "--version", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert lite_runner.__version__ in done.stdout


def put_namesake(site: Path, **modules: str) -> None:
    """The package that is called lite-runner on the package index, as pip unpacks it."""
    info = site / "lite_runner-0.2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: lite-runner\nVersion: 0.2.0\n\n")
    files = [f"lite_runner/{name}.py" for name in modules]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    for name, text in zip(files, modules.values(), strict=True):
        (site / name).write_text(text)


def test_files_replaced_by_the_namesake_are_reported(wheel: Path, tmp_path: Path) -> None:
    """`pip install lite-runner` after ours, and what it says then is typed."""
    program = installation_of(wheel, tmp_path / "environment") / "run-lite"
    (site,) = tmp_path.glob("environment/lib/python*/site-packages")
    put_namesake(site, __init__="from .backends import JsonBackend", runner="", params="")
    done = run(program, "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    message, hint = done.stderr.splitlines()
    assert message.startswith("error: lite-runner, another project's package, has replaced")
    assert "cannot import name " in message
    remove, again = hint.removeprefix("  -> ").split("; ")
    own = f"{program.parent / 'python'} -m pip "
    assert remove == f"{own}uninstall --yes lite-runner"
    assert again.startswith(f"{own}install --force-reinstall --no-deps .")
    for command in (["uninstall", "--yes", "lite-runner"], ["install", "--force-reinstall"]):
        pip = (sys.executable, "-m", "pip", "--python", program.parent / "python", *command)
        options = ("--no-deps", "--no-index", wheel) if command[0] == "install" else ()
        assert run(*pip, *options, cwd=tmp_path).returncode == 0
    assert run(program, "--version", cwd=tmp_path).returncode == 0


def test_the_namesake_beside_ours_is_reported(installed: Path, tmp_path: Path) -> None:
    """If its modules are elsewhere, or were replaced by ours, a run continues with a note."""
    put_namesake(tmp_path / "site", **{})
    env = {"PYTHONPATH": str(tmp_path / "site"), "LITE_RUNNER_CACHE": str(tmp_path / "cache")}
    job = ("model=tiny_llama", "predict_data=hi", "max_new_tokens=1")
    for words in (job, ("run_mode=doctor",)):
        done = run(installed / "run-lite", *words, cwd=tmp_path, **env)
        output = (done.stdout + done.stderr).replace("\n      ->", "\n  ->")
        assert "lite-runner 0.2.0, another project's package, is installed in this Python" in output
        assert f"  -> {installed / 'python'} -m pip uninstall --yes lite-runner; " in output


def test_an_earlier_installation_is_not_a_namesake(installed: Path, tmp_path: Path) -> None:
    put_namesake(tmp_path / "site", **{})
    scripts = "[console_scripts]\nrun-lite = lite_runner.app:console\n"
    (tmp_path / "site/lite_runner-0.2.0.dist-info/entry_points.txt").write_text(scripts)
    look = "from lite_runner.system import environment; print([environment.namesake()])"
    env = {"PYTHONPATH": str(tmp_path / "site"), "LITE_RUNNER_CACHE": str(tmp_path / "cache")}
    assert run(installed / "python", "-c", look, cwd=tmp_path, **env).stdout == "['']\n"


def test_run_lite_finds_its_conf(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()  # another project's, which is none of ours
    (tmp_path / "conf/config.yaml").write_text("run_mode: theirs\n")
    done = run(installed / "run-lite", "--cfg", "job", "model=tiny_llama", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^run_mode: predict$", done.stdout, re.MULTILINE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf"]


def test_run_lite_predicts_from_another_folder(installed: Path, tmp_path: Path) -> None:
    arguments = ("model=tiny_llama", "predict_data=hi", "max_new_tokens=2")
    done = run(installed / "run-lite", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "outputs/latest/result.json").read_text(encoding="utf-8"))
    assert result["model"] == "tiny_llama"
    assert result["engine"].endswith(" kernels")  # they fit the sources that are installed
    assert [row["prompt"] for row in result["results"]] == ["hi"]
    assert 1 <= result["results"][0]["generated_tokens"] <= 2
    assert (tmp_path / "outputs/latest/text_generation_result.txt").exists()


def pins(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / name).read_text()
    found = {}
    for line in re.sub(r"( \\\n    --hash=sha256:[0-9a-f]{64})+\n", "\n", text).splitlines():
        if line.startswith("#"):
            continue
        matched = re.fullmatch(r"([a-z0-9-]+)==([\w.]+)", line)
        assert matched, f"requirements/{name}: {line!r} is not an exact version"
        found[matched[1]] = matched[2]
    return found


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_environment_is_the_locked_one() -> None:
    """The tested packages are the pinned ones; `make test` installs them."""
    locked = pins("lock.txt")
    for item in metadata.distributions():
        name = normalized(item.name)
        if name not in {"mindspore-lite-runner", "pip"}:
            assert item.version == locked.get(name), f"{name} {item.version} is not the pin"


def requirements_of(*listed: str) -> list[Requirement]:
    """The requirements in texts of setup.cfg, a line each."""
    lines = [line for text in listed for line in text.splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return [one for one in found if one.marker is None or one.marker.evaluate()]


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def test_every_package_that_is_imported_is_required(setup_cfg: configparser.ConfigParser) -> None:
    """By name: what another requirement happens to bring along may not come with its next one."""
    listed = [setup_cfg["options"]["install_requires"]]
    listed += [setup_cfg["options.extras_require"][extra] for extra in ("chat", "serve")]
    required = [one for each in listed for one in requirements_of(each)]
    names = {normalized(requirement.name) for requirement in required}
    owners = metadata.packages_distributions()
    missing = {}
    for path in (ROOT / "lite_runner").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for package in {str(module).partition(".")[0] for module in modules}:
                own = package in sys.stdlib_module_names or package in NOT_REQUIRED
                if not own and names.isdisjoint(map(normalized, owners.get(package, []))):
                    missing[package] = path.name
    assert not missing


def test_every_requirement_is_locked_within_its_bounds(
    setup_cfg: configparser.ConfigParser,
) -> None:
    extras = setup_cfg["options.extras_require"].values()
    requirements = requirements_of(setup_cfg["options"]["install_requires"], *extras)
    assert len(requirements) > 10
    files = [pins(f"{name}.txt") for name in ("lock", "cluster", "ray")]
    locked = {name: version for file in files for name, version in file.items()}
    assert len(locked) == sum(map(len, files))  # no package has two pins
    for requirement in requirements:
        assert requirement.specifier.contains(locked[normalized(requirement.name)]), requirement


def test_the_core_is_what_is_required_without_mindspore(
    setup_cfg: configparser.ConfigParser,
) -> None:
    """With the server's packages; pinned above those of other jobs."""
    listed = (
        setup_cfg["options"]["install_requires"],
        setup_cfg["options.extras_require"]["serve"],
    )
    required = {str(one) for one in requirements_of(*listed) if one.name != "mindspore"}
    core = requirements_of((ROOT / "requirements/core.txt").read_text())
    assert {*map(str, core)} == required
    above = (ROOT / "requirements/lock.txt").read_text().partition("\n# extras\n")[0]
    assert all(f"\n{normalized(one.name)}==" in above for one in core)
    assert "\nmindspore==" not in above


def test_the_peers_are_pinned() -> None:
    peers = pins("peers.txt")
    assert (peers["torch"], peers["transformers"]) == ("2.13.0", "5.23.0")
    assert peers["gguf"] == pins("lock.txt")["gguf"]  # both sides read the same file alike
