"""Reading adapters that peft wrote (tests/fixtures/adapters), and refusing invalid ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy as st
from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder
from lite_runner.backends import Row
from lite_runner.backends.native.backend import NativeBackend, NativeOptions
from lite_runner.errors import ArtifactError
from lite_runner.native.packed_model import pack
from lite_runner.weights import DType, LazyTensor
from lite_runner.weights.checkpoint import model_config_in, open_checkpoint
from lite_runner.weights.formats.ckpt_file import write_ckpt
from lite_runner.weights.formats.safetensors_file import open_safetensors, write_safetensors
from lite_runner.weights.lora.adapter import Adapter, LoraPair, LoraSize, merged, merged_model
from lite_runner.weights.lora.adapter_reader import digest, open_adapters
from lite_runner.weights.lora.adapter_writer import write_adapters
from lite_runner.weights.read_ahead import QuantizedWeights
from tests.paths import FIXTURES

Change = Callable[..., Path]


def model(name: str) -> Decoder:
    found = model_config_in(FIXTURES / "reference" / name)
    assert found is not None
    return found


def adapters(name: str) -> dict[str, Adapter]:
    return open_adapters(FIXTURES / "adapters" / name, model(name))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "glm", "bloom", "gpt2"])
def test_every_adapter_of_peft_is_read(name: str) -> None:
    listed = json.loads((FIXTURES / "adapters" / name / "lora_adapter.json").read_text())
    found = adapters(name)
    assert list(found) == list(listed)
    for adapter in found.values():
        adapter.check_effective()
        adapter.check_copies(open_checkpoint(FIXTURES / "reference" / name, model(name)))
        for pair in adapter.pairs.values():
            assert pair.a.read().shape == pair.a.shape
            assert pair.b.read().shape == pair.b.shape == (pair.b.shape[0], pair.rank)


@pytest.mark.parametrize(
    ("dtypes", "scale", "expected"),
    [
        (("BF16", "BF16"), 2.0, True),
        (("BF16", "BF16"), -0.25, True),
        (("BF16", "BF16"), 0.75, False),  # scale * B has more digits
        (("BF16", "BF16"), 0.0, False),
        (("BF16", "F32"), 1.0, False),
        (("F16", "BF16"), 1.0, False),
    ],
)
def test_bfloat16_is_told_by_the_types_and_the_scale(
    dtypes: tuple[DType, DType], scale: float, expected: bool
) -> None:
    a, b = (LazyTensor((2, 2), dtype, lambda: np.zeros((2, 2), np.uint16)) for dtype in dtypes)
    plain = LoraPair(*(LazyTensor((2, 2), "BF16", a.read) for _ in range(2)), 1.0)
    assert Adapter("a", Path(), {"x": plain, "y": LoraPair(a, b, scale)}).bfloat16 == expected


def test_pages_of_a_file_are_dropped_once_read(
    tmp_path: Path, resident: Callable[[Path], int]
) -> None:
    """Hundreds of adapters take no more memory than the places for some of them."""
    folder = tmp_path / "all"
    shutil.copytree(FIXTURES / "adapters" / "llama" / "all", folder)
    (adapter,) = open_adapters(folder, model("llama")).values()
    for pair in adapter.pairs.values():
        a, b = pair.values()
        np.testing.assert_array_equal(a, pair.a.float32())
        np.testing.assert_array_equal(b, pair.b.float32() * np.float32(pair.scale))
    assert resident(folder / "adapter_model.safetensors") > 0
    for name, pair in adapter.pairs.items():
        adapter.padded(name, 8, pair.a.shape[1], pair.b.shape[0])
    assert resident(folder / "adapter_model.safetensors") == 0


def test_rank_and_scale_follow_the_patterns() -> None:
    pairs = adapters("llama")["patterns"].pairs
    numbers = {name: (pair.rank, pair.scale) for name, pair in pairs.items()}
    layers = "model.layers.0.", "model.layers.1."
    for layer in layers:
        assert numbers[f"{layer}attention.wq.weight"] == (1, 12.0)
        assert numbers[f"{layer}attention.wv.weight"] == (4, 3.0)
        assert numbers[f"{layer}feed_forward.w3.weight"] == (4, 7 / 4)
    assert [numbers[f"{layer}attention.wk.weight"] for layer in layers] == [(4, 0.75), (4, 3.0)]
    assert [numbers[f"{layer}feed_forward.w2.weight"] for layer in layers] == [(4, 3.0), (5, 2.4)]
    ranked = adapters("llama")["rank_64"].pairs["model.layers.1.attention.wv.weight"]
    assert (ranked.rank, ranked.scale) == (64, 4 / 8)  # rank-stabilized: the root of 64


def test_modules_that_are_left_out_have_no_pair() -> None:
    both = ["model.layers.1.feed_forward.w1.weight", "model.layers.1.feed_forward.w3.weight"]
    assert list(adapters("llama")["second_layer"].pairs) == both
    assert all(
        name.startswith("model.layers.1.") for name in adapters("qwen2")["feed_forward"].pairs
    )


def test_fused_modules_share_their_a() -> None:
    for name, start in (("bloom", "blocks.1"), ("gpt2", "backbone.blocks.1")):
        pairs = adapters(name)["all"].pairs
        q, k, v = (pairs[f"{start}.attention.dense{i}.weight"] for i in (1, 2, 3))
        assert q.a is k.a is v.a
        heads = model(name).num_heads * model(name).head_dim
        assert q.b.shape == k.b.shape == v.b.shape == (heads, 8)


def test_the_embedding_takes_tokens_in_and_a_tied_head_is_its_own_place() -> None:
    tied = model("qwen2")
    (embedding,) = adapters("qwen2")["embedding"].pairs.values()
    assert embedding.a.shape == (4, tied.vocab_size) and embedding.b.shape == (tied.hidden_size, 4)
    head = adapters("qwen2")["head"]
    assert head.pairs["lm_head.weight"].a.shape == (4, tied.hidden_size)
    assert list(head.copies) == ["model.tok_embeddings.embedding_weight"]


def test_only_the_named_ones_and_one_folder_alone() -> None:
    folder = FIXTURES / "adapters" / "gpt2"
    some = open_adapters(folder / "lora_adapter.json", model("gpt2"), ["patterns", "patterns"])
    assert list(some) == ["patterns"]
    assert list(open_adapters(folder / "attention", model("gpt2"))) == ["attention"]
    alone = open_adapters(folder / "all", model("gpt2"))["all"]
    assert digest(alone) == digest(adapters("gpt2")["all"])
    assert digest(alone) != digest(some["patterns"])


@pytest.fixture
def change(tmp_path: Path) -> Change:
    """`change("all", r=3)` copies llama's adapter with another config, or other tensors."""

    def make(
        name: str = "all", tensors: dict[str, Any] | None = None, /, **settings: object
    ) -> Path:
        folder = tmp_path / name
        shutil.copytree(FIXTURES / "adapters/llama" / name, folder)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        if tensors is not None:
            file = folder / "adapter_model.safetensors"
            held = st.load_file(file) | tensors
            st.save_file({n: t for n, t in held.items() if t is not None}, file)
        return folder

    return make


