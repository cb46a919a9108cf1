"""The device that a rank computes on."""

from __future__ import annotations

from lite_runner.backends import ascend_context
from lite_runner.config.ascend import AscendSettings
from lite_runner.config.cluster import placed
from lite_runner.config.schema import RunConfig
from lite_runner.distributed.membership import Member, device_of
from lite_runner.records import dataclass
from lite_runner.system import environment


@dataclass(frozen=True)
class RankDevice:
    """Device `device_id` of the kind `target`, "CPU" or "Ascend"."""

    target: str
    device_id: int
    meets_on: str  # where this process meets the other ranks: MindFormers computes in another

    def in_config(self, config: RunConfig) -> RunConfig:
        """`config` with this device and, on CPU, the rank's share of the machine's cores."""
        return placed(config, self.target, self.device_id)


def choose_device(config: RunConfig, member: Member) -> RankDevice:
    """The device of this process as `member`; chooses its Ascend settings, too.

    Call it before MindSpore is imported. Raises RunnerError: no such device, a broken rank table.
    """
    target = environment.resolve_device(config.context.device_target)
    device_id = config.context.device_id
    if target == "Ascend":
        device_id = device_of(member, device_id)
    ascend_context.choose(AscendSettings.of(config.context), target, tell=False)
    meets_on = "CPU" if config.backend == "mindformers" else target
    return RankDevice(target, device_id, meets_on)
