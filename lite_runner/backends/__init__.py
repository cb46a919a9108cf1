"""Backends: compute logits for rows of tokens."""

import os

# Set before MindSpore is imported: log errors only, unless the user asks for more.
os.environ.setdefault("GLOG_v", "3")
