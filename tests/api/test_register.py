"""A new architecture, and graphs with inputs of another order, by registering a class each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from numpy.typing import NDArray

from lite_runner import AutoModel, InferConfig, InferTask, Trainer, register, register_inputs
from lite_runner.api.exported import files_of
from lite_runner.api.register import (
    PREFILL_MODEL_INPUT_MAP,
    BaseInputsOfInfer,
    InputOfInfer,
    get_bloom_inc_model_input,
    get_llm_common_prefill_model_input,
)
from lite_runner.app import main
from lite_runner.architectures import KNOWN
from lite_runner.architectures.fields import Fields
from lite_runner.backends import Backend, Row
from lite_runner.backends.lite.engine import EngineOptions
from lite_runner.backends.lite.engines.graph_cell import GraphCellEngine
from lite_runner.backends.lite.export import writer
from lite_runner.backends.lite.layouts import StaticPairBackend
from lite_runner.backends.mindspore.backend import MindSporeBackend, MindSporeOptions
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.mindir import graph_inputs, write_static_pair
from lite_runner.mindir.manifest import Graph, GraphName, Manifest, TensorSpec, read_manifest
from lite_runner.mindir.write_resizable import export_resizable
from lite_runner.mindir.write_static_pair import export_static_pair
from lite_runner.networks.layers import (
    Attention,
    BuildOptions,
    Embedding,
    LastToken,
    Linear,
    RMSNorm,
    StepInputs,
    Weights,
)
from lite_runner.networks.tensor_parallel import summed
from lite_runner.sizing import parameter_count
from lite_runner.text.tokenizer import byte_tokenizer
from lite_runner.weights import LazyTensor, formats
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.formats.safetensors_file import write_safetensors
from lite_runner.weights.layouts import Parameter
from lite_runner.weights.read_ahead import ReadAhead
from tests.paths import ROOT
from tests.refusals import refused
from tests.sizes import ModelConfig
from tests.tokenizer_files import write_tokenizer

pytestmark = pytest.mark.usefixtures("registry")

VOCAB, HIDDEN, HEADS, LAYERS, LENGTH = 300, 32, 4, 1, 48
EPS = 1e-5
Arrays = dict[str, NDArray[np.float32]]


class ToyBlock(nn.Cell):
    """Attention without positions, and no feed-forward."""

    def __init__(
        self, config: ModelConfig, weights: Weights, prefix: str, options: BuildOptions
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(weights(f"{prefix}.norm"), config.norm_eps)
        self.q = Linear(options, weights(f"{prefix}.q"))
        self.k = Linear(options, weights(f"{prefix}.k"))
        self.v = Linear(options, weights(f"{prefix}.v"))
        self.attention = Attention(options, config.num_heads, config.n_kv_heads, config.head_dim)
        whole = summed(options.parallel)
        self.out = Linear(options, weights(f"{prefix}.out"), combine=whole)

    def construct(self, x: Tensor, rows: Tensor, bias: Tensor, slot: Tensor | None) -> Tensor:
        h = self.norm(x)
        return x + self.out(self.attention(self.q(h), self.k(h), self.v(h), rows, bias, slot))


class ToyModel(nn.Cell):
    def __init__(self, config: ModelConfig, weights: Weights, options: BuildOptions) -> None:
        super().__init__()
        self.embedding = Embedding(options, weights("toy.words"))
        self.inputs = StepInputs(config.num_heads, config.n_kv_heads, options.cache)
        self.last = LastToken()
        blocks = [
            ToyBlock(config, weights, f"toy.{index}", options) for index in range(config.num_layers)
        ]
        self.blocks = nn.CellList(blocks)
        self.norm = RMSNorm(weights("toy.norm"), config.norm_eps)

    def construct(
        self, tokens: Tensor, position: Tensor, length: Tensor, slot: Tensor | None
    ) -> Tensor:
        _, rows, bias = self.inputs(tokens, position, length, slot)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rows, bias, slot)
        if slot is not None:
            x = self.last(x, tokens, position, length)
        return self.embedding.logits(self.norm(x))


def toy_tensors(config: ModelConfig) -> Iterator[Parameter]:
    hidden = config.hidden_size
    yield Parameter("toy.words", (config.vocab_size, hidden), "words.weight")
    for index in range(config.num_layers):
        yield Parameter(f"toy.{index}.norm", (hidden,), f"layers.{index}.norm.weight")
        for name in ("q", "k", "v", "out"):
            theirs = f"layers.{index}.{name}.weight"
            yield Parameter(f"toy.{index}.{name}", (hidden, hidden), theirs, layout="out_in")
    yield Parameter("toy.norm", (hidden,), "norm.weight")


def toy_config(fields: Fields) -> ModelConfig:
    hidden, heads = fields.integer("width"), fields.integer("heads")
    vocab = fields.integer("vocab_size")
    return ModelConfig(
        family="toy",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=fields.integer("depth"),
        num_heads=heads,
        n_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=hidden,
        seq_length=fields.integer("positions"),
        norm_eps=EPS,
        tie_word_embeddings=True,
        **fields.tokens(vocab),
    )


class ForeignInputs:
    """Two inputs, the lengths first."""

    names = ("lengths", "tokens")

    def get_inputs(
        self, *, input_ids: NDArray[np.int32], valid_length: NDArray[np.int32], **_: Any
    ) -> list[NDArray[Any]]:
        return [valid_length.astype(np.int64), input_ids]


class ForeignPrefill(nn.Cell):
    def __init__(self, network: nn.Cell, batch_size: int, sampled: bool) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.start = Tensor(np.zeros(batch_size, np.int32))
        self.slots = Tensor(np.arange(batch_size, dtype=np.int32))

    def construct(self, lengths: Tensor, tokens: Tensor) -> Tensor:
        return self.network(tokens, self.start, lengths.astype(ms.int32), self.slots)


class ForeignIncrement(ForeignPrefill):
    def construct(self, lengths: Tensor, tokens: Tensor) -> Tensor:
        lengths = lengths.astype(ms.int32)
        return self.network(tokens, lengths - 1, lengths, None)


def register_toy(**options: Any) -> None:
    register("toy", network=ToyModel, tensors=toy_tensors, config=toy_config, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A toy model as its publisher would keep it."""
    path = tmp_path / "toy"
    path.mkdir()
    sizes = {"width": HIDDEN, "heads": HEADS, "depth": LAYERS, "positions": LENGTH}
    described = {"model_type": "toy", "vocab_size": VOCAB, **sizes}
    (path / "config.json").write_text(json.dumps(described))
    write_tokenizer(byte_tokenizer(), path)
    generator = np.random.default_rng(3)
    shapes = {"words.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,)}
    for index in range(LAYERS):
        shapes[f"layers.{index}.norm.weight"] = (HIDDEN,)
        shapes |= {f"layers.{index}.{name}.weight": (HIDDEN, HIDDEN) for name in "qkv"}
        shapes[f"layers.{index}.out.weight"] = (HIDDEN, HIDDEN)
    arrays = {
        name: (generator.standard_normal(shape) * 0.3 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    tensors = {
        name: LazyTensor(array.shape, "F32", lambda array=array: array)
        for name, array in arrays.items()
    }
    write_safetensors(path / "model.safetensors", tensors, {})
    np.savez(tmp_path / "arrays.npz", **arrays)
    return path


@pytest.fixture
def arrays(folder: Path) -> Arrays:
    with np.load(folder.parent / "arrays.npz") as stored:
        return dict(stored)


def reference(arrays: Arrays, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """Logits [vocab] after the tokens [n], in plain NumPy and double precision."""

    def norm(x: NDArray[np.float64], gamma: NDArray[np.float32]) -> NDArray[np.float64]:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * gamma

    x = arrays["words.weight"][tokens].astype(np.float64)
    seen = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for index in range(LAYERS):
        weight = {name: arrays[f"layers.{index}.{name}.weight"] for name in ("q", "k", "v", "out")}
        h = norm(x, arrays[f"layers.{index}.norm.weight"])
        q, k, v = ((h @ weight[name].T).reshape(len(h), HEADS, -1) for name in "qkv")
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HIDDEN // HEADS)
        scores = np.exp(np.where(seen, scores, -np.inf))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(len(h), HIDDEN) @ weight["out"].T
    return norm(x, arrays["norm.weight"])[-1] @ arrays["words.weight"].T


def check_logits(backend: Backend, arrays: Arrays) -> None:
    """Two rows of a batch, a prompt and three steps each, against the reference."""
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 15)).astype(np.int32)
    lengths = [12, 7]
    for step in range(4):
        rows = [
            Row(slot, tokens[slot, :length], 0)
            if step == 0
            else Row(slot, tokens[slot, length + step - 1 : length + step], length + step - 1)
            for slot, length in enumerate(lengths)
        ]
        got = backend.forward(rows)
        wanted = np.stack([reference(arrays, tokens[i, : lengths[i] + step]) for i in range(2)])
        assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max()


def export(folder: Path, target: Path) -> Manifest:
    """The static pair of the model in a folder, in another folder."""
    config = model_config_of(folder)
    assert config is not None
    target.mkdir()
    stems: dict[GraphName, str] = {"prefill": "toy_prefill", "increment": "toy_inc"}
    graphs = export_static_pair(
        config,
        ReadAhead(open_checkpoint(folder, config)),
        target,
        stems,
        batch_size=2,
        seq_length=LENGTH,
        dtype="float32",
        enc_key=None,
        sampled=False,
    )
    return manifest_of(config, graphs)


def manifest_of(config: ModelConfig, graphs: dict[GraphName, Graph]) -> Manifest:
    return Manifest(
        layout="static_pair",
        model_name="toy",
        model=config,
        source="toy",
        target="CPU",
        model_type="MINDIR",
        precision="float32",
        batch_size=2,
        seq_length=LENGTH,
        graphs=graphs,
        files={},
        tokenizer=(),
        versions={},
    )


def opened(manifest: Manifest, folder: Path) -> StaticPairBackend:
    paths = {name: folder / graph.file for name, graph in manifest.graphs.items()}
    engine = GraphCellEngine(paths, manifest.graphs, EngineOptions("graph-cell"))
    return StaticPairBackend(manifest, engine)


def test_an_unknown_family_is_refused(folder: Path) -> None:
    with pytest.raises(ArtifactError, match="model_type is 'toy', expected one of bloom, llama"):
        model_config_of(folder)


def test_online_and_exported_logits_are_right(folder: Path, tmp_path: Path, arrays: Arrays) -> None:
    register_toy()
    config = model_config_of(folder)
    assert config is not None and config.architecture == "toy"
    assert parameter_count(config) == sum(array.size for array in arrays.values())
    weights = ReadAhead(open_checkpoint(folder, config))
    check_logits(
        MindSporeBackend(config, weights, MindSporeOptions(slots=2, length=LENGTH)), arrays
    )
    manifest = export(folder, tmp_path / "pair")
    assert [one.name for one in manifest.graphs["prefill"].inputs] == [
        *("input_ids", "current_index", "init_reset", "valid_length")
    ]
    check_logits(opened(manifest, tmp_path / "pair"), arrays)


def test_inputs_in_a_foreign_order(folder: Path, tmp_path: Path, arrays: Arrays) -> None:
    register_toy(inputs=ForeignInputs)
    with pytest.raises(ConfigError, match="registered without the steps"):
        export(folder, tmp_path / "none")
    steps: write_static_pair.Steps = {"prefill": ForeignPrefill, "increment": ForeignIncrement}
    register_inputs("foreign", ForeignInputs, steps=steps)
    manifest = export(folder, tmp_path / "pair")
    assert manifest.graphs["increment"].inputs == (
        TensorSpec("lengths", (2,), "int64"),
        TensorSpec("tokens", (2, 1), "int32"),
    )
    check_logits(opened(manifest, tmp_path / "pair"), arrays)
    # Without its class the graph cannot be fed, and says so.
    del graph_inputs.MAPPING["foreign"], graph_inputs.MAPPING["toy"]
    with pytest.raises(ArtifactError, match=r"inputs \(lengths, tokens\), expected .*init_reset"):
        opened(manifest, tmp_path / "pair")


def test_a_class_that_gives_other_shapes(folder: Path, tmp_path: Path) -> None:
    class Other(ForeignInputs):
        names = ("input_ids", "lengths")

    register_toy()
    register_inputs("other", Other)
    manifest = export(folder, tmp_path / "pair")
    names = {
        name: Graph(graph.file, graph.inputs[:2], graph.outputs)
        for name, graph in manifest.graphs.items()
    }
    for name, graph in names.items():
        specs = (graph.inputs[0], TensorSpec("lengths", (2,), "int32"))
        names[name] = Graph(graph.file, specs, graph.outputs)
    with pytest.raises(ArtifactError, match=r"takes input_ids int32 \[2, 48\].*Other gives"):
        opened(manifest_of(manifest.model, names), tmp_path / "pair")


def test_the_command_line_and_the_api_know_it(
    folder: Path, tmp_path: Path, arrays: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_toy()
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    prompt = list(b"some words")
    tokens = list(prompt)
    for _ in range(5):
        tokens.append(int(reference(arrays, np.array(tokens)).argmax()))
    options = {"max_new_tokens": 5, "eos_token_id": []}
    assert AutoModel.from_pretrained(folder).generate(prompt, **options) == [tokens]
    common = ["model=auto", f"load_checkpoint={folder}"]
    layout = ["export.layout=static_pair", "export_output=pair", "infer.infer_seq_length=32"]
    assert main(["run_mode=export", *common, *layout]) == 0
    monkeypatch.setattr(writer, "verify", lambda *_, **__: None)  # the first one was verified
    exported = Trainer(model=folder).export()
    assert read_manifest(exported).layout == "static_pair"  # what a registered family has
    predict = ["predict_data=some words", "max_new_tokens=5", "eos_token_id=[]"]
    assert main([*common, *predict, "backend=mslite", "infer.model_dir=pair"]) == 0
    result = json.loads(Path("outputs/latest/result.json").read_text(encoding="utf-8"))
    assert result["engine"] == "graph-cell"
    assert result["results"][0]["token_ids"] == tokens[len(prompt) :]


def test_layouts_that_a_registered_network_lacks(folder: Path, tmp_path: Path) -> None:
    register_toy()
    config = model_config_of(folder)
    assert config is not None
    weights = ReadAhead(open_checkpoint(folder, config))
    with pytest.raises(ConfigError, match="layout resizable does not support"):
        export_resizable(config, weights, tmp_path, "toy", batch_size=1, seq_length=LENGTH)
    weights.close()
    with pytest.raises(ConfigError, match="toy: a registered family"):
        formats.hf_from_model_config(config)


def test_invalid_registration() -> None:
    for name in ("llama", "qwen2"):
        with pytest.raises(ConfigError, match=f"{name} is there already"):
            register(name, network=ToyModel, tensors=toy_tensors, config=toy_config)
    with pytest.raises(ConfigError, match="expected letters"):
        register("a toy", network=ToyModel, tensors=toy_tensors, config=toy_config)
    with pytest.raises(ConfigError, match="source can be read"):
        register("toy", network=len, tensors=toy_tensors, config=toy_config)  # type: ignore[arg-type]
    assert "toy" not in KNOWN
    register_toy()
    register_toy()  # as a notebook does
    with pytest.raises(ConfigError, match="bloom is there already"):
        register_inputs("bloom", ForeignInputs)
    with pytest.raises(ConfigError, match="expected \\['increment', 'prefill'\\]"):
        register_inputs("foreign", ForeignInputs, steps={"prefill": ForeignPrefill})

    class Same(ForeignInputs):
        names = graph_inputs.LLAMA.names

    class Nameless(ForeignInputs):
        names = ()

    with pytest.raises(ConfigError, match="LlamaInputsOfInfer has the inputs input_ids, valid_len"):
        register_inputs("same", Same)
    with pytest.raises(ConfigError, match="expected a tuple of names"):
        register_inputs("nameless", Nameless)


SHARD = {"toy.words": "vocabulary", "toy.*.[qkv]": "outputs", "toy.*.out": "inputs"}
PLUGIN = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.api.test_register import SHARD, register_toy
register_toy(shard=SHARD)
"""


@pytest.mark.usefixtures("light_msrun")
def test_tensor_parallel(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """MindFormers' document 001: an own network on two cards, each with its part of the weights."""
    monkeypatch.chdir(tmp_path)
    Path("toy.py").write_text(PLUGIN)
    run = ["plugins=toy.py", f"load_checkpoint={folder}", "predict_data=hello"]
    run += ["max_new_tokens=8", "eos_token_id=[]"]

    def tokens(*settings: str) -> list[int]:
        assert main([*run, *settings]) == 0
        (row,) = json.loads(Path("outputs/latest/result.json").read_text())["results"]
        return row["token_ids"]

    alone = tokens()
    assert tokens("parallel=tp2", "parallel_config.vocab_emb_dp=false") == alone
    register_toy()
    refused([f"load_checkpoint={folder}", "predict_data=hello", "parallel=tp2"], 2)
    assert "lite_runner.register(..., shard=) says it" in capfd.readouterr().err


def test_invalid_shard(folder: Path) -> None:
    with pytest.raises(ConfigError, match="got 'rows', expected one of outputs, key_heads"):
        register_toy(shard={"toy.words": "rows"})
    register_toy(shard={"toy.0.w": "outputs"})
    with pytest.raises(ConfigError, match=r"no tensor of that name: toy\.words, toy\.0\.norm"):
        model_config = model_config_of(folder)
        assert model_config is not None
        open_checkpoint(folder, model_config)


CALLS: list[bool] = []


class CommonInputsOfInfer(BaseInputsOfInfer):
    """
    common infer inputs of llm models.
    """

    def get_inputs(  # type: ignore[override]
        self,
        model: Any,
        input_ids: Any = None,
        current_index: Any = None,
        valid_length: Any = None,
        init_reset: Any = None,
        is_first_iteration: bool = True,
        **kwargs: Any,
    ) -> Any:
        CALLS.append(is_first_iteration)
        if not is_first_iteration:
            inputs_tmp = []
            for i in range(len(current_index)):
                current_index_tmp = int(current_index[i]) - i * input_ids.shape[1]  # multibatch
                # use numpy to slice array to avoid complie ascend slice op
                inputs_tmp.append(input_ids[i][current_index_tmp : current_index_tmp + 1])
            input_ids = np.array(inputs_tmp, dtype=np.int32)
        inputs = [input_ids, current_index, init_reset, valid_length]
        lite_inputs = self.get_lite_tensor_list(inputs, model)
        return lite_inputs


@pytest.mark.usefixtures("unverified")
def test_the_documents_class_feeds_the_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    export = ["run_mode=export", "model=tiny_bloom", "export.layout=static_pair"]
    assert main([*export, "predict_batch_size=2", "export_output=x"]) == 0
    config = InferConfig(*files_of(Path("x")).values(), model_name="bloom")
    prompts = ["I love Beijing", "LLaMA is a large"]
    options = {"max_new_tokens": 5, "eos_token_id": [], "batch_size": 2}

    def texts() -> list[dict[str, list[str]]]:
        return InferTask.get_infer_task("text_generation", config)(prompts, **options)

    expected = texts()
    assert not CALLS
    assert InputOfInfer.MAPPING["bloom"] is graph_inputs.CommonInputsOfInfer, (
        "until a script adds its own"
    )
    InputOfInfer.MAPPING["bloom"] = CommonInputsOfInfer
    assert InputOfInfer.MAPPING["bloom"] is CommonInputsOfInfer
    assert graph_inputs.MAPPING["bloom"].names == graph_inputs.COMMON.names
    CALLS.clear()
    assert texts() == expected
    assert set(CALLS) == {True, False}


def test_the_documents_functions() -> None:
    ids, index, reset, valid = get_llm_common_prefill_model_input(2, 16)
    assert (ids.shape, index.shape, reset.dtype, valid.shape) == ((2, 16), (2,), bool, (2,))
    assert get_bloom_inc_model_input(2, 16)[0].shape == (2, 1)
    PREFILL_MODEL_INPUT_MAP["mine"] = get_llm_common_prefill_model_input
    assert PREFILL_MODEL_INPUT_MAP["mine"] is get_llm_common_prefill_model_input
    assert graph_inputs.MAPPING["mine"] is graph_inputs.COMMON
    PREFILL_MODEL_INPUT_MAP["qwen2"] = get_llm_common_prefill_model_input
    assert "qwen2" not in graph_inputs.MAPPING, "its own network says which inputs it has"


def test_invalid_input_tables() -> None:
    with pytest.raises(ConfigError, match="no class gives a graph the inputs float64"):
        PREFILL_MODEL_INPUT_MAP["mine"] = lambda batch, length: [np.ones((batch, length))]
    with pytest.raises(ConfigError, match="got int, expected a BaseInputsOfInfer"):
        InputOfInfer.MAPPING["mine"] = int
