"""MindSpore Lite in this process: a vendor wheel, on Ascend (through GE) or on the CPU.

Wheels differ between versions, so capabilities are read from attributes and signatures (documented
for 2.2 to 2.7). MindIRs of MindSpore 2.10 need 2.6: see lite_release.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.lite.engines import lite_release
from lite_runner.backends.lite.ge import FILE_NAME, GeConfig, render
from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault, RunnerError, first_line
from lite_runner.mindir.manifest import AGAIN, GraphName, TensorSpec
from lite_runner.system import environment
from lite_runner.system.files import temporary_folder

if TYPE_CHECKING:
    from lite_runner.backends.lite.engine import EngineOptions

ORDER: tuple[GraphName, ...] = ("model", "prefill", "increment")
NEWER = "install a MindSpore Lite wheel for Ascend, 2.6 or newer, or choose another engine="


def available() -> bool:
    """True if this Python has a mindspore_lite; does not import it."""
    return importlib.util.find_spec("mindspore_lite") is not None


def version() -> str:
    """Name and version of this Python's mindspore_lite. Raises EnvironmentFault if its import
    fails."""
    return _named(_import())


def check_reads(version: int) -> None:
    """Raise EnvironmentFault if this Python's mindspore_lite is known not to read a version of
    MindIR; does not import it."""
    from importlib import metadata  # with its imports 15 ms

    with contextlib.suppress(metadata.PackageNotFoundError):
        lite = f"MindSpore Lite {metadata.version('mindspore_lite')}"
        lite_release.check_reads(lite, version)


class LiteEngine:
    """See GraphEngine; runs mindspore_lite in this process. `inputs`: the inputs of each graph.

    A pair of graphs needs Ascend: only there can two graphs share weights and KV cache. Bound
    arrays have Lite's dtypes; inputs are identified by their order.
    """

    name = "lite"

    def __init__(
        self,
        graphs: Mapping[GraphName, Path],
        options: EngineOptions,
        model_type: Literal["MINDIR", "MINDIR_LITE"],
    ) -> None:
        """Load the graphs, prefill before increment.

        Raises EnvironmentFault if this Lite lacks a capability, ArtifactError for a file that it
        rejects, ConfigError for GE options that do not fit.
        """
        ge, key = options.ge, options.key
        _check_ge(ge, options.device, len(graphs))
        for path in graphs.values():
            if not path.is_file():
                raise ArtifactError(f"{path}: no such file", AGAIN)
        self._lite = lite = _import()
        self._version = _named(lite)
        self._paths = {graph: graphs[graph] for graph in ORDER if graph in graphs}
        self._models: dict[GraphName, Any] = {graph: lite.Model() for graph in self._paths}
        self._group = self._share(options.device) if len(graphs) > 1 else None
        context = self._context(options)
        self._tensors: dict[GraphName, list[Any]] = {}
        self._bound: dict[GraphName, list[NDArray[Any]]] = {}
        self.inputs: dict[GraphName, tuple[TensorSpec, ...]] = {}
        kind = getattr(lite.ModelType, model_type)
        with temporary_folder() as folder:
            for index, (graph, model) in enumerate(self._models.items()):
                more = self._ge_arguments(ge, index, folder) | self._key_arguments(key)
                path = self._paths[graph].resolve()
                doing = f"cannot load it{'' if key is None else ' with this key'}"
                try:
                    self._call(
                        graph, doing, model.build_from_file, str(path), kind, context, **more
                    )
                except ArtifactError as error:
                    message = str(error.__cause__)
                    raise lite_release.refused(path, message, self._version) or error from error
                self._take_inputs(graph)

    def bind(self, graph: GraphName, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
        """See GraphEngine. Raises ArtifactError if the graph does not accept these shapes."""
        wanted = [tuple(shape) for shape in shapes]
        bound = self._bound.get(graph)
        if bound is not None and [array.shape for array in bound] == wanted:
            return bound
        specs = self.inputs[graph]
        self._bound.pop(graph, None)
        if [spec.shape for spec in specs] != wanted:
            self._resize(graph, wanted)
        bound = [np.zeros(shape, spec.dtype) for shape, spec in zip(wanted, specs, strict=True)]
        self._bound[graph] = bound
        return bound

    def run(self, graph: GraphName) -> list[NDArray[Any]]:
        """See GraphEngine. Raises ArtifactError if Lite cannot run the graph."""
        if graph not in self._bound:
            raise RunnerError(
                f"{self._paths[graph].name}: the graph was not bound to shapes before a run"
            )
        tensors = self._tensors[graph]
        outputs: list[NDArray[Any]] = self._call(
            graph, "cannot run it", self._predict, graph, tensors
        )
        return outputs

    def close(self) -> None:
        """Release the models and their memory."""
        self._bound.clear()
        self._tensors.clear()
        self._models.clear()
        self._group = None

    def _predict(self, graph: GraphName, tensors: list[Any]) -> list[NDArray[Any]]:
        for tensor, array in zip(tensors, self._bound[graph], strict=True):
            tensor.set_data_from_numpy(array)
        outputs = self._models[graph].predict(tensors)
        # Lite returns views of its own memory, which the next run overwrites.
        return [np.array(output.get_data_to_numpy()) for output in outputs]

    def _resize(self, graph: GraphName, wanted: list[tuple[int, ...]]) -> None:
        specs, file = self.inputs[graph], self._paths[graph]
        if len(wanted) != len(specs):
            raise ArtifactError(
                f"{file}: has {len(specs)} inputs, expected {len(wanted)}: not the graph of this "
                "layout",
                AGAIN,
            )
        dims = [[int(length) for length in shape] for shape in wanted]
        shown = wanted if len(wanted) < 5 else wanted[:4]
        model, tensors = self._models[graph], self._tensors[graph]
        self._call(graph, f"cannot resize it to {shown}", model.resize, tensors, dims)
        self._take_inputs(graph)
        for spec, shape in zip(self.inputs[graph], wanted, strict=True):
            if spec.shape != shape:
                raise ArtifactError(
                    f"{file}: {self._version} left {spec.name} at {list(spec.shape)} when it was "
                    f"resized to {list(shape)}",
                    AGAIN,
                )

    def _take_inputs(self, graph: GraphName) -> None:
        tensors = self._call(graph, "cannot list its inputs", self._models[graph].get_inputs)
        self._tensors[graph] = list(tensors)
        self.inputs[graph] = tuple(
            self._call(graph, "cannot use an input", _spec, tensor) for tensor in tensors
        )

    def _share(self, target: str) -> Any:
        """The group whose models share weights and KV cache; they are added before the build."""
        lite = self._lite
        flag = getattr(getattr(lite, "ModelGroupFlag", None), "SHARE_WEIGHT", None)
        names = " and ".join(path.name for path in self._paths.values())
        if target != "Ascend":
            raise EnvironmentFault(
                f"{names}: two graphs share one cache, which MindSpore Lite does on Ascend only",
                "engine=graph-cell runs them on the CPU; or export with the resizable layout",
            )
        if flag is None or not hasattr(lite, "ModelGroup"):
            raise EnvironmentFault(
                f"{names}: two graphs share one cache, but this {self._version} has no ModelGroup "
                "with SHARE_WEIGHT",
                NEWER,
            )
        try:
            group = lite.ModelGroup(flag)
            group.add_model(list(self._models.values()))
        except Exception as error:
            raise EnvironmentFault(
                f"{names}: {self._version} cannot let them share weights: {first_line(error)}",
                NEWER,
            ) from error
        return group

    def _context(self, options: EngineOptions) -> Any:
        target = options.device
        try:
            context = self._lite.Context()
            if target == "CPU":
                context.target = ["cpu"]
                context.cpu.thread_num = options.threads or environment.cores()
                return context
            context.target = ["ascend"]
            wanted = {"device_id": options.device_id, "rank_id": options.rank_id, "provider": "ge"}
            # An older version would accept an unknown attribute, and ignore it.
            missing = [name for name in wanted if not hasattr(context.ascend, name)]
            for name in [] if missing else wanted:
                setattr(context.ascend, name, wanted[name])
        except Exception as error:
            raise EnvironmentFault(
                f"{self._version} cannot be set up for {target}: {first_line(error)}",
                "context.device_target=CPU runs without Ascend" if target == "Ascend" else "",
            ) from error
        if missing:
            names = ", ".join(f"context.ascend.{name}" for name in missing)
            raise EnvironmentFault(f"this {self._version} has no {names}", NEWER)
        return context

    def _ge_arguments(self, ge: GeConfig | None, index: int, folder: Path) -> dict[str, Any]:
        """Keyword arguments of build_from_file for the GE options of the graph with this index."""
        if ge is None:
            return {}
        takes = _parameters(self._lite.Model.build_from_file)
        options = ge.of_graph(index)
        if not isinstance(options, Path) and "config_dict" in takes:
            return {"config_dict": {name: dict(values) for name, values in options.items()}}
        if "config_path" in takes:
            if not isinstance(options, Path):
                text, options = render(options), folder / f"{index}_{FILE_NAME}"
                options.write_text(text, encoding="utf-8")
            return {"config_path": str(options)}
        raise EnvironmentFault(f"this {self._version} takes no GE options", NEWER)

    def _key_arguments(self, dec_key: bytes | None) -> dict[str, Any]:
        if dec_key is None:
            return {}
        if not {"dec_key", "dec_mode"} <= _parameters(self._lite.Model.build_from_file):
            raise EnvironmentFault(
                f"this {self._version} cannot read encrypted models",
                "install a newer wheel, or export the model without enc_key",
            )
        return {"dec_key": dec_key, "dec_mode": "AES-GCM"}

    def _call(
        self, graph: GraphName, doing: str, function: Callable[..., Any], *given: Any, **more: Any
    ) -> Any:
        """Call a function of the library; turns its exceptions into ArtifactError."""
        try:
            return function(*given, **more)
        except Exception as error:
            raise ArtifactError(
                f"{self._paths[graph]}: {self._version} {doing}: {first_line(error)}", AGAIN
            ) from error


def _import() -> Any:
    try:
        import mindspore_lite
    except (ImportError, OSError) as error:
        raise EnvironmentFault(
            f"mindspore_lite does not import in this Python: {first_line(error)}",
            "install the wheel of MindSpore Lite for this Python, or choose another engine=",
        ) from error
    return mindspore_lite


def _named(lite: Any) -> str:
    return f"MindSpore Lite {getattr(lite, '__version__', '')}".strip()


def _check_ge(ge: GeConfig | None, target: str, graphs: int) -> None:
    if ge is not None and target != "Ascend":
        raise ConfigError(f"GE options have a meaning only on Ascend, not on {target}", "ge=none")
    if ge is not None and len(ge.files) > graphs:
        raise ConfigError(
            f"infer.ge_config_path: got {len(ge.files)} files for {graphs} graph", "give one file"
        )


def _parameters(function: Callable[..., Any]) -> set[str]:
    """Parameter names of a function, even behind a decorator (wheel 2.7)."""
    names = set(inspect.signature(function).parameters)
    for cell in getattr(function, "__closure__", None) or ():
        if inspect.isfunction(cell.cell_contents):
            names |= _parameters(cell.cell_contents)
    return names


def _spec(tensor: Any) -> TensorSpec:
    """Raises TypeError for a dtype that NumPy does not have."""
    dtype = np.dtype(tensor.dtype.name.lower()).name
    return TensorSpec(str(tensor.name), tuple(int(length) for length in tensor.shape), dtype)
