"""The Python interpreters with MindFormers, one for each release.

The mindspore of 1.0.2's time is built for Python 3.9 at most, and cannot share a process with ours.
1.9.0 runs on ours; it pins packages that ours exclude, so it has an environment of its own.
"""

from __future__ import annotations

from lite_runner.backends.workers.python import WorkerPython

PYTHON_1_0 = WorkerPython(
    product="MindFormers 1.0.2",
    variable="LITE_RUNNER_MINDFORMERS_PYTHON",
    folder=".venv-mindformers",
    cached="mindformers",
    target="mindformers",
    elsewhere="with a Python 3.9: python3.9 -m venv {cached} && {cached}/bin/pip install "
    "mindformers==1.0.2 mindspore==2.0.0 numpy==1.24.4 protobuf==3.20.3 pillow==9.5.0",
)
PYTHON_1_9 = WorkerPython(
    product="MindFormers 1.9.0",
    variable="LITE_RUNNER_MINDFORMERS_1_9_PYTHON",
    folder=".venv-mindformers-1.9",
    cached="mindformers-1.9",
    target="mindformers",
    elsewhere="python3.11 -m venv {cached} && {cached}/bin/pip install mindspore==2.10.0"
    " numpy==1.26.4 huggingface-hub tokenizers safetensors sentencepiece tqdm pyyaml requests"
    " python-dateutil && {cached}/bin/pip install --no-deps mindformers==1.9.0 mindpet==1.0.4"
    " datasets==5.2.0 deprecated==1.2.18 jieba==0.42.1 multiprocess==0.70.19 nltk==3.10.4"
    " pandas==2.3.3 pyarrow==23.0.1 pytz==2026.6 regex==2026.11.15 rouge-chinese==1.0.3"
    " tensorboardx==2.6.5 tiktoken==0.14.0 wrapt==1.17.3 xxhash==4.1.0",
)
