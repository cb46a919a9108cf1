"""PreTrainedModel: MindFormers' `generate` and `chat`, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.api.config import PretrainedConfig
from lite_runner.api.loaded_model import AdapterIds, Hooks, LoadedModel
from lite_runner.api.options import OUTPUTS, merged_options, stop_texts
from lite_runner.api.streamers import Streamer
from lite_runner.api.tokenizer import PreTrainedTokenizer, rows_of
from lite_runner.errors import ConfigError
from lite_runner.generation import Completion, OnLogits, logprobs_of, prompt_logprobs_of
from lite_runner.model import ModelFiles
from lite_runner.text.spelling import StopChecker
from lite_runner.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lite_runner.architectures.spec import Prefix


class PreTrainedModel:
    """A model and its weights, which are read at the first `generate`.

    The KV cache grows with the calls: for more sequences at once, or longer ones, it is allocated
    again (and with backend="ms" the graph recompiled), and the weights stay. Those of an exported
    model are read again, as all are after a change of `config` or of the adapters.
    `config.batch_size` sequences are allocated from the start. Calls from several threads are
    serialized.
    """

    def __init__(self, config: PretrainedConfig, files: ModelFiles | None = None) -> None:
        """Checks the config and finds the `files`, where they are not given.

        Raises ConfigError, ArtifactError.
        """
        self.config = config.copy()
        self._loaded = LoadedModel(self.config, files)

    @property
    def tokenizer(self) -> PreTrainedTokenizer:
        """The checkpoint's own. Raises ArtifactError where it has none."""
        core = self._loaded.tokenizer(fetching=True)
        return PreTrainedTokenizer(core, self._loaded.files.model.pad_token_id)

    @property
    def has_own_weights(self) -> bool:
        """True where a script has written to the parameters."""
        held = self._loaded.parameters
        return held is not None and bool(held.written())

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence: the model's context length, or that of its graphs."""
        given = self._loaded.files.exported
        return self._loaded.files.model.seq_length if given is None else given.manifest.seq_length

    @property
    def prefix(self) -> Prefix | None:
        """The end that a prompt of ChatGLM-6B must have; None: any prompt will do."""
        return self._loaded.files.model.prefix

    def generate(
        self,
        input_ids: Any,
        generation_config: Any = None,
        *,
        streamer: Streamer | None = None,
        adapter_id: AdapterIds = None,
        **options: Any,
    ) -> Any:
        """Token ids of each sequence: prompt, new ones and the eos token that ended it.

        `input_ids`: a list of ids, or a list, array or tensor of such rows; the padding at the end
        of a row is ignored. `options` are those of the config: max_length, max_new_tokens,
        do_sample, top_k, ...; None leaves one to `generation_config`, or to the model.
        The `num_return_sequences` of one prompt are neighbours. `adapter_id`: a name of
        adapter_path's, or one for each prompt; "base" is the base model, and so is None, unless
        adapter_path has one adapter alone. With return_dict_in_generate=True it is {"sequences":
        that, "scores", "logits"}, the last two a list with an array [sequences, vocab] a step where
        output_scores or output_logits asks for it, else None; and where the options of that name
        ask for it "logprobs" and "prompt_logprobs", of each sequence what result.json has. Raises
        ConfigError for what is unknown or does not fit.
        """
        options = merged_options(generation_config, options)
        pad = options.get("pad_token_id")
        prompts = rows_of(input_ids, self._loaded.files.model, pad)
        steps = StepOutputs(options) if options.get("return_dict_in_generate") else None
        completions = self.complete(
            prompts,
            options,
            streamer=streamer,
            adapter_id=adapter_id,
            on_logits=steps.on_logits if steps and steps.wanted else None,
            in_a_dict=steps is not None,
        )
        if steps is None:
            return sequences_of(prompts, completions)
        return steps.result(prompts, completions)

    def chat(
        self,
        tokenizer: PreTrainedTokenizer,
        query: str,
        history: list[dict[str, str]] | None = None,
        system_role_name: str = "system",
        user_role_name: str = "user",
        assistant_role_name: str = "assistant",
        instruction: str = "",
        max_length: int | None = 512,
        do_sample: bool | None = None,
        top_k: int | None = None,
        *,
        generation_config: Any = None,
        streamer: Streamer | None = None,
        adapter_id: AdapterIds = None,
        **options: Any,
    ) -> tuple[str, list[dict[str, str]]]:
        """The answer to `query`, and the messages so far with both. MindFormers' defaults sample
        from the 50 likeliest tokens unless `generation_config` or the call says otherwise.

        `instruction` begins a new conversation; `options` are those of `generate`. Raises
        ConfigError where the tokenizer has no chat template.
        """
        begin = list(history or ())
        if instruction and not begin:
            begin = [{"role": system_role_name, "content": instruction}]
        messages = [*begin, {"role": user_role_name, "content": query}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        longest = None if max_length is None else min(max_length, self.max_length)
        chosen = {"max_length": longest, "do_sample": do_sample, "top_k": top_k, **options}
        given = {"do_sample": True, "top_k": 50} | merged_options(generation_config, chosen)
        (completion,) = self.complete(
            rows_of(ids, self._loaded.files.model), given, streamer=streamer, adapter_id=adapter_id
        )
        answer: str = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        for stop in stop_texts(given, self.config):
            answer = answer.partition(stop)[0]
        return answer, [*messages, {"role": assistant_role_name, "content": answer}]

    def complete(
        self,
        prompts: list[list[int]],
        options: Mapping[str, Any],
        *,
        streamer: Streamer | None = None,
        tokenizer: PreTrainedTokenizer | None = None,
        adapter_id: AdapterIds = None,
        on_logits: OnLogits | None = None,
        in_a_dict: bool = False,
    ) -> list[Completion]:
        """Completions of `prompts` (token ids); see `generate`, whose dict has log-
        probabilities too.

        `tokenizer` tells which other tokens end a text; None: the checkpoint's own. That one is
        fetched only where stop texts or an export need it: ids do without. With one the answer is
        text, which comes without logits.
        """
        for name in () if in_a_dict else ("logprobs", "prompt_logprobs"):
            value = options.get(name)
            value = getattr(self.config, name) if value is None else value
            if value is not None:
                raise ConfigError(
                    f"{name}: needs return_dict_in_generate=True of AutoModel",
                    f"model.generate(ids, {name}={value}, return_dict_in_generate=True)",
                )
        for name in OUTPUTS if tokenizer is not None else ():
            if options.get(name):
                raise ConfigError(
                    f"{name}: this returns texts", f"model.generate(ids, {name}=True) of AutoModel"
                )
        hooks = Hooks(streamer, on_logits)
        core = None if tokenizer is None else tokenizer.core
        return self._loaded.complete(prompts, options, hooks, core, adapter_id)

    @property
    def described(self) -> str:
        """Its name and the unusual settings of its config, in a line."""
        run = self.config.run_config()
        usual = {"backend": "auto", "quant": None, "kv_cache": None, "adapter_path": ""}
        found = {name: getattr(run, name) for name in usual}
        found = {name: value for name, value in found.items() if value != usual[name]}
        if (source := run.checkpoint_source) != run.model_name:
            found = {"checkpoint": source} | found
        return ", ".join([repr(run.model_name), *(f"{n}={v!r}" for n, v in found.items())])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.described})"

    def set_train(self, mode: bool = True) -> PreTrainedModel:
        """As in MindSpore. Raises ConfigError for True: there is no training here."""
        if mode:
            raise ConfigError(
                "set_train(True): a model object only generates; run_mode=finetune trains",
                "set_train(False)",
            )
        return self

    def close(self) -> None:
        """Free the memory, as `del model` does; the next `generate` reads the weights again.

        With backend="ms" MindSpore keeps about 2 MB a layer of every compiled graph, and some 80 MB
        once per process.
        """
        self._loaded.close()


