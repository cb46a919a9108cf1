"""msrun without the rest of MindSpore's package, whose import takes it a second and a half."""

from __future__ import annotations

from pathlib import Path

# msrun's own files, and those that it uses, of the package that is installed. What these import
# and do not use in these tests is left out: they say that there is no plugin of Huawei's clusters.
PACKAGE = """
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

here = str(Path(__file__).parents[1])
sys.path[:] = [path for path in sys.path if path != here]
__path__ = [*PathFinder.find_spec("mindspore", sys.path).submodule_search_locations]


def module(name, path=(), **attributes):
    stub = sys.modules[f"mindspore.{name}"] = ModuleType(f"mindspore.{name}")
    stub.__path__ = list(path)
    stub.__dict__.update(attributes)


class RSCPluginHandle:
    def check_enable(self):
        return False


if Path(sys.argv[0]).name == "msrun":
    module("parallel", [f"{__path__[0]}/parallel"])
    module("utils", RSCPluginHandle=RSCPluginHandle)
    module("runtime", [f"{__path__[0]}/runtime"])
    module("context")
    module("communication", get_local_rank_size=None)
else:  # a rank, which gets all of it
    del sys.modules["mindspore"]
    import mindspore
"""


def light_package(folder: Path) -> str:
    """The value for PYTHONPATH: a folder with the package, which is written there."""
    (folder / "mindspore").mkdir()
    (folder / "mindspore/__init__.py").write_text(PACKAGE)
    return str(folder)
