"""The files of text that are damaged: tokenizers, prompts, configs, rank tables."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from fuzz import formats
from fuzz.children import Case
from fuzz.readers import plan, tokenizer
from fuzz.values import flip_bytes
from lite_runner.backends.lite.ge import read_ini
from lite_runner.distributed.rank_table import read_rank_table
from tests.paths import FIXTURES

WORDS = ["the cat sat on the mat\n", "def f(x):\n    return 2 * x\n", "Ünïcödé 漢字 😀\n"] * 9
TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}{{ m.role }} {{ m.content | trim }}"
    "{% if loop.last and add_generation_prompt %}>{% endif %}{% endfor %}"
)


def tokenizers_of(folder: Path) -> Iterator[Case]:
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "chat_template": TEMPLATE,
        "add_bos_token": True,
    }
    for name, made in (("bpe", _bpe()), ("unigram", _unigram())):
        where = folder / f"tokenizer_{name}"
        where.mkdir()
        made.save(str(where / "tokenizer.json"))
        (where / "tokenizer_config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            yield Case(f"{file}/{name}", where, file, formats.json_text, tokenizer("."))
        yield Case(
            f"chat template/{name}", where, "tokenizer_config.json", _template, tokenizer(".")
        )
        if name == "bpe":
            slow = where / "slow"
            slow.mkdir()
            made.model.save(str(slow))
            for file, mutation in (
                ("vocab.json", formats.json_text),
                ("merges.txt", formats.plain_text),
            ):
                yield Case(file, where, f"slow/{file}", mutation, tokenizer("slow"))
    for kind in ("bpe", "unigram"):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.Train(
            **{"sentence_iterator": iter(WORDS), "model_writer": model, "model_type": kind},
            **{"vocab_size": 290, "byte_fallback": True, "minloglevel": 2},
            hard_vocab_limit=False,
        )
        where = folder / f"sentencepiece_{kind}"
        where.mkdir()
        (where / "tokenizer.model").write_bytes(model.getvalue())
        yield Case(
            f"tokenizer.model/{kind}", where, "tokenizer.model", formats.protobuf, tokenizer(".")
        )


def _bpe() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        WORDS,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    return made


def _unigram() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    special = ["<s>", "</s>", "<unk>"]
    made.train_from_iterator(
        WORDS,
        trainers.UnigramTrainer(
            vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False
        ),
    )
    return made


def plain_texts(folder: Path) -> Iterator[Case]:
    files = folder / "texts"
    files.mkdir()
    record = {"prompt": "hi", "id": 7, "seed": 3, "temperature": 0.5, "stop": ["a"], "top_k": 4}
    prompts = {
        "p.txt": "one\ntwo\\nlines\n",
        "p.json": json.dumps([record, "hi", {**record, "stop": "x"}]),
        "p.jsonl": json.dumps(record) + '\n"hi"\n',
        "p.csv": 'prompt,id,temperature\nhi,1,0.5\n"a, b",x,\n',
        "c.ini": "provider=ge\n[ascend_context]\nprovider=ge\n[ge_graph_options]\nge.x=a:1\n",
        "run.yaml": "run_mode: predict\npredict_data: [hi]\nmax_new_tokens: 8\n"
        "context: {device_target: CPU}\nprocessor: {tokenizer: {type: ByteTokenizer}}\n",
    }
    for name, text in prompts.items():
        (files / name).write_text(text)
    mutations = {
        "p.txt": formats.plain_text,
        "p.json": formats.json_text,
        "p.jsonl": formats.json_lines,
        "p.csv": formats.plain_text,
    }
    for name, mutation in mutations.items():
        read = plan("model=tiny_llama", "do_sample=true", f"predict_data={name}")
        yield Case(f"prompts {name}", files, name, mutation, read)
    yield Case("config.ini", files, "c.ini", formats.plain_text, lambda at: read_ini(at / "c.ini"))
    yield Case(
        "yaml", files, "run.yaml", formats.yaml_text, plan("--config=run.yaml", "model=tiny_llama")
    )
    for path in sorted((FIXTURES / "rank_tables").glob("[!r]*.json")):
        shutil.copy(path, files)

        def read_table(at: Path, name: str = path.name) -> None:
            table = read_rank_table(at / name)
            table.clash()
            table.to_dict()

        yield Case(f"rank table/{path.stem}", files, path.name, formats.json_text, read_table)


def _template(data: bytes, random: Random) -> bytes:
    config = json.loads(data)
    damaged = flip_bytes(config["chat_template"].encode(), random)
    config["chat_template"] = damaged.decode(errors="replace")
    return json.dumps(config).encode()
