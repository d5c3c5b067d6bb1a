"""insert_all_reduce: one sum over replicas per reduced shard, in the order of the reductions, before the finish."""

from dataclasses import replace

from fxshard.passes.insert_all_reduce import insert_all_reduce
from fxshard.passes.insert_reduce_scatter import insert_reduce_scatter
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.domain import Domain
from fxshard.schedule.events import Kind, Phase, events
from fxshard.schedule.params import ParamRef
from tests.passes.graphs import Draft, aten, bucket, context


def hybrid(index: int, replicas: int = 4, ranks: int = 2) -> BucketPlan:
    domain = Domain(shards=2, replicas=replicas, divisor=2 * replicas, device="cuda")
    return replace(bucket(index, (4, 4), ranks=ranks), domain=domain)


def runtime_nodes(*buckets: BucketPlan) -> list[str]:
    """Gradients come in the order b2, b1, b0."""
    draft = Draft()
    value, outputs = draft.input("t", 4, 4), []
    for _ in buckets:
        value = draft.call(aten.mm.default, value, value)
        outputs.append(value)
    module = draft.output(*outputs, grads=[ParamRef(plan.index, 0) for plan in reversed(buckets)])
    frame = context(*buckets, phase=Phase.BACKWARD)
    module = insert_all_reduce(insert_reduce_scatter(module, frame), frame)
    module.graph.lint()
    found = [event for _, event in events(module.graph)]
    for event in found:
        outer = event.kind is Kind.ALL_REDUCE
        plan = buckets[event.bucket_index]
        assert event.stream == "replicas" if outer else event.stream != "replicas"
        assert event.bytes == (plan.grad_bytes // 2 if outer else plan.grad_bytes)
        assert event.group == ("cuda×4 replicas" if outer else f"cuda×{plan.reducing_ranks}")
    return [f"{event.kind} {event.bucket}" for event in found if event.kind is not Kind.GRAD]


def test_between_its_reduction_and_the_next_one() -> None:
    found = runtime_nodes(*(hybrid(i) for i in range(3)))
    assert found == [
        "reduce b2",
        "all_reduce b2",
        "reduce b1",
        "finish b2",
        "all_reduce b1",
        "reduce b0",
        "finish b1",
        "all_reduce b0",
        "finish b0",
    ]


def test_what_is_not_sharded_is_reduced_once_over_everyone() -> None:
    assert runtime_nodes(hybrid(0, ranks=1)) == ["reduce b0", "finish b0"]


def test_nothing_without_replicas() -> None:
    plan = replace(hybrid(0), domain=Domain(shards=2, divisor=2, device="cuda"))
    assert runtime_nodes(plan) == ["reduce b0", "finish b0"]
