"""What turns rows of tokens into logits."""

import os

# MindSpore's own log, before it is imported: errors only, unless the user asks for more.
os.environ.setdefault("GLOG_v", "3")
