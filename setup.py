"""What setup.cfg cannot say: where conf/ is installed, and how our operators are compiled.

`python setup.py build_ext --inplace` compiles them by hand.
"""

from __future__ import annotations

import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNELS = Path("lite_runner/native")
SOURCES = sorted(str(path) for path in KERNELS.glob("src/*.cc"))
HEADERS = sorted(str(path) for path in KERNELS.glob("src/*.[hi]*"))
BUILD = runpy.run_path(str(KERNELS / "fingerprint.py"))
# The newest symbols that a system of this standard has, which is pip's name for Debian 10, RHEL 8
# and newer ones: https://github.com/pypa/auditwheel, policy/manylinux-policy.json.
MANYLINUX = "manylinux_2_28"
NEWEST = {b"GLIBC": (2, 28), b"GLIBCXX": (3, 4, 24), b"CXXABI": (1, 3, 11), b"GCC": (8, 0, 0)}
MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of ELF
SYMBOL = re.compile(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_(\d[\d.]*)(?=\0)")
# GCC finds its own headers uninitialized.
COMPILE = "-std=c++17 -O3 -fno-math-errno -fvisibility=hidden -fPIC -pthread -Wall -Wextra"
COMPILE += " -Wno-uninitialized -Wno-maybe-uninitialized -Wno-unknown-warning-option"
# Else compilers join products and sums where the processor can: other bits.
COMPILE_OF = {"reproducible.cc": ["-ffp-contract=off"]}


def run(*commands: list[str]) -> None:
    """Run all at once; OSError where one fails, after what it said to standard error."""
    started = [subprocess.Popen(command, stdout=sys.stderr) for command in commands]
    codes = [process.wait() for process in started]
    if any(codes):
        raise OSError(f"{commands[0][0]} failed")


class BuildOperators(build_ext):
    """Compiles the operators to a library that is no Python module, where there is a compiler.

    Without one the package is whole too: MindSpore's own operators serve then. A checkout takes
    them from a wheel in dist/ that was built of the same sources, and an editable installation
    those that the checkout has.
    """

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def run(self) -> None:
        self.of_checkout = self.inplace or self.editable_mode  # the former is 0 while it builds
        super().run()
        for ext in self.extensions if self.inplace else ():
            name = self.get_ext_filename(ext.name)
            if not Path(self.build_lib, name).exists():
                Path(name).unlink(missing_ok=True)  # it does not fit these sources

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        built = (self.editable_mode and built_here()) or (self.of_checkout and built_before())
        library.unlink(missing_ok=True)
        if built:
            library.parent.mkdir(parents=True, exist_ok=True)
            library.write_bytes(built)
            return
        try:
            self._compile(ext.sources, library)
        except OSError as error:
            print(f"{error}: lite_runner goes without its own operators", file=sys.stderr)

    def _compile(self, sources: list[str], library: Path) -> None:
        command = BUILD["compiler"]()
        folder = Path(self.build_temp)
        for needed in (folder, library.parent):
            needed.mkdir(parents=True, exist_ok=True)
        objects = [str(folder / Path(source).with_suffix(".o").name) for source in sources]
        fingerprint = BUILD["sources"]()
        flags = [*shlex.split(COMPILE), f'-DLITE_RUNNER_SOURCES="{fingerprint}"']
        run(
            *(
                [
                    *command,
                    *flags,
                    *COMPILE_OF.get(Path(source).name, ()),
                    "-c",
                    source,
                    "-o",
                    target,
                ]
                for source, target in zip(sources, objects, strict=True)
            )
        )
        linked = folder / library.name
        run([*command, "-shared", "-pthread", *objects, "-o", str(linked)])
        shutil.move(linked, library)


class Wheel(bdist_wheel):
    """A wheel of this platform for every Python: the library is no extension of Python.

    It is one for other Linux systems too where the library asks for no newer symbols than theirs.
    """

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        library = next(Path(self.bdist_dir).glob("**/native/operators.so"), None)
        if library is not None:
            content = library.read_bytes()
            machine = int.from_bytes(content[18:20], "little")
            if machine in MACHINES:  # that of $CXX, which may be a cross compiler
                platform = f"linux_{MACHINES[machine]}"
            if runs_elsewhere(content):
                platform = platform.replace("linux", MANYLINUX, 1)
        return "py3", "none", platform


def built_before() -> bytes:
    """The library in a wheel of dist/, of these very sources and for this kind of processor; empty
    without one, or where $CXX asks for a compiler."""
    for wheel in () if os.environ.get("CXX") else sorted(Path("dist").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            name = f"{KERNELS}/operators.so"
            content = archive.read(name) if name in archive.namelist() else b""
        if fits(content):
            print(f"operators: those of {wheel}", file=sys.stderr)
            return content
    return b""


def built_here() -> bytes:
    """The library of the checkout, if it is of these very sources, and was built by this setup.py;
    empty where $CXX asks for a compiler."""
    library = KERNELS / "operators.so"
    if os.environ.get("CXX") or not library.exists():
        return b""
    content, newer = (
        library.read_bytes(),
        library.stat().st_mtime > Path("setup.py").stat().st_mtime,
    )
    return content if newer and fits(content) else b""


def fits(library: bytes) -> bool:
    """True for a library of these very sources and for this kind of processor."""
    machine = MACHINES.get(int.from_bytes(library[18:20], "little"))
    return BUILD["sources"]().encode() in library and machine == platform.machine()


def runs_elsewhere(library: bytes) -> bool:
    """True if the symbols of a shared library are those of the MANYLINUX standard, or older."""
    return all(
        tuple(int(part) for part in version.split(b".")) <= NEWEST[name]
        for name, version in SYMBOL.findall(library)
    )


setup(
    py_modules=["run_lite"],
    packages=[*find_packages(include=["lite_runner", "lite_runner.*"]), "lite_runner.conf"],
    package_dir={"lite_runner.conf": "conf"},
    package_data={
        "lite_runner": ["py.typed"],
        "lite_runner.conf": ["**/*.yaml"],
        "lite_runner.serving": ["static/*"],
        "lite_runner.evaluation": ["tasks/*.yaml"],
        # The package compares its operators with their sources.
        "lite_runner.native": [f"src/*{suffix}" for suffix in BUILD["COMPILED"]],
    },
    ext_modules=[
        Extension("lite_runner.native.operators", SOURCES, depends=HEADERS, optional=True)
    ],
    cmdclass={"build_ext": BuildOperators, "bdist_wheel": Wheel},
)
