"""TextGenerationPipeline: texts in, texts out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lite_runner.api.adapters import AdapterIds
from lite_runner.api.model import PreTrainedModel
from lite_runner.api.options import checked_options, merged_options
from lite_runner.api.outputs import texts_of
from lite_runner.api.settings import read_batch_size
from lite_runner.api.streamers import Streamer
from lite_runner.api.tokenizer import PreTrainedTokenizer
from lite_runner.config.prefixes import with_ending
from lite_runner.config.suggest import did_you_mean, nearest
from lite_runner.errors import ConfigError

TASKS = ("text_generation",)
Texts = list[dict[str, list[str]]]


class TextGenerationPipeline:
    """A model and a tokenizer, to be called with texts."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizer | None = None,
        *,
        streamer: Streamer | None = None,
        add_special_tokens: bool = True,
        is_sample_acceleration: bool = False,
        batch_size: int | None = None,
        adapter_id: AdapterIds = None,
        chat: bool | None = None,
        generation_config: Any = None,
        **options: Any,
    ) -> None:
        """`tokenizer`: None takes the checkpoint's own. All else (max_length, do_sample, ...) holds
        for every call that does not give it itself. Raises ConfigError for an unknown option."""
        self.model = model
        self.tokenizer = tokenizer or model.tokenizer
        options = merged_options(generation_config, options)
        checked_options(options, model.config)
        self._streamer = streamer
        self._add_special_tokens = add_special_tokens
        self._is_greedy = is_sample_acceleration
        self._batch_size = None if batch_size is None else read_batch_size(batch_size)
        self._adapter_id = adapter_id
        self._chat = chat
        self._options = options

    def __call__(
        self,
        inputs: str | Sequence[str],
        *,
        streamer: Streamer | None = None,
        add_special_tokens: bool | None = None,
        is_sample_acceleration: bool | None = None,
        batch_size: int | None = None,
        adapter_id: AdapterIds = None,
        chat: bool | None = None,
        generation_config: Any = None,
        **options: Any,
    ) -> Texts:
        """[{"text_generation_text": [prompt and completion]}], one for each text of `inputs`.

        With `batch_size`, which must divide their number, one for each batch of so many, as
        MindFormers has it. `adapter_id`: the name of an adapter, or one for each text; None is the
        base. `chat`: each text is what a user says, put into the model's chat template.
        `is_sample_acceleration` says that the model itself chooses the likeliest token: sampling
        with it is a ConfigError.
        """
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise ConfigError(f"inputs[{index}]: got {type(text).__name__}, expected a text")
        options = merged_options(generation_config, options)
        options = {**self._options, **{n: v for n, v in options.items() if v is not None}}
        greedy = self._is_greedy if is_sample_acceleration is None else is_sample_acceleration
        if greedy and options.get("do_sample", self.model.config.do_sample):
            raise ConfigError(
                "is_sample_acceleration=True chooses the likeliest token; got do_sample=True too",
                "is_sample_acceleration=False",
            )
        batch = self._batch_size if batch_size is None else read_batch_size(batch_size)
        if batch is not None and len(texts) % batch:
            raise ConfigError(
                f"batch_size: got {batch} for {len(texts)} texts, expected what divides them",
                "leave batch_size out: the run chooses it",
            )
        special = self._add_special_tokens if add_special_tokens is None else add_special_tokens
        core = self.tokenizer.core
        completions = self.model.complete(
            list(self._encoded(texts, special, self._chat if chat is None else chat)),
            options,
            streamer=streamer or self._streamer,
            tokenizer=self.tokenizer,
            adapter_id=self._adapter_id if adapter_id is None else adapter_id,
        )
        stop = options.get("stop") or ()
        found: list[list[str]] = [[] for _ in texts]
        made = texts_of(completions, core, (stop,) if isinstance(stop, str) else stop)
        for completion, text in zip(completions, made, strict=True):
            found[completion.prompt_index].append(texts[completion.prompt_index] + text)
        step = batch or 1
        return [
            {"text_generation_text": [text for row in found[start : start + step] for text in row]}
            for start in range(0, len(texts), step)
        ]

    def _encoded(
        self, texts: Sequence[str], special: bool, chat: bool | None
    ) -> Iterator[list[int]]:
        core = self.tokenizer.core
        for text in texts:
            if self.model.config.chat if chat is None else chat:
                yield core.encode_chat([{"role": "user", "content": text}])
            else:
                yield with_ending(self.model.prefix, core.encode(text, special))


def check_task(task: str) -> None:
    """Raises ConfigError unless `task` is known."""
    if task not in TASKS:
        near = did_you_mean(nearest(str(task).replace("-", "_"), TASKS))
        raise ConfigError(f"task: got {task!r}, expected one of {', '.join(TASKS)}{near}")