def refusal(path: Path, names: list[str] | None = None, **options: Any) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_adapters(path, model("llama"), names, **options)
    return str(caught.value)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"r": 7}, "a is [8, 32], expected [7, 32], r is 7 in adapter_config.json"),
        ({"r": 0}, "r is 0, expected an integer of at least 1"),
        ({"r": "8"}, "r is '8'"),
        ({"r": None}, "r is None"),
        ({"lora_alpha": 0}, "lora_alpha is 0, expected a number other than 0"),
        ({"lora_alpha": 10**400}, "a number of 401 digits: 1000"),
        ({"target_modules": ["q_proj"]}, "adapter_config.json does not target it"),
        (
            {"target_modules": ["q_prj"]},
            "names 'q_prj', which the model does not have; did you mean q_",
        ),
        ({"target_modules": []}, "target_modules is [], expected a list of modules"),
        ({"target_modules": ".*nothing"}, "'.*nothing' matches no module of the model"),
        ({"target_modules": "(.*"}, "expected a regular expression"),
        ({"target_modules": "(a+)+b"}, "expected a pattern without repeated groups"),
        ({"exclude_modules": ".*"}, "matches no module of the model that is not excluded"),
        ({"layers_to_transform": [7]}, "that is not excluded"),
        ({"layers_to_transform": "1"}, "layers_to_transform is '1'"),
        ({"rank_pattern": {"q_proj": 9}}, "expected [9, 32]"),
        ({"rank_pattern": {"*": 9}}, "rank_pattern is '*', expected a regular expression"),
        ({"rank_pattern": [1]}, "rank_pattern is [1], expected an object"),
        ({"use_rslora": 1}, "use_rslora is 1, expected true or false"),
        ({"use_dora": True}, "use_dora is True: DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']: whole modules"),
        ({"lora_bias": True}, "lora_bias is True: a bias beside B"),
        ({"bias": "all"}, "bias is 'all', expected none"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', expected LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "which changes the base weights"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is [[0, 2]]: unknown here"),
        ({"something_new": 0.5}, "something_new is 0.5: unknown here, and it may change"),
    ],
)
def test_a_config_that_is_wrong_or_no_plain_lora(
    change: Change, settings: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(change("all", **settings))


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({f"{Q}.lora_A.weight": None}, "q_proj: has no lora_a"),
        ({f"{Q}.lora_A.weight": None, f"{Q}.lora_B.weight": None}, "q_proj: not in the file"),
        ({f"{Q}.lora_A.weight": np.zeros((8, 48), np.float32)}, "a is [8, 48], expected [8, 32]"),
        ({f"{Q}.lora_B.weight": np.zeros((63, 8), np.float32)}, "b is [63, 8], expected [64, 8]"),
        ({f"{Q}.lora_magnitude_vector": np.ones(64, np.float32)}, "not a tensor of plain LoRA"),
        ({f"{Q}.lora_B.bias": np.ones(64, np.float32)}, "lora_B.bias: not a tensor of plain LoRA"),
        ({f"{Q}.base_layer.weight": np.ones((64, 32), np.float32)}, "q_proj: has a copy, too"),
        (
            {f"{Q}.lora_A.weight".replace("layers.0", "layers.9"): np.ones((8, 32), np.float32)},
            "model.layers.9.self_attn.q_proj: the model has no such module",
        ),
    ],
)
def test_tensors_that_do_not_fit(change: Change, tensors: dict[str, Any], expected: str) -> None:
    error = refusal(change("all", tensors))
    assert expected in error and "does not fit the model and adapter_config.json" in error


