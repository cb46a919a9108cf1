"""The results of replicas, gathered and merged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, field, replace

from lite_runner.config.ranks import Ranks
from lite_runner.config.schema import Config
from lite_runner.config.seeds import samples
from lite_runner.generation import GenerationTiming
from lite_runner.output.report import AdapterReport, AdapterUse, RowResult, Timing, peak_rss_mib
from lite_runner.records import dataclass


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """The results of one replica. Seconds of the steps exclude compiling."""

    rows: Sequence[RowResult] = ()  # in the order of the prompts
    engine: str = ""
    generation: GenerationTiming = field(default_factory=GenerationTiming)
    load_s: float = 0.0
    compile_s: float = 0.0
    prepare_s: float = 0.0  # the part of compile_s before the first token
    adapters: AdapterReport | None = None
    peak_rss_mib: float = field(default_factory=peak_rss_mib)  # of all ranks of the replica
    interrupted: bool = False  # by Ctrl-C

    def timing(self) -> Timing:
        """Times and rates of these rows."""
        measured, first = self.generation, self.generation.time_to_first_token_s
        return Timing(
            load_s=self.load_s,
            compile_s=self.compile_s,
            prefill_s=measured.prefill_s,
            decode_s=measured.decode_s,
            prefill_tok_s=measured.prefill_tok_s,
            decode_tok_s=measured.decode_tok_s,
            time_to_first_token_s=None if first is None else self.load_s + self.prepare_s + first,
        )

    def to_bytes(self) -> bytes:
        """ASCII JSON, which carries any text."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RankResult:
        raw = json.loads(data)
        rows = [RowResult(**row) for row in raw.pop("rows")]
        generation = GenerationTiming(**raw.pop("generation"))
        adapters = raw.pop("adapters")
        if adapters is not None:
            used = {name: AdapterUse(**use) for name, use in adapters.pop("used").items()}
            adapters = AdapterReport(used=used, **adapters)
        return cls(rows=rows, generation=generation, adapters=adapters, **raw)


def wait_for_all(ranks: Ranks) -> None:
    """A barrier, so that waiting for other ranks is not measured as work."""
    if ranks.size > 1:
        from lite_runner.backends import collectives

        collectives.gather(b"")


def seed_of_all(config: Config, ranks: Ranks) -> Config:
    """The config with rank 0's seed, which may have been drawn."""
    if ranks.size == 1 or not samples(config):
        return config
    from lite_runner.backends import collectives

    seeds = collectives.gather(json.dumps(config.seed).encode())
    return replace(config, seed=json.loads(seeds[0]))


def gather(mine: RankResult, ranks: Ranks) -> RankResult:
    """All-gather the results and merge them, on every rank."""
    if ranks.size == 1:
        return mine
    from lite_runner.backends import collectives

    every = [RankResult.from_bytes(data) for data in collectives.gather(mine.to_bytes())]
    return merge(every, ranks.tensor)


def merge(results: Sequence[RankResult], ranks_per_replica: int) -> RankResult:
    """The results of all ranks as one. The ranks of a replica have the same rows; replicas run
    concurrently. The time to the first token is the first replica's."""
    replicas = results[::ranks_per_replica]
    first = replicas[0]
    return RankResult(
        rows=[row for one in replicas for row in one.rows],
        engine=first.engine,
        generation=GenerationTiming(
            prefill_s=max(one.generation.prefill_s for one in replicas),
            decode_s=max(one.generation.decode_s for one in replicas),
            time_to_first_token_s=first.generation.time_to_first_token_s,
            prefill_tokens=sum(one.generation.prefill_tokens for one in replicas),
            decode_tokens=sum(one.generation.decode_tokens for one in replicas),
        ),
        load_s=max(one.load_s for one in replicas),
        compile_s=max(one.compile_s for one in replicas),
        prepare_s=max(one.prepare_s for one in replicas),
        adapters=_adapters([one.adapters for one in replicas], ranks_per_replica),
        peak_rss_mib=round(sum(one.peak_rss_mib for one in results), 1),
        interrupted=any(one.interrupted for one in replicas),
    )


def _adapters(
    reports: Sequence[AdapterReport | None], ranks_per_replica: int
) -> AdapterReport | None:
    """The merged adapter report; a replica without prompts has none."""
    present = [report for report in reports if report is not None]
    if not present:
        return None
    used: dict[str, AdapterUse] = {}
    for report in present:
        for name, use in report.used.items():
            before = used.get(name, AdapterUse(use.modules))
            used[name] = AdapterUse(
                use.modules,
                before.prompts + use.prompts,
                before.prompt_tokens + use.prompt_tokens,
                before.generated_tokens + use.generated_tokens,
                before.seconds + use.seconds,
            )
    return AdapterReport(
        places=max(report.places for report in present),
        pool_bytes=sum(report.pool_bytes for report in present) * ranks_per_replica,
        loads=sum(report.loads for report in present),
        used=used,
    )
