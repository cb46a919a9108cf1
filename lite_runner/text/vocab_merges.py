"""vocab.json and merges.txt: the original format of GPT-2's and Qwen2's tokenizers."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from lite_runner.errors import ArtifactError
from lite_runner.text.gguf import PRE_TOKENIZERS
from lite_runner.text.tokenizer import SpecialTokens

MERGES = "merges.txt"
_END = "<|endoftext|>"
# Chat tokens, which Qwen2's vocab.json lacks.
_QWEN2_ADDED = (_END, "<|im_start|>", "<|im_end|>")


def read_vocab_and_merges(
    vocab: Path, is_qwen2: bool
) -> tuple[tokenizers.Tokenizer, SpecialTokens]:
    """The byte-level BPE of a vocab.json with the merges.txt next to it, and its special tokens.

    Raises ArtifactError if either is missing or broken.
    """
    merges = vocab.parent / MERGES
    if not merges.is_file():
        raise ArtifactError(f"{vocab}: no {MERGES} beside it", "a vocab.json needs its merges")
    try:
        backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # not JSON, a merge of unknown tokens, ...
        raise ArtifactError(f"{vocab}: not a vocabulary with merges: {error}") from error
    if is_qwen2:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS["qwen2" if is_qwen2 else "gpt-2"]()
    backend.decoder = decoders.ByteLevel()
    added = _QWEN2_ADDED if is_qwen2 else (_END,)
    backend.add_special_tokens([AddedToken(one, normalized=False, special=True) for one in added])
    bos = None if is_qwen2 else _END
    return backend, SpecialTokens(bos=bos, eos=(_END,), pad=_END, unk=_END)