def test_an_adapter_of_another_base() -> None:
    assert "is it an adapter of another base? The model has: embed_tokens, q_proj" in refusal(
        FIXTURES / "adapters/bloom/all"
    )
    # The same names and another width.
    error = refusal(FIXTURES / "adapters/qwen2/attention")
    assert "o_proj: a is [2, 32], expected [2, 64]" in error and "trained on this base?" in error


def test_an_unknown_name_has_a_suggestion() -> None:
    error = refusal(FIXTURES / "adapters/llama", ["Patern"])
    assert "no adapter 'Patern'; did you mean patterns?" in error
    assert "it has: all, rank_64, patterns, second_layer, ends" in error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not valid JSON"),
        ("[]", "a JSON list, expected an object"),
        ("{}", "lists no adapter"),
        ('{"a": "x", "a": "y"}', "'a' occurs twice"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ('{"a": 1}', "a: got 1, expected the path of a folder"),
        ('{"a": ""}', "a: got '', expected the path of a folder"),
        ('{"a": "x\\u0000y"}', "expected the path of a folder"),
        ('{"a/b": "x"}', "'a/b' cannot be the name of an adapter"),
        ('{"null": "x"}', "'null' cannot be the name of an adapter"),
        ('{"Base": "x"}', "'Base' cannot be the name of an adapter"),
        ('{"a": "x"}', "x: no such folder"),
        ('{"a": "../x"}', "x: no such folder"),
        ('{"a": "link"}', "no adapter_config.json"),
        ('{"a": "round"}', "round"),
        (f'{{"a": "{"x" * 300}"}}', "File name too long"),
    ],
)
def test_a_listing_that_is_broken(tmp_path: Path, text: str, expected: str) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    (folder / "link").symlink_to("/etc")
    (folder / "round").symlink_to("round")
    (folder / "lora_adapter.json").write_text(text)
    assert expected in refusal(folder / "lora_adapter.json")


