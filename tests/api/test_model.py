"""AutoModel: generate, in all the ways that MindFormers' documents call it."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
import tokenizers

from lite_runner import (
    AutoConfig,
    AutoModel,
    GenerationConfig,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from lite_runner.api.model import PreTrainedModel
from lite_runner.app import main
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.weights.repository import Repository
from tests.each import each
from tests.paths import FIXTURES
from tests.tiny_gguf import write_tiny_gguf

# A checkpoint without a tokenizer, whose model has one on the hub; and what follows these ids.
SAVED = FIXTURES / "mindformers/gpt2/past"
IDS, FOLLOWING = [5, 6, 7], [27, 27, 27, 27, 9, 43]
PROMPT, OTHER = list(b"I love Beijing, because"), list(b"LLaMA")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModel.from_pretrained("tiny_llama", use_past=True, batch_size=2)


@pytest.fixture(scope="module")
def greedy(model: PreTrainedModel) -> list[list[int]]:
    return model.generate([PROMPT, OTHER], max_new_tokens=9, eos_token_id=[])


def test_prompt_and_new_ids_come_back(greedy: list[list[int]]) -> None:
    assert [len(row) for row in greedy] == [len(PROMPT) + 9, len(OTHER) + 9]
    assert greedy[0][: len(PROMPT)] == PROMPT and greedy[1][: len(OTHER)] == OTHER


def test_every_form_of_the_ids(model: PreTrainedModel, greedy: list[list[int]]) -> None:
    padded = [row + [258] * (30 - len(row)) for row in (PROMPT, OTHER)]
    options = {"max_new_tokens": 9, "eos_token_id": []}
    for ids in (padded, np.array(padded, np.int32), ms.Tensor(np.array(padded, np.int32))):
        assert model.generate(ids, **options) == greedy
    for ids in (PROMPT, [PROMPT], np.array(PROMPT)):
        assert model.generate(ids, **options) == greedy[:1]
    assert model.generate([]) == []


def test_lengths(model: PreTrainedModel, greedy: list[list[int]]) -> None:
    assert model.generate(PROMPT, max_length=25, eos_token_id=[])[0] == greedy[0][:25]
    default = model.generate(PROMPT, max_length=None, do_sample=False, eos_token_id=[])[0]
    assert len(default) == len(PROMPT) + 32  # conf/model/tiny_llama.yaml
    assert default[: len(greedy[0])] == greedy[0]


def test_sampling_is_repeatable_and_not_greedy(model: PreTrainedModel) -> None:
    options = {"max_new_tokens": 12, "do_sample": True, "top_k": 3, "eos_token_id": []}
    drawn = model.generate(PROMPT, seed=1, **options)
    assert drawn == model.generate(PROMPT, seed=1, **options)
    assert drawn != model.generate(PROMPT, seed=2, **options)
    unlike = [model.generate(PROMPT, **{**options, "top_k": 0, "temperature": 5.0}) for _ in "ab"]
    assert unlike[0] != unlike[1]
    several = model.generate(PROMPT, num_return_sequences=2, seed=1, **options)
    assert len(several) == 2 and several[0] == drawn[0] != several[1]


def test_sampling_options_without_sampling_change_nothing(
    model: PreTrainedModel, greedy: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    """As in document 002, where do_sample=False stands beside them."""
    options = {"do_sample": False, "top_k": 3, "top_p": 1, "temperature": 0.5}
    assert model.generate(PROMPT, max_new_tokens=9, eos_token_id=[], **options) == greedy[:1]
    note = "temperature=0.5, top_k=3: no effect with do_sample=false, which is greedy"
    assert note in capsys.readouterr().err


def test_a_temperature_that_was_given_samples(
    model: PreTrainedModel, greedy: list[list[int]]
) -> None:
    options = {"max_new_tokens": 9, "eos_token_id": [], "seed": 1}
    drawn = model.generate(PROMPT, temperature=5.0, top_k=5, **options)
    assert drawn == model.generate(PROMPT, temperature=5.0, top_k=5, do_sample=True, **options)
    assert drawn == model.generate(PROMPT, GenerationConfig(temperature=5.0, top_k=5), **options)
    assert drawn != greedy[:1]
    assert model.generate(PROMPT, temperature=0, **options) == greedy[:1]
    of_all = GenerationConfig(do_sample=False, max_new_tokens=9, eos_token_id=[], seed=1)
    assert model.generate(PROMPT, of_all) == greedy[:1]
    assert model.generate(PROMPT, of_all, temperature=5.0, top_k=5) == drawn  # the call decides
    pipe = pipeline("text_generation", model=model, temperature=5.0, top_k=5, **options)
    drawn_text = pipe("LLaMA")
    assert drawn_text != pipe("LLaMA", temperature=0)
    assert pipe("LLaMA", do_sample=False) == pipe("LLaMA", temperature=0)
    hot = AutoModel.from_pretrained("tiny_llama", temperature=5.0, top_k=5)
    assert hot.generate(PROMPT, **options) == drawn
    cold = AutoModel.from_config(hot.config, temperature=0)
    assert cold.generate(PROMPT, **options) == greedy[:1]


def test_it_grows_with_what_is_asked_for(greedy: list[list[int]]) -> None:
    small = AutoModel.from_pretrained("tiny_llama", seq_length=1024)
    options = {"max_new_tokens": 9, "eos_token_id": []}
    assert small.generate(OTHER, **options) == greedy[1:]
    longer = small.generate([PROMPT, OTHER], max_new_tokens=300, eos_token_id=[])
    assert [row[: len(short)] for row, short in zip(longer, greedy, strict=True)] == greedy
    assert len(longer[1]) == len(OTHER) + 300
    small.close()
    assert small.generate(OTHER, **options) == greedy[1:]


@each(
    ("ids", "options", "message"),
    [
        (PROMPT, {"max_new_token": 3}, "did you mean max_new_tokens"),
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens"),
        (PROMPT, {"max_new_tokens": "many"}, "expected an integer"),
        (PROMPT, {"max_new_tokens": 250}, "does not fit"),
        (PROMPT, {"num_beams": 2, "do_sample": True}, "num_beams=2 with do_sample=true"),
        ([1, 400], {}, "got the id 400, expected 0 to 319"),
        ([-1], {}, "got the id -1"),
        ([1.5], {}, "expected token ids"),
        ([[258, 258]], {}, "prompt 0 is empty"),
        ("text", {}, "expected a list of token ids"),
    ],
)
def test_invalid_generate_options(
    model: PreTrainedModel, ids: object, options: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        model.generate(ids, **options)


def test_streaming(
    model: PreTrainedModel, greedy: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = model.tokenizer
    options = {"max_new_tokens": 9, "eos_token_id": []}
    model.generate([PROMPT, OTHER], streamer=TextStreamer(tokenizer), **options)
    texts = tokenizer.decode(greedy, skip_special_tokens=True)
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in texts)
    pieces = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    arguments = {"streamer": pieces, **options}
    thread = threading.Thread(target=model.generate, args=(PROMPT,), kwargs=arguments)
    thread.start()
    new = greedy[0][len(PROMPT) :]
    assert "".join(pieces) == tokenizer.decode(new, skip_special_tokens=True)
    thread.join()
    with pytest.raises(ConfigError, match="streamer"):
        model.generate(PROMPT, streamer=pieces, num_beams=2)


def test_a_streamer_that_fails_is_ended(model: PreTrainedModel) -> None:
    class Failing:
        ended = 0

        def put(self, value: np.ndarray) -> None:
            if len(value) == 1:
                raise ZeroDivisionError

        def end(self) -> None:
            self.ended += 1

    streamer = Failing()
    with pytest.raises(ZeroDivisionError):
        model.generate(PROMPT, streamer=streamer, max_new_tokens=2, eos_token_id=[])
    assert streamer.ended == 1


def test_a_folder_without_a_tokenizer(write_tiny_llama: Callable[..., Path]) -> None:
    folder = write_tiny_llama("model")
    from_folder = AutoModel.from_pretrained(folder)
    named = AutoModel.from_pretrained("tiny_llama", checkpoint_name_or_path=folder)
    options = {"max_new_tokens": 3, "eos_token_id": []}
    assert from_folder.generate(PROMPT, **options) == named.generate(PROMPT, **options)
    with pytest.raises(ConfigError, match="stop texts need a tokenizer"):
        from_folder.generate(PROMPT, stop="x")
    with pytest.raises(ArtifactError, match="no such file"):
        AutoModel.from_pretrained("tiny_llama", checkpoint_name_or_path=folder / "missing.ckpt")


def test_from_config_keeps_its_own_settings(greedy: list[list[int]]) -> None:
    config = AutoConfig.from_pretrained("tiny_llama")
    model = AutoModel.from_config(config).set_train(False)
    config.seq_length = 40  # of the next model
    options = {"max_new_tokens": 9, "eos_token_id": []}
    assert model.generate(PROMPT, **options) == greedy[:1]
    with pytest.raises(ConfigError, match="at most 40 fit"):
        AutoModel.from_config(config).generate(PROMPT, max_new_tokens=20)
    with pytest.raises(ConfigError, match="only generates"):
        model.set_train()


def test_settings_of_the_command_line(greedy: list[list[int]], cli_tokens: list[list[int]]) -> None:
    options = {"max_new_tokens": 9, "eos_token_id": []}
    exact = AutoModel.from_pretrained("tiny_llama")
    assert exact.generate([PROMPT, OTHER], **options) == greedy
    assert [row[len(given) :] for row, given in zip(greedy, (PROMPT, OTHER), strict=True)] == (
        cli_tokens[:2]
    )
    quantized = AutoModel.from_pretrained("tiny_llama", quant="a16w4", quant_group=32)
    rounded = quantized.generate([PROMPT, OTHER], **options)
    assert [row[len(given) :] for row, given in zip(rounded, (PROMPT, OTHER), strict=True)] == (
        cli_tokens[2:]
    )
    exact.config.quant = "a16w4"  # a setting of a model that has generated already
    exact.config.quant_group = 32
    assert exact.generate([PROMPT, OTHER], **options) == rounded


@pytest.fixture
def cli_tokens(capsys: pytest.CaptureFixture[str]) -> list[list[int]]:
    """The command line's tokens for the two prompts, in float32 and in a16w4."""
    found = []
    for more in ([], ["quant=a16w4"]):
        line = ["model=tiny_llama", "predict_data=['I love Beijing, because','LLaMA']", *more]
        assert main([*line, "max_new_tokens=9", "eos_token_id=[]", "verbosity=0"]) == 0
        result = json.loads(Path("outputs/latest/result.json").read_text())
        found += [row["token_ids"] for row in result["results"]]
    return found


