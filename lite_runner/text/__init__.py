"""Text: tokenizers, chat templates and streaming detokenization."""

from lite_runner.text.loading import load_tokenizer
from lite_runner.text.streaming import StreamDecoder
from lite_runner.text.tokenizer import SpecialTokens, Tokenizer, byte_tokenizer

__all__ = ["SpecialTokens", "StreamDecoder", "Tokenizer", "byte_tokenizer", "load_tokenizer"]