@pytest.mark.parametrize("name", ["none", "Base", "null"])
def test_one_adapter_whose_name_means_the_base_model(change: Change, name: str) -> None:
    """adapter_id= could not choose it, and a run without one would compute with the base."""
    folder = change("all")
    error = refusal(folder.rename(folder.with_name(name)))
    assert f"the name {name} means the base model" in error and "lora_adapter.json" in error


def test_the_folders_may_lie_anywhere_or_below_the_root_that_is_named(
    change: Change, tmp_path: Path
) -> None:
    folder = change("all")
    listing = tmp_path / "lists" / "mine.json"
    listing.parent.mkdir()
    listing.write_text(json.dumps({"one": str(folder), "two": "../all"}))
    for root in (None, tmp_path):
        found = open_adapters(listing, model("llama"), root=root)
        assert list(found) == ["one", "two"]
        assert found["one"].pairs.keys() == found["two"].pairs.keys()
    assert "adapter_root=DIR" in refusal(listing, root=tmp_path / "lists")
    link = tmp_path / "lists/link"
    link.symlink_to(folder)
    listing.write_text('{"one": "link"}')
    assert "lies outside adapter_root=" in refusal(listing, root=tmp_path / "lists")


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_links_lead_out_of_the_root(change: Change, tmp_path: Path, file: str) -> None:
    root, link = change("all").parent / "root", tmp_path / "root/cache/snapshots/all" / file
    link.parent.parent.mkdir(parents=True)
    (tmp_path / "all").rename(link.parent)
    blob = tmp_path / "root/cache/blobs/one"
    blob.parent.mkdir()
    link.rename(blob)
    link.symlink_to(Path("../../blobs/one"))  # as Hugging Face's cache has it
    listing = root / "lora_adapter.json"
    listing.write_text('{"one": "cache/snapshots/all"}')
    for path in (listing, root, link.parent):
        assert len(open_adapters(path, model("llama"), root=root)) == 1
    outside = tmp_path / "one"
    blob.rename(outside)
    link.unlink()
    link.symlink_to(outside)
    for path in (listing, root, link.parent):
        error = refusal(path, root=root)
        assert f"{link}: leads to {outside}, which lies outside adapter_root={root}" in error
        assert len(open_adapters(path, model("llama"))) == 1
    link.unlink()
    link.symlink_to(link)
    assert str(link) in refusal(listing, root=root)


def test_a_listing_that_a_link_leads_out_of_the_root(change: Change, tmp_path: Path) -> None:
    root = change("all")
    listing = tmp_path / "listing.json"
    listing.write_text(json.dumps({"one": str(root)}))
    (root / "lora_adapter.json").symlink_to(listing)
    assert f"{root}/lora_adapter.json: leads to {listing}" in refusal(root, root=root)
    assert list(open_adapters(listing, model("llama"), root=root)) == ["one"]  # named as it is
    assert list(open_adapters(root, model("llama"))) == ["one"]


