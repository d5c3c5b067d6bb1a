"""How a step keeps optimizer state, in a line: for ``model.report`` and ``fxshard inspect``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxshard.plan.buckets import BucketPlan
from fxshard.plan.hardware import Hardware
from fxshard.plan.kept_state import kept_state
from fxshard.schedule.schedule import size


def state_line(buckets: Sequence[BucketPlan], hardware: Hardware) -> str:
    """Format and place, what they free on the device, and what they cost."""
    kept = kept_state(buckets, hardware)
    plain = [replace(bucket, state="fp32", offload="none") for bucket in kept.trained]
    freed = sum(bucket.moment_bytes for bucket in plain) - kept.device_bytes
    if not freed:
        return f"optimizer state: {kept}, {size(kept.device_bytes)}"
    held = f"{size(kept.device_bytes)} on the device" + f", {size(kept.host_bytes)} on the host" * bool(kept.on_host)
    cost = f", for updates that take {kept.seconds * 1e3:.1f} ms longer" if kept.on_host else ""
    return f"optimizer state: {kept}: {held}; it frees {size(freed)} of the device{cost}"
