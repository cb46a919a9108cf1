"""What the MindFormers process does: Python 3.9, mindspore 2.0.0 and mindformers 1.0.2.

workers/main.py runs it and describes the protocol; its client is process.py.

    {"op": "start", "folder", "threads"}  imports mindformers, which leaves its log in `folder`;
                                          the versions
    {"op": "load", "yaml"}                builds the network of a yaml of run_mindformer, with its
                                          load_checkpoint
    {"op": "generate", "prompts", "limits", "eos", "pad", "options", "logits"}
                                          MindFormers' generate(). Each step tells the new tokens,
                                          as [row, token], and its seconds; beams only answer, with
                                          the tokens of the best. `logits`: a file to append those
                                          of each step to, float32 [rows, vocab]; null: none
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


def import_mindspore() -> Any:
    """mindspore 2.0.0, ready for mindformers 1.0.2 on a CPU and without chatter.

    It lacks two names that mindformers 1.0.2 mentions, of what nothing on a CPU uses.
    """
    os.environ.setdefault("GLOG_v", "3")
    import mindspore
    from mindspore.parallel import _cost_model_context

    mindspore.bfloat16 = mindspore.common.dtype.bfloat16 = mindspore.common.dtype.type_none
    _cost_model_context._set_rp_matmul_mem_coef = lambda coefficient: None
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    logging.disable(logging.WARNING)  # also what MindFormers says of each parameter it loads
    return mindspore


class Enough(Exception):
    """Every row has all its tokens."""


class Rows:
    """A streamer: tells the new tokens of each row until it ends."""

    def __init__(self, limits: list[int], eos: list[int], tell: Tell) -> None:
        self.left = list(limits)
        self.eos = set(eos)
        self.tell = tell
        self.prompts_seen = False
        self.began = time.perf_counter()

    def put(self, value: Any) -> None:
        """The prompts first, then the new token of each row: a list, in a list if several."""
        if not self.prompts_seen:
            self.prompts_seen = True
            return
        now = time.perf_counter()
        per_row = [value] if len(self.left) == 1 else value
        tokens = []
        for row, new in enumerate(per_row):
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


class Worker:
    """Handles requests."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.mindspore: Any = None
        self.model: Any = None

    def do(self, request: Message) -> Message:
        """The answer to a request. Raises what MindFormers raises."""
        op = request["op"]
        if op == "start":
            return self.start(request["folder"], request["threads"])
        if op == "load":
            return self.load(request["yaml"])
        return self.generate(request)

    def start(self, folder: str, threads: int | None) -> Message:
        """Import, and the versions."""
        os.chdir(folder)
        if threads:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        self.mindspore = import_mindspore()
        if threads:
            self.mindspore.set_context(runtime_num_threads=threads)
        import mindformers  # noqa: F401  (what takes long is done before a model is loaded)

        return {
            "mindformers": version("mindformers"),
            "mindspore": self.mindspore.__version__,
            "python": ".".join(map(str, sys.version_info[:3])),
        }

    def load(self, path: str) -> Message:
        """Build the network and load its checkpoint, all of it."""
        from mindformers.models.build_model import build_model
        from mindformers.tools.register import MindFormerConfig

        config = MindFormerConfig(path)
        self.model = build_model(config.model)
        self.model.set_train(False)
        loaded = self.mindspore.load_checkpoint(config.load_checkpoint)
        missing, _ = self.mindspore.load_param_into_net(self.model, loaded)
        missing = [name for name in missing if not name.endswith(("key_past", "value_past"))]
        if missing:
            names = ", ".join(missing[:5])
            raise RuntimeError(f"{config.load_checkpoint} lacks {len(missing)} parameters: {names}")
        return {}

    def generate(self, request: Message) -> Message:
        """Complete the prompts of a batch."""
        prompts, limits = request["prompts"], request["limits"]
        pad, eos = request["pad"], request["eos"]
        width = max(len(prompt) for prompt in prompts)
        rows = [prompt + [pad] * (width - len(prompt)) for prompt in prompts]
        ends = [len(prompt) + limit for prompt, limit in zip(prompts, limits)]
        options = dict(request["options"], max_length=max(ends), pad_token_id=pad)
        options["eos_token_id"] = eos[0] if eos else -1
        self.keep_logits(request["logits"])
        if options["num_beams"] > 1:
            (found,) = self.model.generate(rows, **options)
            return {"tokens": [int(token) for token in found[width:]]}
        with suppress(Enough):
            self.model.generate(rows, streamer=Rows(limits, eos, self.tell), **options)
        return {}

    def keep_logits(self, path: str | None) -> None:
        """Have generate() append the logits of each step to a file, before it changes them."""
        from mindformers.generation.logits_process import LogitsProcessorList

        processors = type(self.model)._get_logits_processor

        class Recorded(LogitsProcessorList):
            def __call__(self, input_ids: Any, scores: Any, *rest: Any) -> Any:
                if path is not None:
                    with open(path, "ab") as file:  # noqa: PTH123
                        file.write(np.ascontiguousarray(scores, np.float32).tobytes())
                return super().__call__(input_ids, scores, *rest)

        model = self.model
        model._get_logits_processor = lambda **given: Recorded(processors(model, **given))
