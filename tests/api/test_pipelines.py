"""pipeline(): its ways to be called online, and its errors."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import pytest

from lite_runner import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    GenerationConfig,
    TextGenerationPipeline,
    TextStreamer,
    pipeline,
)
from lite_runner.errors import ConfigError
from tests.each import each

INPUTS = ["I love Beijing, because", "LLaMA is a"]


@pytest.fixture(scope="module")
def ready() -> TextGenerationPipeline:
    return pipeline("text_generation", "tiny_llama", max_new_tokens=6, eos_token_id=[])


def test_texts_in_texts_out(ready: TextGenerationPipeline) -> None:
    both = ready(INPUTS)
    assert [list(entry) for entry in both] == [["text_generation_text"]] * 2
    for prompt, entry in zip(INPUTS, both, strict=True):
        (text,) = entry["text_generation_text"]
        assert text.startswith(prompt) and len(text) > len(prompt)
    assert ready(INPUTS[0]) == both[:1]
    assert ready([]) == []


def test_the_same_as_generate(ready: TextGenerationPipeline) -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny_llama")
    ids = ready.model.generate(tokenizer(INPUTS)["input_ids"], max_new_tokens=6, eos_token_id=[])
    texts = tokenizer.decode(ids, skip_special_tokens=True)
    assert [entry["text_generation_text"][0] for entry in ready(INPUTS)] == texts


def test_options_of_the_call_win(ready: TextGenerationPipeline) -> None:
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4}
    sampled = ready(INPUTS, **options)
    assert [len(entry["text_generation_text"]) for entry in sampled] == [3, 3]
    text = ready(INPUTS[0])[0]["text_generation_text"][0]
    stop = text[len(INPUTS[0]) + 1]
    short = ready(INPUTS[0], stop=stop)[0]["text_generation_text"][0]
    assert short == text[: text.index(stop, len(INPUTS[0]))]


def test_a_model_object_and_a_streamer(
    ready: TextGenerationPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny_llama")
    streaming = pipeline(
        task="text_generation",
        model=ready.model,
        tokenizer=tokenizer,
        streamer=TextStreamer(tokenizer),
    )
    answers = streaming(INPUTS, max_new_tokens=6, eos_token_id=[])
    shown = "".join(entry["text_generation_text"][0] + "\n" for entry in answers)
    assert capsys.readouterr().out == shown
    assert answers == ready(INPUTS)
    by_class = TextGenerationPipeline(ready.model, tokenizer, max_length=30, eos_token_id=[])
    assert len(by_class("ab")[0]["text_generation_text"][0].encode()) >= 20


def test_a_config_for_a_model(ready: TextGenerationPipeline) -> None:
    config = AutoConfig.from_pretrained("tiny_llama", seq_length=64)
    pipe = pipeline("text_generation", config)
    assert pipe(INPUTS[0], max_new_tokens=6, eos_token_id=[]) == ready(INPUTS[0])


@pytest.mark.usefixtures("unverified")
def test_a_model_object_is_exported(
    ready: TextGenerationPipeline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """000: `model` may be a PreTrainedModel, or mindspore's Model of one."""
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    model = AutoModel.from_pretrained("tiny_llama")
    options = {"max_new_tokens": 6, "eos_token_id": []}
    fields = {"infer_seq_length": 128, "target": "CPU", "device_id": 0}
    for one in (model, model.config, ms.Model(model)):
        pipe = pipeline(model=one, backend="mslite", **fields, **options)
        run = pipe.model.config.run_config()
        assert (run.backend, run.infer.infer_seq_length) == ("mslite", 128)
        assert pipe(INPUTS) == ready(INPUTS)
    assert pipeline(None, ms.Model(model), **options)(INPUTS) == ready(INPUTS)
    for parameter in model.get_parameters():
        parameter.set_data(parameter + 1)
    with pytest.raises(ConfigError, match="weights were written by the script"):
        pipeline(model=model, backend="mslite")


def test_backend_of_a_pipeline(ready: TextGenerationPipeline) -> None:
    """MindFormers' own is "ms"; a model object is set to what is asked for."""
    options = {"max_new_tokens": 6, "eos_token_id": []}
    assert "backend" not in repr(ready)
    native = pipeline("text_generation", "tiny_llama", backend="native", **options)
    assert not isinstance(native.model, ms.nn.Cell) and native(INPUTS) == ready(INPUTS)
    both = pipeline("text_generation", AutoModel.from_pretrained("tiny_llama"), **options)
    assert both(INPUTS) == ready(INPUTS)
    slow = pipeline("text_generation", both.model, both.tokenizer, None, None, "ms", **options)
    assert "backend='ms'" in repr(both) and slow(INPUTS) == ready(INPUTS)


