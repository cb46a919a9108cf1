"""Event files, as those of TensorBoard."""

from __future__ import annotations

from lite_runner.training.tensorboard import event, header, record
from lite_runner.training.trainer import StepMetrics

# Step 300 with a loss of 1.5.
EVENT = "0900002040fc54d94110ac022a130a110a0a6c6f73732f747261696e150000c03f"


def test_a_record_is_that_of_tensorboard() -> None:
    """TensorBoard 2.21 serialized an event, and wrote the record."""
    assert record(bytes.fromhex(EVENT)).hex() == f"2100000000000000017becf6{EVENT}ac96bc3f"


def test_steps_are_records() -> None:
    found = event(StepMetrics(300, 1.5, 0.25, 0.125, 40, 2.0))
    assert header()[8 + 4 + 9 : -4] == b"\x1a\x0dbrain.Event:2"
    assert found[8 + 4 + 9 :].startswith(bytes.fromhex(EVENT)[9:12])
    assert bytes.fromhex(EVENT)[14:] in found  # the loss, among others
    assert b"loss/eval" not in found
    assert b"grad_norm\x15\x00\x00\x80\x7f" in event(StepMetrics(1, 1.5, 1e39, 0.125, 40, 2.0))