def test_files_that_are_missing_or_not_to_be_trusted(change: Change, tmp_path: Path) -> None:
    assert "no such file or folder" in refusal(tmp_path / "nothing.json")
    folder = change("all")
    weights = folder / "adapter_model.safetensors"
    assert f"expected lora_adapter.json or a folder\n  -> try {folder}" in refusal(weights)
    weights.rename(folder / "adapter_model.bin")
    assert "a pickle, which can run any code" in refusal(folder)
    (folder / "adapter_model.bin").rename(folder / "adapter_model.ckpt")
    (folder / "adapter_model.ckpt").write_bytes(b"PK\x03\x04...")
    assert "a pickle, which can run any code" in refusal(folder)
    (folder / "adapter_model.ckpt").unlink()
    assert "no weights, expected adapter_model.safetensors or adapter_model.ckpt" in refusal(folder)
    weights.write_bytes(b"\x10")
    assert "not a valid" in refusal(folder)
    (folder / "adapter_model.ckpt").write_bytes(b"")
    assert "holds both" in refusal(folder)
    (folder / "adapter_config.json").unlink()
    assert "no adapter_config.json, expected one" in refusal(folder)


def test_an_adapter_that_changes_nothing_and_one_with_another_embedding(change: Change) -> None:
    held = st.load_file(FIXTURES / "adapters/llama/all/adapter_model.safetensors")
    zero = {name: np.zeros_like(value) for name, value in held.items() if "lora_B" in name}
    untrained = open_adapters(change("all", zero), model("llama"))["all"]
    with pytest.raises(ArtifactError, match="has no effect: the products of all 14 pairs"):
        untrained.check_effective()
    copy = "base_model.model.lm_head.base_layer.weight"
    other = open_adapters(change("ends", {copy: np.ones((96, 32), np.float32)}), model("llama"))
    base = open_checkpoint(FIXTURES / "reference/llama", model("llama"))
    with pytest.raises(
        ArtifactError, match=r"holds a whole lm_head\.weight that is not the base's"
    ):
        other["ends"].check_copies(base)


@pytest.mark.parametrize("suffix", ["lora_{}", "mindpet_delta_lora_{}"])
@pytest.mark.parametrize("config", ["adapter_config.json", "config.json"])
def test_a_folder_as_mindformers_has_it(tmp_path: Path, suffix: str, config: str) -> None:
    """The example of its documents, with alpha 16 and rank 8."""
    settings = {"lora_alpha": 16, "lora_dropout": 0.05, "r": 8, "target_modules": ["wq", "w2"]}
    (tmp_path / config).write_text(json.dumps(settings))
    generator = np.random.default_rng(0)
    stored = {}
    for layer in range(2):
        for module, (out, width) in (("attention.wq", (64, 32)), ("feed_forward.w2", (32, 48))):
            for kind, shape in (("a", (8, width)), ("b", (out, 8))):
                values = generator.standard_normal(shape).astype(np.float32)
                name = f"model.layers.{layer}.{module}.{suffix.format(kind)}"
                stored[name] = LazyTensor(shape, "F32", lambda values=values: values)
    write_ckpt(tmp_path / "adapter_model.ckpt", stored)
    (found,) = open_adapters(tmp_path, model("llama")).values()
    assert found.name == tmp_path.name and len(found.pairs) == 4
    pair = found.pairs["model.layers.1.feed_forward.w2.weight"]
    name = f"model.layers.1.feed_forward.w2.{suffix}"
    assert pair.scale == 2.0
    np.testing.assert_array_equal(pair.a.read(), stored[name.format("a")].read())
    np.testing.assert_array_equal(pair.b.read(), stored[name.format("b")].read())


def test_names_of_the_bare_model_lack_their_first_part(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "adapters/gpt2/patterns", tmp_path / "bare")
    file = tmp_path / "bare/adapter_model.safetensors"
    st.save_file({n.replace("transformer.", ""): t for n, t in st.load_file(file).items()}, file)
    bare = open_adapters(tmp_path / "bare", model("gpt2"))["bare"]
    whole = adapters("gpt2")["patterns"]
    assert list(bare.pairs) == list(whole.pairs)
    assert [pair.scale for pair in bare.pairs.values()] == [p.scale for p in whole.pairs.values()]


TOLERANCE = 1e-4  # of the largest logit, as of the base models against transformers


