"""The plan of a run on the real MindFormers: what it cannot do, and what it takes."""

from __future__ import annotations

from dataclasses import replace

from lite_runner import progress
from lite_runner.backends.mindformers.releases import python_for
from lite_runner.config.options import CompareOptions, MindFormersOptions
from lite_runner.errors import ConfigError
from lite_runner.plan.describe import described
from lite_runner.plan.job import Job
from lite_runner.plan.mindformers_memory import memory_of
from lite_runner.plan.mindformers_ranks import check_ranks
from lite_runner.plan.mindformers_run import FILE_NAME, MindFormersRun
from lite_runner.plan.other_backend import other_config
from lite_runner.plan.plan import Plan
from lite_runner.plan.preflight import check_machine


def plan_mindformers(plan: Plan, share: Job) -> Plan:
    """The plan with memory and dtype; with dry_run=true also the lines to print, and the yaml.

    `share`: the prompts. Raises ConfigError for what MindFormers cannot do, and EnvironmentFault
    where there is no MindFormers.
    """
    config, files = plan.config, plan.model
    assert isinstance(config, MindFormersOptions)
    if files.quantization.rounds:
        raise ConfigError(
            "backend=mindformers: MindFormers cannot compute with quantized weights"
            f" (quant={files.quantization})",
            "quant=none",
        )
    check_ranks(config, files.model, plan.device)
    run = MindFormersRun.of(config, files.model, share, plan.device)
    need = memory_of(run, plan.ranks.tensor)
    plan = replace(
        plan,
        why=f"MindFormers {run.release.name}'s, on mindspore {run.release.mindspore}",
        dtype=run.sizes.dtype,
        memory=need,
    )
    if config.dry_run:
        plan = described(replace(plan, job=share))
        text = run.yaml(config.checkpoint_source)
        return replace(plan, table=(*plan.table, f"{FILE_NAME}:", text.rstrip()))
    python_for(run.release, plan.device)
    if plan.ranks.size > 1:
        check_machine(config, need)
    _note_hidden(run, share)
    return plan


def check_comparison(plan: Plan, share: Job) -> None:
    """Whether MindFormers can do what another backend does here first. Raises as
    `plan_mindformers`."""
    assert isinstance(plan.config, CompareOptions)
    plan_mindformers(replace(plan, config=other_config(plan.config)), share)


def _note_hidden(run: MindFormersRun, job: Job) -> None:
    """Say which prompts hold tokens that MindFormers' attention does not see."""
    hidden = run.release.hidden_tokens(run.model, use_past=run.sizes.use_past)
    for token in hidden:
        found = [str(place) for place, tokens in enumerate(job.tokens) if token in tokens]
        if found:
            progress.note(
                f"MindFormers hides token {token} from attention, which prompt"
                f"{'s' if len(found) > 1 else ''} {', '.join(found[:5])} has: its texts may differ"
            )
