"""A stand-in for the Python of MindFormers: the worker itself, in this Python, over modules that
count instead of computing."""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAM = """
import json, os, runpy, signal, socket, sys, threading, time, types

import numpy as np

ACTS = {acts!r}


def act(where):
    what = ACTS.get(where, "")
    if what == "refuse":
        raise RuntimeError("not such a one")
    if what == "die":
        print("the last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        time.sleep(600)


def module(name, **attributes):
    stub = types.ModuleType(name)
    stub.__dict__.update(attributes)
    sys.modules[name] = stub
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, stub)
    return stub


class Array(np.ndarray):
    def asnumpy(self):
        return np.asarray(self)


class Processors(list):
    def __call__(self, input_ids, scores, *rest):
        return scores


class Model:
    \"\"\"The token after n others is n, whose logits are its only ones above 0.\"\"\"

    def __init__(self, settings):
        self.settings = settings
        self.config = types.SimpleNamespace(**settings)

    def __call__(self, tokens):
        \"\"\"Position i says i + 1.\"\"\"
        act("score")
        rows, length = tokens.shape
        logits = np.zeros((rows, length, self.settings["vocab_size"]), np.float32)
        logits[:, np.arange(length), np.arange(length) + 1] = 1
        return logits.view(Array), tokens

    def set_train(self, train):
        pass

    def _get_logits_processor(self, generation_config=None, logits_processor=None):
        return Processors()

    def generate(self, rows, streamer=None, *, max_length, pad_token_id, eos_token_id, **options):
        act("generate")
        rows = np.array(rows)
        lengths = [int(np.max(np.argwhere(row != pad_token_id))) + 1 for row in rows]
        if options["num_beams"] > 1:
            best = [*rows[0], *range(lengths[0], max_length)]
            return [np.array(best)]
        assert len(rows) == self.settings["batch_size"]
        assert max_length <= self.settings["seq_length"]
        streamer.put(rows)
        processors = self._get_logits_processor(generation_config=None, logits_processor=None)
        done = [False] * len(rows)
        while not all(done):
            act("step")
            logits = np.zeros((len(rows), self.settings["vocab_size"]), np.float32)
            logits[np.arange(len(rows)), lengths] = 1
            processors(rows, logits, done)
            new = [[] if over else [at] for at, over in zip(lengths, done)]
            lengths = [at + 1 - over for at, over in zip(lengths, done)]
            done = [
                over or at == max_length or tokens == [eos_token_id]
                for over, at, tokens in zip(done, lengths, new)
            ]
            streamer.put(new[0] if len(rows) == 1 else new)
        streamer.end()


def load_checkpoint(path):
    act("load")
    assert os.path.isfile(path), path
    return {{}}


class Config:
    def __init__(self, path):
        import yaml

        self.__dict__.update(yaml.safe_load(open(path)))

    def __getattr__(self, name):
        return None


def init():
    \"\"\"Return once all workers have joined the scheduler, which runs until it is ended.\"\"\"
    role, size = os.environ["MS_ROLE"], int(os.environ["MS_WORKER_NUM"])
    address = os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])
    if role == "MS_SCHED":
        act("schedule")
        server = socket.create_server(address)
        joined = [server.accept()[0] for _ in range(size)]
        for one in joined:
            one.sendall(b"all")
        threading.Thread(target=lambda: joined[0].recv(1), daemon=True).start()
        return
    act("join")
    deadline = time.monotonic() + float(os.environ["MS_TOPO_TIMEOUT"])
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise RuntimeError("no scheduler at %s:%d" % address)
            time.sleep(0.05)
    assert connection.recv(3) == b"all"
    Config.connection = connection


def transform_and_load_checkpoint(config, model, network, dataset, do_predict):
    act("transform")
    names = ("MS_", "RANK", "DEVICE", "ASCEND", "HCCL")
    found = {{name: value for name, value in os.environ.items() if name.startswith(names)}}
    report = {{"environ": found, "auto_trans_ckpt": config.auto_trans_ckpt, "cwd": os.getcwd()}}
    assert do_predict and network.parallel is config.parallel_config and model == (network,)
    assert os.path.isfile(config.load_checkpoint)
    json.dump(report, open("report-" + os.environ["RANK_ID"], "w"))


def build_model(model, default_args=None):
    network = Model(model["model_config"])
    network.parallel = default_args and default_args["parallel_config"]
    return network


act("start")
dtype = types.SimpleNamespace(type_none=None)
module(
    "mindspore",
    __version__="2.0.0",
    GRAPH_MODE=0,
    Tensor=lambda values: values,
    Model=lambda network: (network,),
    common=types.SimpleNamespace(dtype=dtype),
    set_context=lambda **settings: None,
    load_checkpoint=load_checkpoint,
    load_param_into_net=lambda model, loaded: (ACTS.get("missing", []), []),
)
module("mindspore.communication", init=init)
module("mindspore.parallel")
module("mindspore.parallel._cost_model_context")
module("mindformers")
module("mindformers.models")
module(
    "mindformers.models.build_model",
    build_model=build_model,
)
module("mindformers.core")
module("mindformers.core.context", build_context=lambda config: init())
module("mindformers.core.parallel_config", build_parallel_config=lambda config: None)
module("mindformers.trainer")
module(
    "mindformers.trainer.utils", transform_and_load_checkpoint=transform_and_load_checkpoint
)
module("mindformers.tools")
module("mindformers.tools.register", MindFormerConfig=Config)
module("mindformers.generation")
module("mindformers.generation.logits_process", LogitsProcessorList=Processors)
import importlib.metadata

importlib.metadata.version = lambda name: ACTS.get("version", "1.0.2")
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def python_of(folder: Path, **acts: object) -> Path:
    """The "Python of MindFormers" in `folder`; `acts`: what it does at `start`, `load`, `generate`,
    `score` or a `step` (refuse, die, hang), and of several workers at `join`, `transform` and, the
    scheduler, `schedule`; the `version` that it says, and the parameters that are
    `missing`."""
    (folder / "program.py").write_text(PROGRAM.format(acts=acts))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/program.py" "$3" "$4"\n')
    python.chmod(0o755)
    return python
