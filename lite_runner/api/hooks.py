"""What is told of each token while a call generates: a streamer, stop texts, copies of logits."""

from __future__ import annotations

from lite_runner.api.streamers import SequentialStream, Streamer
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.ranks import Ranks
from lite_runner.errors import ConfigError
from lite_runner.generation import Completion, OnLogits
from lite_runner.plan.job import Job
from lite_runner.records import dataclass
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.text.transcript import Transcript


@dataclass(frozen=True)
class Hooks:
    """Those that a caller gave."""

    streamer: Streamer | None = None
    on_logits: OnLogits | None = None

    def check(self, generation: GenerationConfig, ranks: Ranks) -> None:
        """Raises ConfigError for options that a hook cannot follow."""
        several = max(generation.num_beams, generation.num_return_sequences) > 1
        if self.streamer is not None and several:
            raise ConfigError(
                "streamer: not with num_beams or num_return_sequences above 1: their tokens do"
                " not come one after another",
                "leave the streamer out",
            )
        if self.on_logits is None:
            return
        for name, value in ("num_beams", generation.num_beams), ("data_parallel", ranks.data):
            if value > 1:
                raise ConfigError(f"output_scores and output_logits: not with {name} above 1")


class TokenHooks:
    """Takes every token of a job, for its stop texts and a streamer."""

    def __init__(self, job: Job, tokenizer: Tokenizer | None, streamer: Streamer | None) -> None:
        self._first, self._stop, self._tokenizer = job.first_index, job.generation.stop, tokenizer
        self._transcripts: dict[tuple[int, int], Transcript] = {}
        prompts = [list(ids) for ids in job.tokens]
        self._turn = SequentialStream(streamer, prompts) if streamer is not None else None

    def on_token(self, prompt: int, part: int, token: int) -> bool:
        """True where a stop text is complete."""
        if self._turn is not None:
            self._turn.on_token(prompt - self._first, token)
        if not self._stop or self._tokenizer is None:
            return False
        transcript = self._transcripts.setdefault(
            (prompt, part), Transcript(self._tokenizer, self._stop)
        )
        transcript.put(token)
        return transcript.stopped

    def on_finish(self, completion: Completion) -> None:
        """No token of this sequence follows."""
        if self._turn is not None:
            self._turn.on_finish(completion.prompt_index - self._first)

    def close(self) -> None:
        """The call is over, be it by an error."""
        if self._turn is not None:
            self._turn.close()
