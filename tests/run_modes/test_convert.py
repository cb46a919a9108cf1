"""run_mode=convert from the command line; the formats themselves are in tests/weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from lite_runner.app import main
from tests.refusals import refused
from tests.tiny_gguf import write_tiny_gguf

TO_CKPT = ["convert_format=ckpt", "convert_output=to/x.ckpt"]
CONVERT = ["verbosity=0", "run_mode=convert", "convert_format=huggingface", "model=auto"]


@pytest.fixture
def model_gguf() -> None:
    write_tiny_gguf(Path("model.gguf"))


def convert(target: str, *overrides: str) -> list[str]:
    """The files that a conversion to the folder `target` wrote."""
    assert main([*CONVERT, f"convert_output={target}", *overrides]) == 0
    return sorted(file.name for file in Path(target).iterdir())


def rows(*overrides: str) -> list[dict[str, Any]]:
    prompts = "predict_data=['the end','\U0001f600 a the 12']"
    assert main(["verbosity=0", "model=auto", prompts, "max_new_tokens=8", *overrides]) == 0
    result = json.loads(Path("outputs/latest/result.json").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = result["results"]
    return found


@pytest.mark.usefixtures("model_gguf")
def test_the_folder_made_of_a_gguf_gives_the_same_texts() -> None:
    assert convert("hf", "load_checkpoint=model.gguf") == [
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ]
    plain = rows("load_checkpoint=model.gguf")
    assert rows("load_checkpoint=hf") == plain
    assert plain[0]["prompt_tokens"] == len(["<s>", "the", *" end"])
    chats = rows("load_checkpoint=model.gguf", "chat=true")
    assert rows("load_checkpoint=hf", "chat=true") == chats
    assert chats[0]["prompt_tokens"] == len(["<s>", "the", " the", *" end", "</s>"])
    config = json.loads(Path("hf/config.json").read_text(encoding="utf-8"))
    assert config["eos_token_id"] == [257, 259, 260]


@pytest.mark.usefixtures("model_gguf")
def test_a_named_tokenizer_takes_the_place_of_the_ggufs(capsys: pytest.CaptureFixture[str]) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    Path("words").mkdir()
    words.save("words/tokenizer.json")
    key = "processor.tokenizer.tokenizer_file"
    convert("hf", "load_checkpoint=model.gguf", f"{key}=words")
    assert json.loads(Path("hf/tokenizer.json").read_text())["model"]["vocab"] == {"a": 0, "b": 1}
    Path("words/tokenizer.json").write_text("{}")
    arguments = ["load_checkpoint=model.gguf", "convert_output=other", f"{key}=words"]
    refused([*CONVERT, *arguments], 4)
    assert "not a tokenizer" in capsys.readouterr().err
    to_ckpt = [*CONVERT[:2], *CONVERT[3:], "load_checkpoint=model.gguf", *TO_CKPT]
    refused([*to_ckpt, f"{key}=words/tokenizer.json"], 4)
    assert "not a tokenizer" in capsys.readouterr().err
    assert not Path("other").exists()


@pytest.mark.usefixtures("model_gguf")
def test_one_file_stays_one_file(tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    for form in ("ckpt", "safetensors"):
        target = [f"convert_format={form}", f"convert_output=to/x.{form}"]
        assert main([*CONVERT, *target, "load_checkpoint=model.gguf"]) == 0
    names = {"x.ckpt", "x.safetensors"}
    assert {file.name for file in Path("to").iterdir()} == names | {f"{x}.files" for x in names}
    assert {path.name for path in set(tmp_path.iterdir()) - before} == {"to", "outputs"}


@pytest.mark.usefixtures("model_gguf")
def test_one_file_has_its_config_and_tokenizer_beside(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run_mode=convert", "model=auto", "load_checkpoint=model.gguf"]
    assert main([*command, "convert_format=ckpt", "convert_output=x.ckpt"]) == 0
    note = "wrote x.ckpt.files: tokenizer.json, tokenizer_config.json, config.json"
    assert note in capsys.readouterr().err
    plain = rows("load_checkpoint=model.gguf")
    Path("model.gguf").unlink()
    # Another model's files in the folder are not this one's.
    Path("config.json").write_text("{}")
    Path("tokenizer.json").write_text("{}")
    assert rows("load_checkpoint=x.ckpt") == plain
    again = ["run_mode=convert", "model=auto", "load_checkpoint=x.ckpt", "convert_format=ckpt"]
    assert main([*again, "convert_output=y.ckpt"]) == 0
    assert rows("load_checkpoint=y.ckpt") == plain
    Path("z.ckpt.files").mkdir()
    Path("z.ckpt.files/mine").touch()
    refused([*again, "convert_output=z.ckpt"], 2)
    assert "z.ckpt.files: exists already" in capsys.readouterr().err
    assert main([*again, "convert_output=z.ckpt", "overwrite=true"]) == 0
    assert Path("z.ckpt.files/mine").exists()


@pytest.mark.usefixtures("model_gguf")
def test_a_lone_file_takes_the_tokenizer_from_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    plain = rows("load_checkpoint=model.gguf")
    assert main([*CONVERT[:2], *CONVERT[3:], "load_checkpoint=model.gguf", *TO_CKPT]) == 0
    Path("to/x.ckpt.files/config.json").rename("to/config.json")
    Path("to/x.ckpt.files").rename("files")
    arguments = ["model=auto", "load_checkpoint=to/x.ckpt", "predict_data=a", "max_new_tokens=2"]
    own = "model.model_config.checkpoint_name_or_path=model.gguf"
    refused(arguments, 4)
    assert "no tokenizer in to" in capsys.readouterr().err
    assert main([*arguments, own]) == 0
    assert "tokenizer: from model.gguf, since to/x.ckpt has none" in capsys.readouterr().err
    assert rows("load_checkpoint=to/x.ckpt", own) == plain
    refused([*arguments, own.replace("model.gguf", "gone.gguf")], 4)
    assert (
        "no tokenizer beside to/x.ckpt, and none could be fetched from the model's own"
        in capsys.readouterr().err
    )
    # MindFormers' folder of the family goes before the source.
    Path("checkpoint_download").mkdir()
    Path("files").rename("checkpoint_download/smol")
    assert main([*arguments, own, "trainer.model_name=smol_1b"]) == 0
    assert "tokenizer: from checkpoint_download/smol, since" in capsys.readouterr().err


def test_a_broken_file_is_reported_before_a_missing_tokenizer(
    write_tiny_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_llama("model")
    for name, content, message in (
        ("model.ckpt", b"\x0a\x05hello", "not a valid MindSpore checkpoint"),
        ("model.safetensors", b"no", "not a valid safetensors file"),
        ("model.pt", b"\x80\x04\x95 not ours", "a pickle"),
    ):
        (folder / name).write_bytes(content)
        refused(["model=auto", f"load_checkpoint={folder / name}", "predict_data=hi"], 4)
        captured = capsys.readouterr().err
        assert message in captured and "tokenizer" not in captured


def test_a_checkpoint_without_a_tokenizer_converts(write_tiny_llama: Callable[..., Path]) -> None:
    write_tiny_llama("model")
    assert convert("hf", "load_checkpoint=model") == ["config.json", "model.safetensors"]
