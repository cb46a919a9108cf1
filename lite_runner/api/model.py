"""PreTrainedModel: `generate` and all that it takes, as MindFormers has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lite_runner.api.adapters import AdapterIds
from lite_runner.api.config import PretrainedConfig
from lite_runner.api.hooks import Hooks
from lite_runner.api.ids import rows_of
from lite_runner.api.loaded_model import LoadedModel
from lite_runner.api.options import merged_options
from lite_runner.api.outputs import StepOutputs, sequences_of
from lite_runner.api.streamers import Streamer
from lite_runner.api.tokenizer import PreTrainedTokenizer
from lite_runner.errors import ConfigError
from lite_runner.generation import Completion, OnLogits
from lite_runner.model.files import ModelFiles

if TYPE_CHECKING:
    from lite_runner.architectures.spec import Prefix


class PreTrainedModel:
    """A model and its weights, which are read at the first `generate`.

    The KV cache grows with the calls: for more sequences at once, or longer ones, it is allocated
    again and the graph recompiled, and the weights stay. Those of an exported model are read again,
    as all are after a change of `config` or of the adapters. `config.batch_size` sequences are
    allocated from the start. Calls from several threads are serialized.
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
    def max_length(self) -> int:
        """Tokens of the longest sequence: the model's context length, or that of its graphs."""
        given = self._loaded.files.exported
        return self._loaded.files.model.seq_length if given is None else given.manifest.seq_length

    @property
    def prefix(self) -> Prefix | None:
        """What must end a prompt of ChatGLM-6B; None: any prompt will do."""
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
        adapter_path's, or one for each prompt; None is the base. With return_dict_in_generate=True
        it is {"sequences": that, "scores", "logits"}, the last two a list with an array
        [sequences, vocab] a step where output_scores or output_logits asks for it, else None; and
        where the options of that name ask for it "logprobs" and "prompt_logprobs", of each sequence
        what result.json has. Raises ConfigError for what is unknown or does not fit.
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
        do_sample: bool = True,
        top_k: int = 50,
        *,
        generation_config: Any = None,
        streamer: Streamer | None = None,
        adapter_id: AdapterIds = None,
        **options: Any,
    ) -> tuple[str, list[dict[str, str]]]:
        """The answer to `query`, and the messages so far with both; with MindFormers' defaults.

        `instruction` begins a new conversation; `options` are those of `generate`. Raises
        ConfigError where the tokenizer has no chat template.
        """
        if history is None:
            begin = [{"role": system_role_name, "content": instruction}] if instruction else []
        else:
            begin = list(history)
        messages = [*begin, {"role": user_role_name, "content": query}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        longest = None if max_length is None else min(max_length, self.max_length)
        chosen = {"max_length": longest, "do_sample": do_sample, "top_k": top_k, **options}
        (made,) = self.complete(
            rows_of(ids, self._loaded.files.model),
            merged_options(generation_config, chosen),
            streamer=streamer,
            adapter_id=adapter_id,
        )
        answer: str = tokenizer.decode(made.token_ids, skip_special_tokens=True)
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
        """What follows each of `prompts` (token ids); see `generate`, whose dict has log-
        probabilities too.

        `tokenizer` tells which other tokens end a text; None: the checkpoint's own. That one is
        fetched only where stop texts or an export need it: ids do without.
        """
        for name in () if in_a_dict else ("logprobs", "prompt_logprobs"):
            value = options.get(name)
            if (getattr(self.config, name) if value is None else value) is not None:
                raise ConfigError(
                    f"{name}: only what generate gives with return_dict_in_generate=True has them",
                    f"model.generate(..., {name}={value}, return_dict_in_generate=True)",
                )
        hooks = Hooks(streamer, on_logits)
        core = None if tokenizer is None else tokenizer.core
        return self._loaded.complete(prompts, options, hooks, core, adapter_id)

    def set_train(self, mode: bool = True) -> PreTrainedModel:
        """As in MindSpore. Raises ConfigError for True: there is no training here."""
        if mode:
            raise ConfigError("set_train(True): lite-runner does not train", "set_train(False)")
        return self

    def close(self) -> None:
        """Free the memory, as `del model` does; the next `generate` reads the weights again.

        MindSpore keeps some of every compiled graph: under 1 MB a layer with the operators of this
        project, about 2 MB with its own; and some 80 MB once a process.
        """
        self._loaded.close()
