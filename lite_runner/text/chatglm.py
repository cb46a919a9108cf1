"""The tokenizer of ChatGLM2 and ChatGLM3: special tokens behind the pieces of a sentencepiece
model."""

from __future__ import annotations

from dataclasses import replace

import tokenizers
from tokenizers import AddedToken, processors

from lite_runner.errors import ArtifactError
from lite_runner.text.chatglm_chat import PREFIX, ROLES, ChatForm, role_tag
from lite_runner.text.tokenizer import SpecialTokens

_ADDED = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *map(role_tag, ROLES))
DEFAULTS = SpecialTokens(eos=("</s>",), pad="<unk>", unk="<unk>")


def add_tokens(backend: tokenizers.Tokenizer, source: str) -> None:
    """Add the special tokens, and the two that every prompt begins with.

    Raises ArtifactError naming `source` where other tokens have their ids.
    """
    first = backend.get_vocab_size(with_added_tokens=False)
    backend.add_special_tokens([AddedToken(one, normalized=False, special=True) for one in _ADDED])
    for id, token in enumerate(_ADDED, first):
        if backend.token_to_id(token) != id:
            raise ArtifactError(
                f"{source}: {token} has the id {backend.token_to_id(token)}, expected {id} behind "
                f"the {first} pieces: not the tokenizer of a ChatGLM2 or ChatGLM3"
            )
    ids = [(token, backend.token_to_id(token)) for token in PREFIX]
    backend.post_processor = processors.TemplateProcessing(
        single=[*PREFIX, "$A"], special_tokens=ids
    )


def with_ends(special: SpecialTokens, form: ChatForm) -> SpecialTokens:
    """A ChatGLM3 also ends its turn by opening another's."""
    if form == "chatglm2":
        return special
    others = (role_tag("user"), role_tag("observation"))
    return replace(special, eos=(*special.eos, *(one for one in others if one not in special.eos)))