def test_a_generation_config_and_its_output(
    model: PreTrainedModel, greedy: list[list[int]]
) -> None:
    chosen = GenerationConfig(max_new_tokens=9, eos_token_id=[])
    assert model.generate([PROMPT, OTHER], chosen) == greedy
    assert model.generate([PROMPT, OTHER], generation_config=chosen, max_new_tokens=4) == [
        row[: len(given) + 4] for row, given in zip(greedy, (PROMPT, OTHER), strict=True)
    ]
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    penalty = model.generate([PROMPT, OTHER], chosen, repetition_penalty=1.5, **asked)
    assert len(penalty["logits"]) == len(penalty["scores"]) == 9
    for step in range(9):
        pairs = zip(penalty["sequences"], (PROMPT, OTHER), strict=True)
        tokens = [row[len(given) + step] for row, given in pairs]
        assert penalty["scores"][step].argmax(axis=1).tolist() == tokens
    assert not np.array_equal(penalty["logits"][3], penalty["scores"][3])
    plain = model.generate([PROMPT, OTHER], chosen, return_dict_in_generate=True)
    assert plain == {"sequences": greedy, "scores": None, "logits": None}
    drawn = model.generate(PROMPT, chosen, do_sample=True, top_k=3, seed=1, **asked)
    assert all(np.isfinite(row).sum() == 3 for row in drawn["scores"])
    assert GenerationConfig(do_sample=True).to_dict()["top_k"] == 50  # MindFormers' defaults
    assert len(model.generate(OTHER, GenerationConfig(), eos_token_id=[])[0]) == 20


