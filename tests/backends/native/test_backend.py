"""Our own operators as a backend: against transformers' logits (tests/fixtures/reference), against
MindSpore's own operators, and against themselves, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner import native
from lite_runner.architectures import parameters
from lite_runner.architectures.quantization import Quant, Quantization, Scheme
from lite_runner.architectures.reference import forward
from lite_runner.backends import Row
from lite_runner.backends.native.backend import NativeBackend
from lite_runner.config.sections import DType
from lite_runner.errors import ArtifactError
from lite_runner.generation.sampling import logits_of_text
from lite_runner.native.model import NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.weights import LazyIntegers, LazyTensor
from lite_runner.weights.lora.adapter import Adapter, LoraPair, pool_size
from lite_runner.weights.quantization.quantize import with_quantization
from lite_runner.weights.quantization.quantized import QuantizedTensor, quantize
from lite_runner.weights.read_ahead import QuantizedWeights
from tests import references
from tests.backends.native import reproducible
from tests.backends.shared import LONGROPE, RowsKeepApart, check_generated
from tests.each import each
from tests.paths import FIXTURES

CASES = references.every()
ONE_PIECE = ("chatglm_6b", "llama_rope_dynamic")  # each token depends on the whole prompt
# float32 rounding over two layers; a wrong slope, scale or position is off by 1e-2 and more.
TOLERANCE = 1e-5
LONG_TOLERANCE = {"qwen3_next": 3e-5}  # of a state after 300 tokens
# Inputs of integer matrices are rounded to 16 bits.
INTEGER_TOLERANCE = 5e-4
# Its attention_factor sharpens attention: weights that are 3e-5 otherwise move its logits by
# 1.2e-3, those of phi3 by 3e-4; smollm3's hang on the last bits of the weights of its keys.
SENSITIVE = {"phi3_longrope": 2e-3, "smollm3": 6e-4}
# Keys and values rounded to 11 bits and to 8, in networks whose random weights make them large.
CACHE_TOLERANCE = {"fp16": 5e-3, "int8": 8e-2}
# Weights rounded to 11 bits and to 8, by a part in 2048 and in 256 at most, of the largest logit:
# the activations of random networks are several times as large as their logits.
WEIGHT_TOLERANCE = {"float16": 7e-3, "bfloat16": 7e-2}
# Rounding sends a token to another expert, and adds up in a recurrent state of 300 tokens.
OTHER_EXPERTS = {"qwen2_moe_window": 2, "qwen3_next": 6, "qwen3_next_dense": 3}
OTHER_EXPERTS |= {"granitemoehybrid_dense": 3, "llama4": 2, "llama4_plain": 2}
Reference = Callable[[str], Any]
Error = Callable[[NDArray, NDArray], float]


@each("case", CASES)
def test_logits_equal_transformers(case: str, reference: Reference, relative_error: Error) -> None:
    known = reference(case)
    model = known.native(len(known.prompts), known.length)
    assert relative_error(known.run(model), known.logits) <= LONG_TOLERANCE.get(case, TOLERANCE)


@pytest.mark.parametrize("case", ["gemma", "granite", "llama", "qwen3", "stablelm"])
def test_hidden_states_equal_transformers(
    case: str, reference: Reference, relative_error: Error
) -> None:
    """Their means and the last ones, chunk after chunk."""
    known, expected = reference(case), np.load(FIXTURES / "embeddings.npz")
    model, means, last = known.native(2, known.length, cache="fp32"), [], []
    for prompt in known.prompts:
        starts = range(0, len(prompt), 7)
        parts = [(start, prompt[start : start + 7]) for start in starts]
        rows = [Row(1, part, start, logits=len(part), hidden=True) for start, part in parts]
        states = np.concatenate([model.hidden([row]) for row in rows])
        means.append(states.mean(axis=0))
        last.append(model.hidden([replace(rows[-1], logits=1)])[0])
        assert (last[-1] == states[-1]).all()
    assert relative_error(np.array(means), expected[f"{case}-mean"]) <= TOLERANCE
    assert relative_error(np.array(last), expected[f"{case}-last"]) <= TOLERANCE


@each("case", [case for case in CASES if case not in ONE_PIECE])
def test_chunks_other_rows_and_copies_change_no_bit(
    case: str, reference: Reference, relative_error: Error
) -> None:
    """A longer prompt than transformers was given, in one piece as the NumPy reference has it."""
    known = reference(case)
    config, model = known.config, known.native(3, 104)
    prompt, other = np.random.default_rng(1).integers(0, config.vocab_size, (2, 90), np.int32)
    prompt = prompt[: config.seq_length - 1]
    (whole,) = model.forward([Row(0, prompt, 0)])
    weights = {name: tensor.float32() for name, tensor in known.tensors().items()}
    assert relative_error(whole, forward(config, weights, prompt)[-1]) <= TOLERANCE
    for start, end in itertools.pairwise(sorted({0, 1, 17, 23, len(prompt)})):
        last = model.forward([Row(1, prompt[start:end], start)])
    model.forward([Row(0, other[:20], 0), Row(2, prompt[:-1], 0)])
    _, beside = model.forward([Row(0, other[20:21], 20), Row(2, prompt[-1:], len(prompt) - 1)])
    model.copy([2], [1])
    copied = model.forward([Row(1, prompt[-5:], len(prompt) - 5)])
    assert [one.tobytes() for one in (last[0], beside, copied[0])] == [whole.tobytes()] * 3


def test_adapters_of_recurrent_layers_and_gated_attention(
    reference: Reference, relative_error: Error
) -> None:
    """As weights that they are merged with."""
    known, random = reference("qwen3_next"), np.random.default_rng(0)
    config, tensors, pairs, merged = known.config, known.tensors(), {}, {}
    for one in parameters(config):
        if one.role in ("query", "recurrent_in", "recurrent_gate", "recurrent_out"):
            up, down = (random.normal(0, 0.2, (size, 3)) for size in one.shape)
            up, down = up.astype(np.float32), down.T.astype(np.float32)
            parts = [LazyTensor(x.shape, "F32", x.copy) for x in (down, up)]
            pairs[one.name] = LoraPair(*parts, 1.0)
            weight = tensors[one.name].float32() + up @ down
            merged[one.name] = LazyTensor(weight.shape, "F32", weight.copy)
    adapter = Adapter("a", Path(), pairs)
    lora = pool_size([adapter], 1)
    prompt = random.integers(0, config.vocab_size, 30).astype(np.int32)

    def opened(weights: Any, lora: Any = None, adapters: Any = ()) -> NativeBackend:
        layers = pack(config, QuantizedWeights(weights, config), lora)
        return NativeBackend(config, layers, NativeOptions(2, 64, lora=lora), adapters)

    model, plain = opened(tensors, lora, [adapter]), opened(tensors)
    assert model.adapters is not None and model.adapters.pin("a") == 0
    got = model.forward([Row(0, prompt, 0, adapter_slot=0), Row(1, prompt, 0)])
    wanted = opened(tensors | merged).forward([Row(0, prompt, 0)])
    assert relative_error(got[:1], wanted) <= TOLERANCE < relative_error(got[1:], wanted)
    assert (got[1:] == plain.forward([Row(0, prompt, 0)])).all()


# In turn: either in each architecture.
@each(("case", "dtype"), list(zip(CASES, itertools.cycle(["float16", "bfloat16"]), strict=False)))
def test_weights_of_16_bits(
    case: str, dtype: DType, reference: Reference, relative_error: Error
) -> None:
    """Kept in half the bytes they give, to the bit, what their values give in float32."""
    known = reference(case)
    halves = known.tensors(dtype=dtype)
    matrices = {name: len(one.shape) > 1 for name, one in halves.items()}
    assert {name: one.dtype != "F32" for name, one in halves.items()} == matrices
    floats = {
        name: LazyTensor(one.shape, "F32", one.float32) if matrices[name] else one
        for name, one in halves.items()
    }
    found, wanted = (
        NativeBackend(
            known.config,
            pack(known.config, QuantizedWeights(tensors, known.config)),
            NativeOptions(slots=len(known.prompts), length=known.length),
        )
        for tensors in (halves, floats)
    )
    logits = known.run(found)
    assert logits.tobytes() == known.run(wanted).tobytes()
    error = relative_error(logits, known.logits)
    most = WEIGHT_TOLERANCE[dtype] * OTHER_EXPERTS.get(case, 1)
    assert TOLERANCE < error <= most  # rounded, and really so


@pytest.mark.parametrize(
    "case", ["llama_biases", "gpt2", "bloom", "mixtral", "qwen3_tied", "gemma2"]
)
def test_inputs_in_bfloat16(case: str, reference: Reference, relative_error: Error) -> None:
    known = reference(case)
    found, wide = (
        NativeBackend(
            known.config,
            pack(
                known.config,
                QuantizedWeights(known.tensors(dtype="bfloat16"), known.config),
                rounded_input=rounded,
            ),
            NativeOptions(len(known.prompts), known.length),
        )
        for rounded in (True, False)
    )
    logits = known.run(found)
    assert relative_error(logits, known.run(wide)) > TOLERANCE  # rounded, and really so
    assert relative_error(logits, known.logits) <= WEIGHT_TOLERANCE["bfloat16"]
    # A row does not depend on those beside it.
    alone = known.run(found, slots=[0])
    assert alone.tobytes() == logits[:1].tobytes()


@each("cache", ["fp16", "int8"])
@each(
    "case",
    [
        *("bloom", "llama", "gpt2", "qwen3", "mistral", "olmo2", "granite", "smollm3_window"),
        *("gemma2", "gemma3", "chatglm_6b", "starcoder2", "gpt_neox"),
        *("gpt_oss", "opt", "cohere2"),
        "mixtral",  # rounding may send a token to another expert, but not these
    ],
)
def test_a_rounded_cache_is_close(
    case: str, cache: str, reference: Reference, relative_error: Error
) -> None:
    known = reference(case)
    model = known.native(len(known.prompts), 64, cache=cache)
    error = relative_error(known.run(model), known.logits)
    assert TOLERANCE < error <= CACHE_TOLERANCE[cache]  # rounded, and really so


@each(
    ("case", "quant"),
    [
        *(
            (case, "a16w8")
            for case in ("bloom", "gpt2", "llama_biases", "qwen2", "qwen2_window", "chatglm_6b")
        ),
        *(
            (case, quant)
            for case in (
                *("qwen3", "mistral", "olmo2", "granite", "smollm3", "chatglm", "glm4"),
                *("gemma2", "gemma3", "phi3", "phi3_long", "starcoder2", "gpt_neox"),
                *("qwen3_moe", "mixtral"),
            )
            for quant in ("a16w8", "a16w4")
        ),
        ("bloom", "a16w4"),
        ("phi3_longrope", "a16w8"),
        *(
            (case, "a16w8")
            for case in (
                *("cohere_normed", "cohere2", "ernie4_5", "exaone4", "gemma", "glm4_moe"),
                *("gpt_oss", "granitemoe", "hunyuan", "nemotron", "olmo3", "olmoe", "opt"),
                *("phi", "qwen2_moe", "seed_oss", "stablelm"),
                *("falcon_new", "hunyuan_moe", "mpt"),
            )
        ),
    ],
)
def test_integers_compute_what_their_floats_compute(
    case: str, quant: Quant, reference: Reference, relative_error: Error
) -> None:
    known = reference(case)
    integers = known.run(known.native(len(known.prompts), 64, quant))
    tensors = known.tensors(quant)
    floats = {name: one.float32() for name, one in tensors.items()}
    turned = {name for name, one in tensors.items() if one.integers and name.endswith(TURNED)}

    class Floats:
        def matrix(self, name: str) -> NDArray[np.float32]:
            return np.ascontiguousarray(floats[name].T if name in turned else floats[name])

        def vector(self, name: str) -> NDArray[np.float32]:
            return floats[name]

    options = NativeOptions(slots=len(known.prompts), length=64)
    wanted = known.run(NativeBackend(known.config, pack(known.config, Floats()), options))
    assert relative_error(integers, wanted) <= SENSITIVE.get(case, INTEGER_TOLERANCE)
    assert relative_error(integers, known.logits) > 1e-3


TURNED = ("mapping.weight", "projection.weight")  # held [in, out]


class SomeIntegers:
    """A file's matrices: some as integers of 8 or 4 bits, some as floats, and one as
    integers that cannot be had."""

    def __init__(self, known: Any) -> None:
        self.known, self.tensors = known, known.tensors()
        forms = itertools.cycle([(8, 32), None, (4, 32), "broken", (8, 32), (4, 32)])
        for name, tensor in self.tensors.items():
            if len(tensor.shape) == 2 and tensor.shape[1] % 32 == 0 and "position" not in name:
                self.tensors[name] = self.held(tensor, next(forms))

    def held(self, tensor: LazyTensor, form: object) -> LazyTensor:
        if form is None:
            return tensor
        if form == "broken":
            return replace(tensor, integers=LazyIntegers(Scheme(8, 32), self.refuse, True))
        scheme = Scheme(*form)
        matrix = quantize(tensor.float32(), scheme.bits, scheme.group)
        integers = LazyIntegers(scheme, lambda: matrix, True)
        return LazyTensor(tensor.shape, "F32", matrix.float32, integers=integers)

    def refuse(self) -> QuantizedTensor:
        raise ArtifactError("a scale that is not finite")

    def logits(
        self, tensors: dict[str, LazyTensor], *, dequantize: bool = False
    ) -> NDArray[np.float32]:
        known = self.known
        weights = QuantizedWeights(tensors, known.config)
        layers = pack(known.config, weights, dequantize=dequantize)
        options = NativeOptions(slots=len(known.prompts), length=64)
        return known.run(NativeBackend(known.config, layers, options))


def test_integers_of_a_file_become_its_floats_in_every_format(reference: Reference) -> None:
    """Matrices that are packed together may be of 8 and 4 bits, and of floats."""
    file = SomeIntegers(reference("qwen2"))
    floats = {name: replace(one, integers=None) for name, one in file.tensors.items()}
    held = with_quantization(file.tensors, file.known.config, Quantization())
    assert sum(one.integers is not None for one in held.values()) > 5
    wanted = file.logits(floats)
    assert file.logits(held, dequantize=True).tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    "case", ["llama", "qwen3", "mistral", "olmo2", "granite", "gemma2", "mixtral"]
)
def test_integers_times_integers_are_close(
    case: str, reference: Reference, relative_error: Error
) -> None:
    known = reference(case)
    error, weights_alone = (
        relative_error(known.run(known.native(len(known.prompts), 64, quant)), known.logits)
        for quant in ("a8w8", "a16w8")
    )
    assert weights_alone < 0.1 and error < 2 * weights_alone


@pytest.fixture(scope="module")
def model(reference: Reference) -> NativeBackend:
    """3 slots; what each test needs in them, it writes itself."""
    return reference("llama").native(3, 200)


def tokens(seed: int, count: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 96, count).astype(np.int32)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("case", LONGROPE)
def test_texts_outgrow_longropes_short_factors(case: str, beams: int, reference: Reference) -> None:
    check_generated(reference(case), reference(case).native(7, 48), beams)


class TestRows(RowsKeepApart):
    pass


def test_a_row_depends_on_its_own_tokens_only(model: NativeBackend) -> None:
    """Prompts and single tokens of others in the same step change no bit."""
    alone = model.forward([Row(1, tokens(1, 40), 0)])
    then = model.forward([Row(1, tokens(2, 1), 40)])
    model.forward([Row(0, tokens(3, 7), 0)])
    rows = [Row(0, tokens(4, 1), 7), Row(1, tokens(1, 40), 0), Row(2, tokens(5, 60), 0)]
    assert model.forward(rows)[1].tobytes() == alone[0].tobytes()
    rows = [Row(2, tokens(6, 30), 60), Row(1, tokens(2, 1), 40), Row(0, tokens(4, 1), 8)]
    assert model.forward(rows)[1].tobytes() == then[0].tobytes()


@pytest.mark.parametrize("cuts", [[39], [1, 2, 3], [13, 26], list(range(1, 40))])
def test_a_prompt_may_come_in_any_pieces(model: NativeBackend, cuts: list[int]) -> None:
    prompt = tokens(1, 40)
    whole = model.forward([Row(0, prompt, 0)])
    for start, end in zip([0, *cuts], [*cuts, 40], strict=True):
        logits = model.forward([Row(2, prompt[start:end], start)])
    assert logits.tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    "case", ["llama_biases", "mistral", "mistral_long", "qwen2_window", "qwen3", "qwen3_tied"]
)
def test_a_prompt_alone_and_in_pieces_gives_what_it_gives_among_others(
    case: str, reference: Reference
) -> None:
    """To the bit; the pieces are shorter than the windows, and longer."""
    known = reference(case)
    model = known.native(len(known.prompts), known.length)
    together = known.run(model)[:, :2]
    for slot, prompt in enumerate(known.prompts):
        for size in (len(prompt), 3, 11, 150):
            for start in range(0, len(prompt), size):
                first = model.forward([Row(0, prompt[start : start + size], start)])
            second = model.forward([Row(0, known.forced[slot, :1], len(prompt))])
            assert (first.tobytes(), second.tobytes()) == tuple(
                logits.tobytes() for logits in together[slot]
            )


@pytest.mark.parametrize("quant", ["a16w8", "a16w4"])
def test_a_long_prompt_of_experts_may_come_in_any_pieces(
    quant: Quant, reference: Reference
) -> None:
    """An expert's rows begin anywhere among those that all experts take, and fill tiles."""
    known = reference("mixtral")
    known.config = replace(known.config, seq_length=300)
    model, prompt = known.native(2, 300, quant), tokens(1, 300)
    for start in range(0, 300, 7):
        logits = model.forward([Row(1, prompt[start : start + 7], start)])
    assert logits.tobytes() == model.forward([Row(0, prompt, 0)]).tobytes()