def parts(name: str, adapter: str) -> tuple[Decoder, dict[str, LazyTensor], Adapter]:
    model = model_config_in(FIXTURES / "reference" / name)
    assert model is not None
    base = open_checkpoint(FIXTURES / "reference" / name, model)
    return model, base, open_adapters(FIXTURES / "adapters" / name, model)[adapter]


@pytest.mark.parametrize(
    ("name", "index", "adapter"),
    [
        ("llama", 3, "patterns"),
        ("llama", 5, "ends"),
        ("qwen2", 3, "embedding"),  # the head was tied to it
        ("qwen2", 4, "head"),
        ("bloom", 1, "all"),
        ("gpt2", 1, "all"),
    ],
)
def test_logits_equal_pefts(name: str, index: int, adapter: str) -> None:
    model, base, opened = parts(name, adapter)
    expected = np.load(FIXTURES / "adapters" / name / "expected.npz")
    both = merged_model(model, opened)
    layers = pack(both, QuantizedWeights(merged(base, opened, model), both))
    options = NativeOptions(slots=len(expected["prompts"]), length=11)
    backend = NativeBackend(both, layers, options)
    steps = [expected["prompts"], *np.split(expected["continuations"], 2, axis=1)]
    logits, position = [], 0
    for tokens in steps:
        logits.append(backend.forward([Row(i, row, position) for i, row in enumerate(tokens)]))
        position += tokens.shape[1]
    wanted = expected["logits"][index]
    assert np.abs(np.stack(logits, axis=1) - wanted).max() <= TOLERANCE * np.abs(wanted).max()


def test_only_the_adapters_weights_change_and_keep_their_type() -> None:
    model, base, adapter = parts("gpt2", "patterns")
    halves = {
        name: LazyTensor(tensor.shape, "F16", lambda t=tensor: t.float32().astype(np.float16))
        for name, tensor in base.items()
    }
    found = merged(halves, adapter, model)
    assert list(found) == list(base)
    for name, tensor in found.items():
        before, after = halves[name].read(), tensor.read()
        assert after.dtype == np.float16 and after.shape == before.shape
        assert (after.tobytes() != before.tobytes()) == (name in adapter.pairs)
        if name in adapter.pairs:  # held [in, out]
            pair = adapter.pairs[name]
            product = pair.b.read().astype(np.float64) @ pair.a.read().astype(np.float64)
            exact = before.astype(np.float64) + pair.scale * product.T
            np.testing.assert_allclose(after, exact, rtol=2**-11, atol=1e-6)


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        (2.0**-9, 0x3F80),  # a quarter of the last place: down
        (2.0**-8, 0x3F80),  # half of it: to the even one, down
        (3 * 2.0**-8, 0x3F82),  # half of it: to the even one, up
        (3 * 2.0**-9, 0x3F81),
    ],
)
def test_bfloat16_is_rounded_to_the_nearest(added: float, expected: int) -> None:
    model, base, adapter = parts("llama", "all")
    name = "model.layers.0.attention.wq.weight"

    def constant(shape: tuple[int, int], value: float) -> LazyTensor:
        return LazyTensor(shape, "F32", lambda: np.full(shape, value, np.float32))

    ones = LazyTensor((64, 32), "BF16", lambda: np.full((64, 32), 0x3F80, np.uint16))
    pair = LoraPair(constant((1, 32), 1.0), constant((64, 1), added / 2), 2.0)
    found = merged(dict(base) | {name: ones}, replace(adapter, pairs={name: pair}), model)
    assert found[name].dtype == "BF16"
    assert set(found[name].read().ravel()) == {expected}


