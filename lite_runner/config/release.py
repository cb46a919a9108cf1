"""What the releases of MindFormers can read of a checkpoint: it is not the same in all of them.

Told by their sources, 1.0.2 to 1.7: a Llama's head can be tied to its embedding from 1.3 on
(LlamaConfig.tie_word_embeddings), and before that a head that is not in the file keeps random
numbers; bloom and gpt2 always tie it. Folders of adapters (SLoRA) are read from 1.3 on, by the name
lora_a; LoRA, whose parameters are loaded with the checkpoint, calls them mindpet_delta_lora_a.
"""

from __future__ import annotations

import re

from lite_runner.architectures import can_untie_head
from lite_runner.architectures.spec import Decoder
from lite_runner.records import dataclass

_TIES_AND_SERVES = (1, 3)
_SLORA, _LORA = "lora_", "mindpet_delta_lora_"


@dataclass(frozen=True)
class Release:
    """A release of MindFormers; without a number whatever is written is to be read by all."""

    number: tuple[int, int] | None = None

    @classmethod
    def of(cls, text: str | float | None) -> Release:
        """The release that a text or number names: 1.0, 1.3.2. Raises ValueError."""
        if text is None:
            return cls()
        match = re.fullmatch(r"(\d{1,3})\.(\d{1,3})(\.\w{1,20})*", str(text))
        if match is None or int(match[1]) < 1:
            raise ValueError(
                f"got {text}, expected a release such as 1.0 or 1.3.2, or null for all"
            )
        return cls((int(match[1]), int(match[2])))

    def needs_head(self, model: Decoder) -> bool:
        """Whether a head that is tied to the embedding must be in the file as well."""
        tied = model.tie_word_embeddings and can_untie_head(model)
        return tied and (self.number is None or self.number < _TIES_AND_SERVES)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """What stands before a and b in the names of an adapter's parameters."""
        if self.number is None:
            return (_SLORA, _LORA)
        return (_LORA,) if self.number < _TIES_AND_SERVES else (_SLORA,)