def test_log_probabilities(model: PreTrainedModel, greedy: list[list[int]]) -> None:
    asked = {"logprobs": 2, "prompt_logprobs": 1, "eos_token_id": [], "max_new_tokens": 9}
    output = model.generate(
        [PROMPT, OTHER], output_logits=True, return_dict_in_generate=True, **asked
    )
    assert output["sequences"] == greedy
    for row, prompt in enumerate((PROMPT, OTHER)):
        first, *others = output["prompt_logprobs"][row]
        assert first is None and [one["token"] for one in others] == prompt[1:]
        assert [one["token"] for one in output["logprobs"][row]] == greedy[row][len(prompt) :]
        for step, one in enumerate(output["logprobs"][row]):
            logits = output["logits"][step][row].astype(np.float64)
            wanted = logits - np.log(np.exp(logits).sum())
            assert one["top"][0] == [one["token"], one["logprob"]]
            for id, value in one["top"]:
                assert value == pytest.approx(wanted[id], abs=1e-5)
            assert one["top"][1][1] == pytest.approx(np.sort(wanted)[-2], abs=1e-5)
    chosen = GenerationConfig(max_new_tokens=2, eos_token_id=[], logprobs=0)
    (row,) = model.generate(PROMPT, chosen, return_dict_in_generate=True)["logprobs"]
    assert [(one["token"], one["top"]) for one in row] == [
        (token, []) for token in greedy[0][len(PROMPT) :][:2]
    ]
    beams = {"num_beams": 2, "max_new_tokens": 2, "return_dict_in_generate": True}
    assert model.generate(PROMPT, prompt_logprobs=0, **beams)["prompt_logprobs"][0][0] is None
    with pytest.raises(ConfigError, match="logprobs=0 is not available with num_beams=2"):
        model.generate(PROMPT, logprobs=0, **beams)