def test_merges_that_are_refused() -> None:
    model, base, adapter = parts("bloom", "embedding")
    with pytest.raises(ArtifactError, match="bloom has one tensor for both, so it cannot be merg"):
        merged(base, adapter, model)
    model, base, adapter = parts("llama", "all")
    name, pair = next(iter(adapter.pairs.items()))
    shape, rank = base[name].shape, pair.a.shape[0]
    ones = LazyTensor(pair.a.shape, "F32", lambda: np.ones(pair.a.shape, np.float32))
    largest = 3.4028235e38 / rank / pair.scale  # its product is a float32, and no BF16
    zeros = {
        "F32": base[name],
        "BF16": LazyTensor(shape, "BF16", lambda: np.zeros(shape, np.uint16)),
    }
    for dtype, value in (("F32", np.nan), ("BF16", np.nan), ("BF16", largest)):
        b = np.full(pair.b.shape, value, np.float32)
        held = replace(pair, a=ones, b=LazyTensor(b.shape, "F32", lambda b=b: b))  # type: ignore[misc]
        changed = replace(adapter, pairs={**adapter.pairs, name: held})
        with pytest.raises(
            ArtifactError, match=f"{name} merged with it has values that are not .* for {dtype}"
        ):
            merged(base | {name: zeros[dtype]}, changed, model)[name].read()


def test_an_adapter_of_fused_modules_changes_their_parts(tmp_path: Path) -> None:
    """Of ChatGLM-6B, for which peft has no class: against its files, merged as peft does, and as
    its own operators apply it."""
    folder = FIXTURES / "reference/chatglm_6b"
    model = model_config_in(folder)
    assert model is not None
    stored = {
        name: one.read() for name, one in open_safetensors(folder / "model.safetensors").items()
    }
    rng = np.random.default_rng(2)
    tensors, merged_file = {}, dict(stored)
    for layer in range(2):
        for module in ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h"):
            name = f"transformer.layers.{layer}.{module}"
            weight = stored[f"{name}.weight"]
            a = rng.standard_normal((2, weight.shape[1])).astype(np.float32) / 8
            b = rng.standard_normal((weight.shape[0], 2)).astype(np.float32) / 8
            tensors |= {
                f"base_model.model.{name}.lora_A.weight": a,
                f"base_model.model.{name}.lora_B.weight": b,
            }
            merged_file[f"{name}.weight"] = weight + 2 * (b @ a)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    targets = ["query_key_value", "dense", "dense_h_to_4h"]
    written = tmp_path / "tuned"
    written.mkdir()
    (written / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": targets}))
    write_safetensors(written / "adapter_model.safetensors", lazy(tensors), {"format": "pt"})
    adapter = open_adapters(written, model)["tuned"]

    write_safetensors(tmp_path / "model.safetensors", lazy(merged_file), {"format": "pt"})
    wanted = open_checkpoint(tmp_path / "model.safetensors", model)
    base = open_checkpoint(folder, model)
    for name, tensor in merged(base, adapter, model).items():
        np.testing.assert_allclose(tensor.read(), wanted[name].read(), rtol=1e-5, atol=1e-6)

    prompt = np.array([33, 5, 121, 7, 8, 124], np.int32)
    lora = LoraSize(1, 2, frozenset(adapter.pairs))
    options = NativeOptions(1, 48, lora=lora)
    layers = pack(model, QuantizedWeights(base, model), lora)
    tuned = NativeBackend(model, layers, options, [adapter])
    layers = pack(model, QuantizedWeights(wanted, model))
    plain = NativeBackend(model, layers, NativeOptions(1, 48))
    assert tuned.adapters is not None
    slot = tuned.adapters.pin("tuned")
    found, expected = tuned.forward([Row(0, prompt, 0, slot)]), plain.forward([Row(0, prompt, 0)])
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.abs(tuned.forward([Row(0, prompt, 0)]) - expected).max() > 1e-2

    write_adapters({"tuned": adapter}, model, tmp_path / "mf", "mindformers", listed=False)
    again = open_adapters(tmp_path / "mf", model)
    for name, pair in next(iter(again.values())).pairs.items():
        assert np.array_equal(pair.b.read(), adapter.pairs[name].b.read())


def lazy(arrays: dict[str, NDArray[np.float32]]) -> dict[str, LazyTensor]:
    return {
        name: LazyTensor(array.shape, "F32", lambda array=array: array)
        for name, array in arrays.items()
    }
