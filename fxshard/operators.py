"""All operators of ours: for a process that is given graphs, and has not made them."""

import fxshard.fused.dense_op
import fxshard.fused.glu_op
import fxshard.fused.op
import fxshard.fused.padding
import fxshard.ops
import fxshard.precision.grouped_ops
import fxshard.precision.ops  # noqa: F401
