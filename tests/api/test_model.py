"""AutoModel: generate, in all the ways that MindFormers' documents call it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

from lite_runner import AutoConfig, AutoModel, TextIteratorStreamer, TextStreamer
from lite_runner.api.model import PreTrainedModel
from lite_runner.errors import ArtifactError, ConfigError

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
    several = model.generate(PROMPT, num_return_sequences=2, seed=1, **options)
    assert len(several) == 2 and several[0] == drawn[0] != several[1]


def test_sampling_options_without_sampling_change_nothing(
    model: PreTrainedModel, greedy: list[list[int]]
) -> None:
    options = {"do_sample": False, "top_k": 3, "top_p": 1, "temperature": 0.5}
    assert model.generate(PROMPT, max_new_tokens=9, eos_token_id=[], **options) == greedy[:1]


def test_it_grows_with_what_is_asked_for(greedy: list[list[int]]) -> None:
    small = AutoModel.from_pretrained("tiny_llama", seq_length=1024)
    options = {"max_new_tokens": 9, "eos_token_id": []}
    assert small.generate(OTHER, **options) == greedy[1:]
    longer = small.generate([PROMPT, OTHER], max_new_tokens=300, eos_token_id=[])
    assert [row[: len(short)] for row, short in zip(longer, greedy, strict=True)] == greedy
    assert len(longer[1]) == len(OTHER) + 300
    small.close()
    assert small.generate(OTHER, **options) == greedy[1:]


@pytest.mark.parametrize(
    ("ids", "options", "said"),
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
def test_what_cannot_be_generated(
    model: PreTrainedModel, ids: object, options: dict, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
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
    made = AutoModel.from_config(config).set_train(False)
    config.seq_length = 40  # of the next model
    options = {"max_new_tokens": 9, "eos_token_id": []}
    assert made.generate(PROMPT, **options) == greedy[:1]
    with pytest.raises(ConfigError, match="at most 40 fit"):
        AutoModel.from_config(config).generate(PROMPT, max_new_tokens=20)
    with pytest.raises(ConfigError, match="does not train"):
        made.set_train()