class StepOutputs:
    """Collects the logits and scores of every step for return_dict_in_generate=True."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._scores = bool(options.get("output_scores"))
        self._logits = bool(options.get("output_logits"))
        self.wanted = self._scores or self._logits  # else `on_logits` is not needed
        self._rows: dict[tuple[int, int], list[tuple[NDArray[Any], NDArray[Any]]]] = {}

    def on_logits(
        self, prompt: int, part: int, logits: NDArray[np.float32], scores: NDArray[Any]
    ) -> None:
        """Keeps copies: the next step may overwrite the arrays."""
        row = (logits.copy() if self._logits else logits[:0], scores.copy())
        self._rows.setdefault((prompt, part), []).append(row)

    def result(
        self, prompts: Sequence[list[int]], completions: Sequence[Completion]
    ) -> dict[str, Any]:
        """The dict; a sequence has zeros in the steps after its end."""
        rows = [self._rows.get((one.prompt_index, one.return_index), []) for one in completions]
        found: dict[str, Sequence[Any]] = {
            "logprobs": [logprobs_of(one) for one in completions],
            "prompt_logprobs": [
                prompt_logprobs_of(one, prompts[one.prompt_index]) for one in completions
            ],
        }
        return {
            "sequences": sequences_of(prompts, completions),
            "scores": _stacked(rows, 1) if self._scores else None,
            "logits": _stacked(rows, 0) if self._logits else None,
            **{name: every for name, every in found.items() if None not in every},
        }


def sequences_of(
    prompts: Sequence[list[int]], completions: Sequence[Completion]
) -> list[list[int]]:
    """Prompt and drawn tokens of each completion."""
    return [[*prompts[one.prompt_index], *one.drawn] for one in completions]


def _stacked(
    rows: Sequence[Sequence[tuple[NDArray[Any], NDArray[Any]]]], which: int
) -> list[NDArray[np.float32]]:
    """For each step an array [sequences, vocab]."""
    found = []
    for step in range(max(map(len, rows), default=0)):
        there = [(index, row[step][which]) for index, row in enumerate(rows) if step < len(row)]
        array = np.zeros((len(rows), len(there[0][1])), np.float32)
        for index, values in there:
            array[index] = values
        found.append(array)
    return found


def texts_of(
    completions: Sequence[Completion], tokenizer: Tokenizer, stop: Sequence[str]
) -> list[str]:
    """The text of each completion as it follows its prompt, cut at a stop text."""
    texts = []
    for completion in completions:
        checker = StopChecker(tokenizer, stop, continues=True)
        for token in completion.token_ids:
            checker.put(token)
        checker.finish()
        texts.append(checker.text)
    return texts