@each(
    ("arguments", "options", "message"),
    [
        (("text-generation", "tiny_llama"), {}, "did you mean text_generation"),
        (("text_generation",), {}, "no model given"),
        ((), {}, "no model given"),
        ((None, "tiny_lama"), {}, "did you mean tiny_llama"),
        (("text_generation", "tiny_lama"), {}, "did you mean tiny_llama"),
        (("text_generation", "tiny_llama"), {"backend": "mslit"}, "did you mean mslite"),
        (("text_generation", "tiny_llama"), {"max_lenght": 4}, "did you mean max_length"),
        (("text_generation", ("a.mindir", "b.mindir")), {"backend": "native"}, "backend='mslite'"),
        (("text_generation", ("a", "b", "c")), {"backend": "mslite"}, "got 3 paths"),
    ],
)
def test_invalid_pipeline_arguments(arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipeline(*arguments, **options)


def test_invalid_call_arguments(ready: TextGenerationPipeline) -> None:
    with pytest.raises(ConfigError, match=r"inputs\[1\]: got int"):
        ready(["a", 3])
    with pytest.raises(ConfigError, match="is_sample_acceleration"):
        ready("a", is_sample_acceleration=True, do_sample=True)
    assert ready("a", is_sample_acceleration=True, add_special_tokens=False) == ready("a")
    with pytest.raises(ConfigError, match="model: got a int, expected a name"):
        pipeline("text_generation", 3)


def test_a_batch_size_groups_the_texts(ready: TextGenerationPipeline) -> None:
    """As MindFormers, whose pipeline gives one entry for each batch."""
    alone = [entry["text_generation_text"][0] for entry in ready([*INPUTS, *INPUTS])]
    pairs = ready([*INPUTS, *INPUTS], batch_size=2)
    assert [entry["text_generation_text"] for entry in pairs] == [alone[:2], alone[2:]]
    pipe = TextGenerationPipeline(ready.model, batch_size=4, max_new_tokens=6, eos_token_id=[])
    assert pipe([*INPUTS, *INPUTS]) == [{"text_generation_text": alone}]
    with pytest.raises(ConfigError, match="batch_size: got 3 for 2 texts"):
        ready(INPUTS, batch_size=3)


def test_a_generation_config_and_processors(ready: TextGenerationPipeline) -> None:
    pipe = pipeline("text_generation", ready.model, ready.tokenizer)
    chosen = GenerationConfig(max_new_tokens=6, eos_token_id=[])
    assert pipe(INPUTS, generation_config=chosen) == ready(INPUTS)
    with pytest.raises(ConfigError, match="image_processor has no effect with text_generation"):
        pipeline("text_generation", ready.model, image_processor=print)


def test_chats(ready: TextGenerationPipeline, tmp_path: Path) -> None:
    ready.tokenizer.save_pretrained(tmp_path)
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    options = {"max_new_tokens": 4, "eos_token_id": []}
    plain = ready("user:Hi;", **options)[0]["text_generation_text"][0].removeprefix("user:Hi;")
    chat = pipeline("text_generation", ready.model, tokenizer, chat=True)
    assert chat("Hi", **options) == [{"text_generation_text": [plain]}]  # the answer alone
    greedy = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": []}
    answer, history = ready.model.chat(tokenizer, "Hi", **greedy)
    assert answer == plain
    assert history == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": plain}]
    prompt = tokenizer.encode("user:Hi;")
    new = ready.model.generate(prompt, **greedy)[0][len(prompt) :]
    cut, _ = ready.model.chat(tokenizer, "Hi", **{**greedy, "eos_token_id": new[2]})
    assert cut == tokenizer.decode(new[:2]) != tokenizer.decode(new[:3])  # the end is no text
    second, longer = ready.model.chat(tokenizer, "And?", history, **greedy)
    assert longer[:2] == history and longer[-1]["content"] == second and len(history) == 2
    stopped, said = ready.model.chat(tokenizer, "Hi", **greedy, stop=plain[1:3])
    assert stopped == said[-1]["content"] == plain[: plain.index(plain[1:3])]
    for history in (None, []):
        _, messages = ready.model.chat(tokenizer, "Hi", history, instruction="Be kind", seed=1)
        assert messages[0] == {"role": "system", "content": "Be kind"}


def test_settings_of_the_model_are_keywords_too() -> None:
    pipe = pipeline("text_generation", model="tiny_llama", kv_cache="int8", threads=1, top_k=3)
    assert (pipe.model.config.kv_cache, pipe.model.config.threads) == ("int8", 1)
    with pytest.raises(ConfigError, match="no such key; did you mean quant"):
        pipeline("text_generation", model="tiny_llama", quantt="a16w8")
    with pytest.raises(ConfigError, match="quant: set for the model, not for one call") as caught:
        pipe("text", quant="a16w8")
    assert "AutoModel.from_pretrained(..., quant='a16w8')" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="kv_cache: set for the model"):
        pipe.model.generate([5, 6], kv_cache="fp16")


def test_the_hint_of_an_empty_prompt() -> None:
    with pytest.raises(ConfigError, match="prompt 0 is empty") as caught:
        pipeline("text_generation", model="tiny_llama")("")
    assert "at least one token" in (caught.value.hint or "")


def test_repr(ready: TextGenerationPipeline) -> None:
    model = repr(ready.model)
    name = ready.model.config.run_config().model_name
    assert model.startswith(f"{type(ready.model).__name__}({name!r}") and "\n" not in model
    assert repr(ready) == f"TextGenerationPipeline({ready.model.described})"
    assert repr(ready.tokenizer).endswith(f", vocab_size={len(ready.tokenizer)})")
