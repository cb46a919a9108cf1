"""Text while it is made, on the screen and in an iterator: streaming.py [MODEL]."""

from __future__ import annotations

import sys
from threading import Thread

from lite_runner import AutoModel, AutoTokenizer, TextIteratorStreamer, TextStreamer

name = sys.argv[1] if len(sys.argv) > 1 else "smollm2_135m"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModel.from_pretrained(name)
inputs = tokenizer(["An increasing sequence: one,"], add_special_tokens=False)["input_ids"]

model.generate(inputs, streamer=TextStreamer(tokenizer), max_length=48)

pieces = TextIteratorStreamer(tokenizer, skip_prompt=True)
options = {"streamer": pieces, "max_length": 48}
thread = Thread(target=model.generate, args=(inputs,), kwargs=options)
thread.start()
print("".join(pieces))
thread.join()