def test_a_step_that_is_longer_than_its_capacity(
    monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    prompts = [tokens(seed, 30 + seed) for seed in range(3)]
    rows = [Row(slot, prompt, 0) for slot, prompt in enumerate(prompts)]
    whole = reference("llama").native(3, 64).forward(rows)
    monkeypatch.setattr("lite_runner.backends.LONGEST_CHUNK", 16)
    assert reference("llama").native(3, 64).forward(rows).tobytes() == whole.tobytes()


@pytest.mark.parametrize("case", ["gemma3", "gemma4_sides", "gpt_oss", "llama4", "mistral_long"])
def test_blocks_before_windows_are_given_back(
    case: str, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    """And change no bit: in pieces, copies, drafts that are refused, and texts that begin anew."""
    monkeypatch.setattr("lite_runner.backends.LONGEST_CHUNK", 16)
    known = reference(case)
    known.config = replace(known.config, seq_length=700)
    texts = np.random.default_rng(1).integers(0, known.config.vocab_size, (3, 700), np.int32)

    def run(model: NativeBackend) -> Iterator[bytes]:
        def row(slot: int, text: int, start: int, end: int, **others: Any) -> Row:
            return Row(slot, texts[text, start:end], start, **others)

        def computed(*rows: Row) -> bytes:
            return model.forward(rows).tobytes()

        yield computed(row(0, 0, 0, 300))
        model.copy([0], [1])
        yield computed(row(0, 0, 300, 600), row(1, 0, 300, 320))
        yield computed(row(2, 1, 0, 200), row(1, 0, 320, 329, logits=9, drafts=True))
        for step in range(60):
            start = 323 + step
            rows = row(0, 0, 600 + step, 601 + step), row(1, 0, start, start + 1)
            yield computed(*rows, row(2, 1, 200 + 3 * step, 203 + 3 * step))
        model.copy([0, 1], [1, 0])
        yield computed(row(0, 0, 383, 583), row(1, 0, 660, 665))
        model.release(2, 0)
        yield computed(row(2, 0, 0, 600))

    model = known.native(3, 700)
    found = list(run(model))
    memory, windows = model.info.memory, model.info.windows
    assert memory is not None and windows is not None
    assert (memory.blocks, windows.blocks) == (18, 9 if case == "mistral_long" else 6)
    assert windows.held((slot, 700) for slot in range(3)) <= windows.blocks
    assert model.info.usable is not None and model.info.usable(0, 100) == 0
    for start in (100, 128):  # within a block, and where one begins
        with pytest.raises(ValueError, match="freed"):
            model.forward([Row(0, texts[0, start : start + 1], start)])
    monkeypatch.setattr("lite_runner.backends.native.backend.window_of", lambda *_: 0)
    assert list(run(known.native(3, 700))) == found


def test_a_step_with_windows_that_failed_in_a_later_part_is_repeated(
    monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    known = reference("gemma3")
    known.config = replace(known.config, seq_length=2048)
    text = np.random.default_rng(1).integers(0, known.config.vocab_size, 1500, np.int32)
    rows = [Row(0, text[start : start + 500], start, logits=500) for start in range(0, 1500, 500)]
    model = known.native(1, 2048)
    wanted = [model.forward([row]).tobytes() for row in rows]
    monkeypatch.setattr("lite_runner.backends.native.backend.rows_at_once", lambda *_: 100)
    model = known.native(1, 2048)
    assert model.info.windows is not None and model._model is not None
    run, left = model._model.run, [4]

    def fails(*args: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise MemoryError
        return run(*args)

    monkeypatch.setattr(model._model, "run", fails)
    for row, expected in zip(rows, wanted, strict=True):
        left[0] = 4
        with pytest.raises(MemoryError):
            model.forward([row])
        assert model.forward([row]).tobytes() == expected


def test_a_draft_model_with_a_shorter_context_takes_its_share_of_the_cache(
    reference: Reference,
) -> None:
    known, models, blocks = reference("llama"), [], {4096: 64, 512: 8}  # of two slots
    for length in blocks:
        known.config = replace(known.config, seq_length=length)
        models.append(known.native(1, 8))
    model, model.draft = models
    model.grow(2, 4096, sum(blocks.values()) * model.info.memory.block_bytes)
    found = {one.info.max_length: one.info.memory.blocks for one in models}
    assert found == blocks


@pytest.mark.parametrize("cache", ["fp32", "int8"])
def test_a_copied_slot_goes_on_as_its_source(cache: str, reference: Reference) -> None:
    model = reference("llama").native(3, 100, cache=cache)
    model.forward([Row(0, tokens(1, 20), 0), Row(1, tokens(2, 20), 0)])
    wanted = [model.forward([Row(slot, tokens(3, 1), 20)]) for slot in (0, 1)]
    model.copy([1, 0], [0, 1])
    got = [model.forward([Row(slot, tokens(3, 1), 20)]) for slot in (1, 0)]
    assert [one.tobytes() for one in got] == [one.tobytes() for one in wanted]


def test_threads_change_no_bit(reference: Reference) -> None:
    known = reference("qwen2")
    rows = [Row(0, tokens(1, 50), 0), Row(1, tokens(2, 3), 0)]
    found = {known.native(2, 64, threads=count).forward(rows).tobytes() for count in (1, 2, 5)}
    assert len(found) == 1


def test_logits_after_every_token_are_those_of_single_steps(model: NativeBackend) -> None:
    text = tokens(9, 50)
    got = np.concatenate(list(logits_of_text(model, text)))
    assert got.shape == (50, 96)
    for place in range(50):
        logits = model.forward([Row(1, text[place : place + 1], place)])
        assert got[place].tobytes() == logits.tobytes()
    last = model.forward([Row(2, text[:20], 0), Row(0, text[20:], 20, logits=7)])
    assert last[1:].tobytes() == got[-7:].tobytes()


def test_rows_that_want_no_logits_one_and_many(model: NativeBackend) -> None:
    first, second, third = tokens(1, 40), tokens(2, 25), tokens(3, 12)
    rows = [Row(0, first, 0), Row(1, second, 0, logits=25), Row(2, third, 0, logits=3)]
    alone = [model.forward([row]) for row in rows]
    none = model.forward([Row(0, first[:30], 0, logits=0)])
    assert none.shape == (0, 96) and none.dtype == np.float32
    together = [Row(0, first[30:35], 30, logits=0), *rows[1:]]
    wanted = np.concatenate(alone[1:])
    assert model.forward(together).tobytes() == wanted.tobytes()
    assert model.forward([Row(0, first[35:], 35)]).tobytes() == alone[0].tobytes()


def test_more_logits_than_a_step_gives(
    monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    rows = [Row(0, tokens(1, 40), 0, logits=40), Row(1, tokens(2, 9), 0), Row(2, tokens(3, 9), 0)]
    whole = reference("llama").native(3, 64).forward(rows)
    monkeypatch.setattr("lite_runner.backends.native.backend.rows_at_once", lambda *_: 4)
    assert reference("llama").native(3, 64).forward(rows).tobytes() == whole.tobytes()
    # More slots than that: a step gives as many as there are.
    assert reference("llama").native(6, 64).forward(rows).tobytes() == whole.tobytes()


def test_a_text_is_scored_in_parts(reference: Reference) -> None:
    model = reference("llama").native(2, 700)
    assert (model.info.budget, model.info.most_logits) == (512, 512)
    text = tokens(1, 513)
    first, last = logits_of_text(model, text)  # of the last part a single token
    assert (len(first), len(last)) == (512, 1)
    assert model.forward([Row(1, text, 0)]).tobytes() == last.tobytes()


@pytest.mark.parametrize("cache", ["fp32", "int8"])
def test_a_slot_goes_on_from_an_earlier_position(cache: str, reference: Reference) -> None:
    """Its earlier content from there on is dropped."""
    model = reference("llama").native(3, 100, cache=cache)
    old, new = tokens(1, 60), tokens(2, 20)
    model.forward([Row(1, old[:33], 0, logits=0), Row(0, tokens(4, 9), 0)])
    fresh = [model.forward([Row(1, new, 33)]), model.forward([Row(1, old[:1], 53)])]
    model.forward([Row(0, old, 0)])
    model.forward([Row(0, new[:1], 60)])
    cut = [model.forward([Row(0, new, 33)]), model.forward([Row(0, old[:1], 53)])]
    assert [one.tobytes() for one in cut] == [one.tobytes() for one in fresh]


def test_a_chunk_is_rotated_by_the_length_of_its_text(reference: Reference) -> None:
    """Dynamic NTK; to the bit, as the whole prompt."""
    known = reference("llama_rope_dynamic")
    model = known.native(2, 100)
    assert not model.info.can_continue and reference("llama").native(1, 8).info.can_continue
    prompt = tokens(1, 90)
    whole = [model.forward([Row(0, prompt, 0)]), model.forward([Row(0, prompt[:1], 90)])]
    for length in (90, 0):
        for start in range(0, 90, 30):
            chunk = Row(1, prompt[start : start + 30], start, length=length)
            last = model.forward([chunk])
        pieces = [last, model.forward([Row(1, prompt[:1], 90)])]
        same = [one.tobytes() for one in pieces] == [one.tobytes() for one in whole]
        assert same == (length == 90)


def test_closing_twice_is_harmless(reference: Reference) -> None:
    model = reference("llama").native(1, 16)
    model.close()
    model.close()


@each("key", reproducible.EXPECTED)
def test_reproducible_kernels_give_the_same_bits_on_every_processor(
    key: tuple[str, str, str],
) -> None:
    """Hashes of a processor with AVX-512; those of any other are to be the same."""
    assert reproducible.digest(*key) == reproducible.digest(*key, threads=3)
    assert reproducible.digest(*key) == reproducible.EXPECTED[key]


def test_kernels_are_the_fastest_again_behind_reproducible_ones(reference: Reference) -> None:
    fastest = native.instructions()
    known = reference("llama")
    layers = pack(known.config, QuantizedWeights(known.tensors(), known.config))
    model = NativeBackend(known.config, layers, NativeOptions(1, 32), reproducible=True)
    assert "reproducible kernels" in model.info.engine
    assert fastest in known.native(1, 32).info.engine
