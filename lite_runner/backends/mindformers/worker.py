"""The MindFormers worker: Python 3.9, mindspore and mindformers, 1.0.2 or 1.9.0.

workers/main.py runs it and describes the protocol; its client is process.py.

    {"op": "start", "folder", "threads", "device"}
                                          imports mindformers, which leaves its log in `folder`;
                                          the versions
    {"op": "schedule"}                    instead of `start`: this process is the scheduler of a
                                          group of workers, as its environment says; answers once
                                          all have joined
    {"op": "load", "yaml"}                builds the network of a yaml of run_mindformer, with its
                                          load_checkpoint, or as one of several workers with its
                                          part of it; its stand-ins
    {"op": "generate", "prompts", "limits", "eos", "pad", "options", "logits"}
                                          MindFormers' generate(). Each step sends the new tokens,
                                          as [row, token], and its seconds; beams only answer, with
                                          the tokens of the best. `logits`: a file to append those
                                          of each step to, float32 [rows, vocab]; null: none
    {"op": "score", "ids", "pad"}         the log-likelihood of each token but the first, by the
                                          logits of all positions
    {"op": "export", "file"}              writes the graph of a network without a cache
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import numpy as np

Message = dict[str, Any]
Tell = Callable[[Message], None]


def import_mindspore(device: str) -> Any:
    """mindspore, ready for mindformers on a device, "CPU" or "Ascend", and without chatter.

    2.0.0 lacks two names that mindformers 1.0.2 mentions, of what nothing on a CPU uses.
    """
    os.environ.setdefault("GLOG_v", "3")
    # Despite -B, which is for our own files: scripts/setup.sh leaves it to runs to compile what
    # they import, three thousand modules, and each process would do it anew.
    sys.dont_write_bytecode = False
    import mindspore

    if not hasattr(mindspore, "bfloat16"):
        from mindspore.parallel import _cost_model_context

        mindspore.bfloat16 = mindspore.common.dtype.bfloat16 = mindspore.common.dtype.type_none
        _cost_model_context._set_rp_matmul_mem_coef = lambda coefficient: None
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target=device)
    logging.disable(logging.WARNING)  # also what MindFormers says of each parameter it loads
    return mindspore


def argmax(logits: Any, axis: int) -> Any:
    """A stand-in for mint.argmax, which mindspore has no kernel for on a CPU: the place of the
    largest along an axis, the first of equal ones."""
    import mindspore

    return mindspore.ops.argmax(logits, axis)


class Enough(Exception):
    """Every row has all its tokens."""


class Rows:
    """A streamer: sends the new tokens of each row until it ends."""

    def __init__(self, limits: list[int], eos: list[int], tell: Tell) -> None:
        self.left = list(limits)
        self.eos = set(eos)
        self.tell = tell
        self.prompts_seen = False
        self.began = time.perf_counter()

    def put(self, value: Any) -> None:
        """The prompts first, then the new token of each row: a number, or a list that is empty once
        the row has ended; in a list if there are several rows."""
        if not self.prompts_seen:
            self.prompts_seen = True
            return
        now = time.perf_counter()
        per_row = [value] if len(self.left) == 1 else value
        tokens = []
        for row, new in enumerate(map(np.atleast_1d, per_row)):
            if self.left[row] and len(new):
                token = int(new[0])
                tokens.append([row, token])
                self.left[row] = 0 if token in self.eos else self.left[row] - 1
        self.tell({"tokens": tokens, "seconds": now - self.began})
        if not any(self.left):
            raise Enough
        self.began = time.perf_counter()

    def end(self) -> None:
        """Nothing is left to tell."""


class MindFormersWorker:
    """The operations of the requests. They raise MindFormers' errors."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.mindspore: Any = None
        self.model: Any = None
        self.release = ""

    def start(self, folder: str, threads: int | None, device: str) -> Message:
        """Import, and the versions."""
        os.chdir(folder)
        os.environ["RUN_MODE"] = "predict"  # networks of later releases ask run_mindformer for it
        if threads:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        self.mindspore = import_mindspore(device)
        if threads:
            self.mindspore.set_context(runtime_num_threads=threads)
        import mindformers  # noqa: F401  (what takes long is done before a model is loaded)

        self.release = version("mindformers")
        return {
            "mindformers": self.release,
            "mindspore": self.mindspore.__version__,
            "python": ".".join(map(str, sys.version_info[:3])),
        }

    def schedule(self) -> Message:
        """Wait until all workers have joined; MindSpore's threads schedule them from then on."""
        import_mindspore("CPU")
        from mindspore.communication import init

        init()
        return {}

    def load(self, yaml: str) -> Message:
        """Build the network and load its checkpoint."""
        from mindformers.models.build_model import build_model
        from mindformers.tools.register import MindFormerConfig

        config = MindFormerConfig(yaml)
        first = self.release.startswith("1.0.")
        if config.use_parallel:
            self.load_part(config)
            return {"stand_ins": []}
        if not first:
            from mindformers.core.context import build_context

            build_context(config)
        self.model = build_model(config.model)
        self.model.set_train(False)
        loaded = self.mindspore.load_checkpoint(config.load_checkpoint)
        missing, _ = self.mindspore.load_param_into_net(self.model, loaded)
        missing = [name for name in missing if not name.endswith(("key_past", "value_past"))]
        if missing:
            names = ", ".join(missing[:5])
            raise RuntimeError(f"{config.load_checkpoint} lacks {len(missing)} parameters: {names}")
        if first or config.context.device_target != "CPU":
            return {"stand_ins": []}
        self.model.argmax = argmax
        return {"stand_ins": ["argmax"]}

    def load_part(self, config: Any) -> None:
        """Join the other workers, build the network and load this one's part of the checkpoint, as
        mindformers/trainer/base_trainer.py does to predict."""
        from mindformers.core.context import build_context
        from mindformers.core.parallel_config import build_parallel_config
        from mindformers.models.build_model import build_model
        from mindformers.trainer import utils

        if not self.release.startswith("1.0."):
            utils.convert_checkpoint_config(config)
        build_context(config)
        build_parallel_config(config)
        parts = {"parallel_config": config.parallel_config, "moe_config": config.moe_config}
        self.model = build_model(config.model, default_args=parts)
        self.model.set_train(False)
        sizes = self.model.config
        ids = np.ones((sizes.batch_size, sizes.seq_length), np.int32)
        inputs: Any = self.mindspore.Tensor(ids)
        if hasattr(self.model, "prepare_inputs_for_predict_layout"):
            inputs = self.model.prepare_inputs_for_predict_layout(ids)
        utils.transform_and_load_checkpoint(
            config, self.mindspore.Model(self.model), self.model, inputs, do_predict=True
        )

    def generate(
        self,
        prompts: list[list[int]],
        limits: list[int],
        eos: list[int],
        pad: int,
        options: Message,
        logits: str | None,
    ) -> Message:
        """Complete the prompts of a batch."""
        width = max(len(prompt) for prompt in prompts)
        rows = [prompt + [pad] * (width - len(prompt)) for prompt in prompts]
        ends = [len(prompt) + limit for prompt, limit in zip(prompts, limits)]
        options = dict(options, max_length=max(ends), pad_token_id=pad)
        end = eos[0] if eos else -1
        options["eos_token_id"] = end if self.release.startswith("1.0.") else [end]
        self.keep_logits(logits)
        if options["num_beams"] > 1:
            (found,) = self.model.generate(rows, **options)
            return {"tokens": [int(token) for token in found[width:]]}
        with suppress(Enough):
            self.model.generate(rows, streamer=Rows(limits, eos, self.tell), **options)
        return {}

    def score(self, ids: list[int], pad: int) -> Message:
        """Log-likelihood of each token of a text: ids [n], n at most the network's length."""
        length = self.model.config.seq_length
        row = np.array([ids + [pad] * (length - len(ids))], np.int32)
        found = self.model(self.mindspore.Tensor(row))
        logits = found[0] if isinstance(found, tuple) else found
        logits = logits.asnumpy().astype(np.float64).reshape(length, -1)[: len(ids) - 1]
        largest = logits.max(-1)
        total = largest + np.log(np.exp(logits - largest[:, None]).sum(-1))
        chosen = logits[np.arange(len(ids) - 1), ids[1:]]
        return {"log_likelihoods": [float(one) for one in chosen - total]}

    def export(self, file: str) -> Message:
        """Write the graph to a .mindir, as mindformers/tools/export.py does, which cannot be
        imported: it wants a folder that is not in the package."""
        config = self.model.config
        ids = np.ones((config.batch_size, config.seq_length), np.int32)
        self.model.add_flags_recursive(is_first_iteration=True)
        tensor = self.mindspore.Tensor(ids)
        self.mindspore.export(self.model, tensor, file_name=file, file_format="MINDIR")
        return {}

    def keep_logits(self, path: str | None) -> None:
        """Have generate() append the logits of each step to a file, before it changes them."""
        from mindformers.generation.logits_process import LogitsProcessorList

        name = (
            "_get_logits_processor" if self.release.startswith("1.0.") else "get_logits_processor"
        )
        processors = getattr(type(self.model), name)

        class Recorded(LogitsProcessorList):
            def __call__(self, input_ids: Any, scores: Any, *rest: Any) -> Any:
                if path is not None:
                    with open(path, "ab") as file:  # noqa: PTH123
                        file.write(np.ascontiguousarray(scores, np.float32).tobytes())
                return super().__call__(input_ids, scores, *rest)

            def __bool__(self) -> bool:
                return True  # 1.9.0 does not call a list that is empty

        def recorded(**given: Any) -> Recorded:
            recording = Recorded()
            recording.extend(processors(self.model, **given))
            return recording

        setattr(self.model, name, recorded)


WORKER = MindFormersWorker
