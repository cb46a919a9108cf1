"""Prompts of a task's documents as lm_eval makes them: templates, examples, chats, token ids."""

from __future__ import annotations

import ast
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import ConfigError, show
from lite_runner.evaluation.data import DataSet, Document, data_set, read_documents
from lite_runner.evaluation.tasks import Task
from lite_runner.records import dataclass
from lite_runner.text.chat_templates import render_template
from lite_runner.text.tokenizer import Tokenizer

MAX_LIST_CHARS = 1 << 20  # characters of a list that a template writes
SHOTS_SEED = 1234  # seed of the examples, lm_eval's
Ids: TypeAlias = "NDArray[np.int32]"


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Prompt settings for all tasks of a run."""

    data: Path | None  # the folder of the data sets
    shots: int | None  # examples; None: as in the task
    limit: int | None  # documents of a task, or of each of its subsets
    chat: bool
    system: str
    context: int  # the model's context in tokens
    start: int | None  # the token before a text without a context: bos, or eos


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A text in token ids of which those from `start` on are scored."""

    ids: Ids
    start: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A document of a task with its prompt."""

    task: Task
    name: str  # of the task, or of its part
    index: int  # in the split
    document: Document
    question: str  # the prompt without examples
    choices: Sequence[str]  # answers to choose from; none for a generation
    target: Any  # its index or indices, or the expected text or texts
    continuations: Sequence[Continuation]  # token ids to score
    prompt: Ids | None  # of a generation
    cut: bool  # tokens cut on the left to fit the context
    shots: int  # examples before it

    @property
    def content(self) -> str:
        """A hash of the document."""
        text = json.dumps(self.document, sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @property
    def key(self) -> str:
        """A hash of everything that its result depends on, except the model."""
        whole = hashlib.sha256(self.content.encode())
        for one in self.continuations:
            whole.update(one.ids.tobytes() + one.start.to_bytes(4, "little"))
        if self.prompt is not None:
            options = (self.task.until, self.task.generation_kwargs.max_gen_toks)
            whole.update(self.prompt.tobytes() + repr(options).encode())
        return whole.hexdigest()[:16]

    @property
    def length(self) -> int:
        """Tokens of its longest sequence, new ones included."""
        new = self.task.generation_kwargs.max_gen_toks
        lengths = [len(one.ids) - 1 for one in self.continuations]  # the last is only scored
        return max(lengths) if self.prompt is None else len(self.prompt) + new


def samples_of(
    task: Task, tokenizer: Tokenizer, options: TaskOptions, *, only: bool
) -> Iterator[Sample]:
    """The samples of a task, in the order of its documents. `only`: no other task shares the data's
    folder. Raises RunnerError."""
    found = _data_of(task, options.data, only=only)
    parts: Sequence[tuple[str, str]] = [("", "")]
    if task.subsets is not None:
        names = found.subsets(list(task.subsets))
        if not names:
            raise ConfigError(
                f"{task.task}: {found.root}: no part of it is known;"
                f" expected files of {', '.join(list(task.subsets)[:5])}, ..."
            )
        parts = [(name, task.subsets[name]) for name in names]
    for name, title in parts:
        yield from _Prompter(task, tokenizer, options, found, name, title).samples()


def _data_of(task: Task, folder: Path | None, *, only: bool) -> DataSet:
    """The data set of a task: beside its yaml, or in the folder of all. Raises ConfigError."""
    beside = Path(task.folder)
    given = task.dataset_kwargs.data_files
    if given is not None:
        if isinstance(given, str):
            return DataSet.of(_beside(beside, given))
        named = {split: _beside(beside, name) for split, name in given.items()}
        return DataSet(beside, tuple(named.values()), named)
    if task.dataset_path is not None and (beside / task.dataset_path).exists():
        return DataSet.of(beside / task.dataset_path)
    if (alone := beside / f"{task.task}.jsonl").is_file():
        return DataSet.of(alone)
    if folder is None:
        raise ConfigError(
            f"{task.task}: eval.data is empty; expected a folder with its files",
            f"eval.data=FOLDER, with the published files in FOLDER/{task.task}",
        )
    published = [task.dataset_name or "", (task.dataset_path or "").rpartition("/")[2]]
    return data_set(folder, [task.task, *filter(None, published)], only=only)


def _beside(folder: Path, name: str) -> Path:
    """A file that a task names: beside its yaml, or in the current folder, as lm_eval has it."""
    for path in (folder / name, Path(name)):
        if path.is_file():
            return path
    raise ConfigError(f"data_files: {folder / name}: no such file")


class _Prompter:
    """The documents and examples of a task, or of one of its parts."""

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        options: TaskOptions,
        data: DataSet,
        subset: str,
        title: str,
    ) -> None:
        self._task, self._tokenizer, self._options = task, tokenizer, options
        self.name = f"{task.task}_{subset}" if subset else task.task
        self._values = {"subset": title} if subset else {}
        self._shots = task.num_fewshot or 0 if options.shots is None else options.shots
        if task.num_fewshot == 0:  # as in lm_eval: such a task never has examples
            self._shots = 0
        self._documents = self._read(data, task.split, subset)
        self._examples: Sequence[Document] = ()
        if self._shots:
            same = task.shots_split == task.split
            self._examples = self._documents if same else self._read(data, task.shots_split, subset)
        least = self._shots + (task.shots_overlap and self._shots > 0)
        if self._shots and len(self._examples) < least:
            raise ConfigError(
                f"{self.name}: {self._shots} examples: its split {task.shots_split} has"
                f" {len(self._examples)} documents, expected at least {least}",
                "fewer examples: eval.fewshot=0",
            )
        self._turns: dict[int, tuple[str, str]] = {}  # question and answer of an example
        self._random = random.Random(SHOTS_SEED)

    def samples(self) -> Iterator[Sample]:
        for index, document in enumerate(self._documents[: self._options.limit]):
            yield self._sample(index, document)

    def _read(self, data: DataSet, split: str, subset: str) -> list[Document]:
        paths = data.split(split, subset)
        documents = read_documents(paths, self._task.csv_columns)
        if not documents:
            raise ConfigError(
                f"{self.name}: {data.root}: no documents of the split {split}: expected a file such"
                f" as {split}.jsonl in it"
            )
        return documents

    def _sample(self, index: int, document: Document) -> Sample:
        task, where = self._task, f"{self.name}, document {index}"
        question = self._text(task.doc_to_text, document)
        if not isinstance(question, str):
            raise ConfigError(
                f"{where}: doc_to_text: got {show(question)}, expected a text: several inputs for"
                " one ending are not supported"
            )
        choices = self._choices(document, where)
        target = self._target(document, choices, where)
        prefix = None if task.gen_prefix is None else self._text(task.gen_prefix, document)
        context = self._context(document, question, prefix)
        prompt, scored, cut = None, list[Continuation](), False
        if task.output_type == "generate_until":
            ids = self._encode(context)
            most = self._options.context - task.generation_kwargs.max_gen_toks
            if most < 1:
                raise ConfigError(
                    f"{self.name}: max_gen_toks: got {task.generation_kwargs.max_gen_toks},"
                    f" expected fewer than the model's context of {self._options.context} tokens"
                )
            cut, prompt = len(ids) > most, np.array(ids[-most:], np.int32)
        else:
            delimiter = "" if self._options.chat else task.target_delimiter
            texts = [str(target)]
            if task.output_type == "multiple_choice":
                texts = [f"{delimiter}{choice}" for choice in choices]
            for text in texts:
                before, after = self._pair(context, text)
                if not after:
                    raise ConfigError(f"{where}: {text!r} has no tokens to score")
                most = self._options.context
                left = max(0, len(before) + len(after) - 1 - most)  # the last is only scored
                if left >= len(before):
                    raise ConfigError(
                        f"{where}: {len(after)} tokens to score do not fit the model's context of"
                        f" {most} tokens"
                    )
                cut = cut or left > 0
                whole = np.array([*before[left:], *after], np.int32)
                scored.append(Continuation(ids=whole, start=len(before) - left))
        return Sample(
            task=task,
            name=self.name,
            index=index,
            document=document,
            question=question,
            choices=choices,
            target=target,
            continuations=scored,
            prompt=prompt,
            cut=cut,
            shots=self._shots,
        )

    def _context(self, document: Document, question: str, prefix: Any) -> str:
        """The text before an answer: description, examples and question."""
        task, options = self._task, self._options
        description = self._render(task.description, document) if task.description else ""
        system = _joined(options.system, description, task.fewshot_delimiter)
        turns = [self._turn(place) for place in self._chosen(document)]
        if options.chat:
            messages = [{"role": "system", "content": system}] if system else []
            for asked, answer in turns:
                messages.append({"role": "user", "content": asked})
                messages.append({"role": "assistant", "content": _joined(prefix, answer, " ")})
            messages.append({"role": "user", "content": question})
            return self._tokenizer.render_chat(messages)
        text = system
        for asked, answer in turns:
            answer = _joined(prefix, answer, " ")
            between = task.target_delimiter
            if prefix and (asked[-1:].isspace() or prefix[:1].isspace()):
                between = ""
            text += asked + between + answer + task.fewshot_delimiter
        return text + _joined(question, prefix, task.target_delimiter)

    def _chosen(self, document: Document) -> list[int]:
        """The indices of a document's examples."""
        if not self._shots:
            return []
        every = range(len(self._examples))
        if self._task.fewshot_config.sampler == "first_n":
            places = [
                place
                for place in every
                if not self._task.shots_overlap or self._examples[place] != document
            ]
            return places[: self._shots]
        if not self._task.shots_overlap:
            return self._random.sample(every, self._shots)
        drawn = self._random.sample(every, self._shots + 1)
        others = [place for place in drawn if self._examples[place] != document]
        if len(others) < self._shots:
            pool = [place for place in every if self._examples[place] != document]
            others = self._random.sample(pool, self._shots)
        return others[: self._shots]

    def _turn(self, place: int) -> tuple[str, str]:
        """The question and answer of an example."""
        if place not in self._turns:
            document = self._examples[place]
            where = f"{self.name}, example {place}"
            choices = self._choices(document, where)
            target = self._target(document, choices, where)
            first = target[0] if isinstance(target, list) else target
            answer = choices[first] if choices and isinstance(first, int) else str(first)
            self._turns[place] = str(self._text(self._task.doc_to_text, document)), answer
        return self._turns[place]

    def _choices(self, document: Document, where: str) -> list[str]:
        given = self._task.doc_to_choice
        if given is None:
            return []
        if isinstance(given, str):
            found = document[given] if given in document else self._render(given, document)
            found = _literal(found) if isinstance(found, str) else found
        else:
            found = [*given.values()] if hasattr(given, "values") else [*given]
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise ConfigError(
                f"{where}: doc_to_choice: got {show(found)}, expected a list of texts"
            )
        return found

    def _target(self, document: Document, choices: Sequence[str], where: str) -> Any:
        """The expected index or indices of choices, else the text or texts."""
        given = self._task.doc_to_target
        if given is None:
            return ""
        found: Any = list(given) if isinstance(given, tuple) else given
        if isinstance(given, str):
            found = document[given] if given in document else self._render(given, document)
            if isinstance(found, str):
                found = _read_target(found, choices=bool(choices))
        if not choices:
            return [*map(str, found)] if isinstance(found, list) else str(found)
        indices = []
        for one in found if isinstance(found, list) else [found]:
            place = choices.index(one) if isinstance(one, str) and one in choices else one
            if isinstance(place, str) or not 0 <= int(place) < len(choices):
                raise ConfigError(
                    f"{where}: doc_to_target: got {show(one)}, expected one of the choices"
                    f" {show(list(choices))}, or an index of them"
                )
            indices.append(int(place))
        return indices if isinstance(found, list) else indices[0]

    def _text(self, template: str, document: Document) -> Any:
        if template in document:
            return document[template]
        found = self._render(template, document)
        return int(found) if found.isdigit() and self._task.doc_to_choice is not None else found

    def _render(self, template: str, document: Document) -> str:
        if "{" not in template:
            return template
        values = {**document, **self._values}
        return render_template(template, values, source=self.name, of_task=True)

    def _encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; a chat's text may contain bos already."""
        bos = self._tokenizer.named_tokens().get("bos_token")
        begun = self._options.chat and bos is not None and text.startswith(bos)
        return self._tokenizer.encode(text, special and not begun)

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of a text and of what follows it, whose boundary is that of the whole."""
        if not context:
            ids = self._encode(continuation, special=False)
            start = self._options.start
            if start is None or ids[:1] == [start]:
                return ids[:1], ids[1:]
            return [start], ids
        rest = context.rstrip()
        context, continuation = rest, context[len(rest) :] + continuation
        whole, before = self._encode(context + continuation), self._encode(context)
        return whole[: len(before)], whole[len(before) :]


def _joined(first: Any, second: Any, delimiter: str) -> str:
    """Join two texts by the delimiter, if neither is empty and neither has a space there."""
    if not first or not second:
        return str(first or second or "")
    apart = first[-1].isspace() or second[0].isspace()
    return f"{first}{'' if apart else delimiter}{second}"


def _literal(text: str) -> Any:
    """The list that a template wrote; the text itself if it is not a list."""
    if len(text) > MAX_LIST_CHARS:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _read_target(text: str, *, choices: bool) -> Any:
    if text.isdigit() and choices:
        return int(text)
    return _literal(text) if text.startswith("[") and text.endswith("]") else text
