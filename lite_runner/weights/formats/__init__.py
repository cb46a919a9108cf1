"""Weight files as others define them: safetensors, ckpt, GGUF, PyTorch, Hugging Face."""
