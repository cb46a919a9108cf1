"""backend=mslite: exported models, in MindSpore Lite or in MindSpore's own MindIR runtime."""

from __future__ import annotations

from lite_runner.backends import Backend, RunOptions, Seat, cache_length
from lite_runner.config.sections import ExportSettings
from lite_runner.errors import ConfigError
from lite_runner.model import ModelFiles
from lite_runner.sizing import PROCESS, Memory, cache_bytes, float32_bytes


class Lite(Seat):
    """See `lite_runner.backends.Seat`."""

    def unsupported(self, files: ModelFiles, options: RunOptions) -> list[str]:
        settings = options.settings
        if not isinstance(settings, ExportSettings):
            return [f"run_mode={settings.run_mode} takes no exported model"]
        reasons = []
        if settings.context.mode == 1:
            reasons.append("context.mode=1 (pynative): an exported model is a graph")
        if options.adapters is not None:
            reasons.append("an exported model takes no adapters beside it")
        if options.speculates:
            reasons.append(f"{options.speculates} needs backend=native")
        if options.draft is not None:
            reasons.append("draft_model= needs backend=native")
        if options.prompt_logits:
            reasons.append("an exported graph gives the logits of the last token alone")
        if files.held is not None:
            reasons.append("the weights are a script's parameters, and it exports a checkpoint")
        if files.exported is None and not reasons:
            from lite_runner.backends.lite.export.job import spec_of_run

            try:
                spec_of_run(settings, files, options.slots, options.length)
            except ConfigError as error:
                reasons.append(error.message)
        return reasons

    def memory(self, files: ModelFiles, options: RunOptions) -> Memory:
        """See Seat. Lite's worker process is included."""
        model, slots = files.model, options.slots
        weights, positions = float32_bytes(model), cache_length(options.length, model.seq_length)
        cached = cache_bytes(model, "float32", slots, positions)
        logits = 3 * 4 * slots * model.vocab_size
        return Memory(weights, cached, process=PROCESS, loading=weights, work=logits)

    def describe(self, files: ModelFiles, options: RunOptions) -> str:
        if files.exported is not None:
            return f"the exported model {files.exported.folder}"
        return "an exported model, in the cache or exported first"

    def dtype(self, files: ModelFiles, options: RunOptions) -> str:
        return options.settings.precision.computed(options.device)

    def open(self, files: ModelFiles, options: RunOptions) -> Backend:
        """See Seat. The exported model that the config names, or the one in the cache."""
        from lite_runner.backends.lite.export.opening import open_offline

        return open_offline(files, options)


SEAT = Lite()
