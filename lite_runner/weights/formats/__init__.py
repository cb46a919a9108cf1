"""Weight files as others define them: safetensors, ckpt, GGUF, PyTorch, Hugging Face."""

# Names of files in a Hugging Face folder.
INDEX, TORCH_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "ice_text.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