@pytest.mark.parametrize("option", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_need_a_dict(model: PreTrainedModel, option: str) -> None:
    refused = f"^{option}: needs return_dict_in_generate=True"
    asked = {option: 1, "max_new_tokens": 2}
    with pytest.raises(ConfigError, match=refused):
        model.generate(PROMPT, **asked)
    with pytest.raises(ConfigError, match=refused):
        model.generate(PROMPT, GenerationConfig(**asked))
    for dict_too in ({}, {"return_dict_in_generate": True}):
        texts = pipeline("text_generation", model, **asked, **dict_too)
        with pytest.raises(ConfigError, match=refused):
            texts("a")


def test_min_length_counts_the_prompt(model: PreTrainedModel, greedy: list[list[int]]) -> None:
    second = greedy[0][len(PROMPT) + 1]
    options = {"max_new_tokens": 9, "eos_token_id": second}
    short = model.generate(PROMPT, **options)[0]
    longer = model.generate(PROMPT, min_length=len(PROMPT) + 6, **options)[0]
    assert len(short) < len(PROMPT) + 6 <= len(longer)
    with pytest.raises(ConfigError, match="min_length=30 is a different number"):
        model.generate([PROMPT, OTHER], min_length=30)


def test_the_eos_token_that_ends_a_sequence_is_in_its_row(
    model: PreTrainedModel, greedy: list[list[int]]
) -> None:
    ids = [PROMPT, OTHER]
    new = greedy[0][len(PROMPT) :]
    end = new.index(new[4])
    assert new[4] not in greedy[1]  # which goes on
    options = {"max_new_tokens": 9, "eos_token_id": [new[4]]}
    expected = [greedy[0][: len(PROMPT) + end + 1], greedy[1]]
    assert model.generate(ids, **options) == expected
    output = model.generate(ids, output_scores=True, return_dict_in_generate=True, **options)
    assert output["sequences"] == expected
    drawn = [step.argmax(axis=1)[0] for step in output["scores"][: end + 1]]
    assert drawn == expected[0][len(PROMPT) :]  # a step for each new id
    # At the last length too, and nothing where the length or a stop text ended it.
    assert model.generate(PROMPT, max_new_tokens=end + 1, eos_token_id=[new[4]]) == expected[:1]
    text = model.tokenizer.decode(new[:1])
    assert model.generate(PROMPT, stop=text, **options) == [[*PROMPT, new[0]]]
    for row in model.generate(PROMPT, num_beams=2, num_return_sequences=2, **options):
        assert (row[-1] == new[4]) == (len(row) < len(PROMPT) + 9)
        assert new[4] not in row[len(PROMPT) : -1]


@pytest.mark.parametrize(
    "option",
    [{"renormalize_logits": True}, {"logits_processor": [print]}, {"parallel_decoding": 1}],
)
def test_unavailable_mindformers_options_are_named(model: PreTrainedModel, option: dict) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(option))} is not available"):
        model.generate(PROMPT, **option)


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Attempted downloads, all in vain, with an empty folder and an empty cache."""
    tried = []

    def fail(repository: Repository, **options: bool) -> Path:
        tried.append(f"hf://{repository.name}")
        raise ArtifactError("no network")

    monkeypatch.setattr(Repository, "fetch", fail)
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    return tried


def test_ids_fetch_no_tokenizer_and_what_needs_one_tries_once(fetched: list[str]) -> None:
    model = AutoModel.from_pretrained(SAVED)
    assert model.generate(IDS, max_new_tokens=6) == [IDS + FOLLOWING]
    assert fetched == []
    for _ in range(2):
        with pytest.raises(ConfigError, match="stop texts need a tokenizer"):
            model.generate(IDS, stop="x", max_new_tokens=6)
        with pytest.raises(ArtifactError, match=r"no tokenizer beside .* no network"):
            _ = model.tokenizer
    assert fetched == ["hf://openai-community/gpt2"]
    model.config.pretrained_model_dir = "hf://somebody/gpt2"
    with pytest.raises(ArtifactError, match="no network"):
        _ = model.tokenizer
    assert fetched[1:] == ["hf://somebody/gpt2"]


@pytest.mark.parametrize("place", ["checkpoint_download/gpt2", "cache"])
def test_a_tokenizer_that_is_here_tells_the_ends(
    fetched: list[str], tmp_path: Path, place: str
) -> None:
    model = AutoModel.from_pretrained(SAVED)
    whole = model.generate(IDS, max_new_tokens=6)
    folder = tmp_path / place
    if place == "cache":  # as huggingface_hub keeps it
        repository = folder / "hub" / "models--openai-community--gpt2"
        folder = repository / "snapshots" / "0123456789abcdef"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(folder.name, encoding="utf-8")
    folder.mkdir(parents=True)
    words = tokenizers.models.WordLevel({f"w{id}": id for id in range(64)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    ends = json.dumps({"eos_token": f"w{FOLLOWING[4]}"})
    (folder / "tokenizer_config.json").write_text(ends, encoding="utf-8")
    assert model.generate(IDS, max_new_tokens=6) == [row[:8] for row in whole]
    assert fetched == []


def test_a_closed_model_leaves_its_gguf_unmapped(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "model.gguf")
    model = AutoModel.from_pretrained(str(tmp_path / "model.gguf"))

    def mapped() -> bool:
        gc.collect()
        return str(tmp_path) in Path("/proc/self/maps").read_text(encoding="utf-8")

    before = model.generate(PROMPT, max_new_tokens=3, eos_token_id=[])
    assert mapped()
    model.close()
    assert not mapped()
    assert model.generate(PROMPT, max_new_tokens=3, eos_token_id=[]) == before  # opened again


def test_mindformers_is_refused_by_name() -> None:
    """It completes prompts in its own process; the API works with logits."""
    settings = {"backend": "mindformers", "load_checkpoint": "random"}
    for make in AutoModel.from_pretrained, partial(pipeline, "text_generation"):
        with pytest.raises(
            ConfigError, match="backend=mindformers generates in a process of its own"
        ):
            make("tiny_llama", **settings)
