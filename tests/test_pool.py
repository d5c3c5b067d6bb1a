"""The pool of ranks: results in order, and failures that are reported and leave nothing behind."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankError, RankTimeout


def place(tag: str = "") -> tuple[int, int, str]:
    return dist.get_rank(), dist.get_world_size(), tag


def total() -> torch.Tensor:
    x = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    return x


def process() -> int:
    return os.getpid()


def draw() -> float:
    return torch.rand(()).item()


def fail(rank: int, then_wait: str = "") -> None:
    if dist.get_rank() == rank:
        raise KeyError(f"no such thing on {rank}")
    if then_wait == "reduce":
        dist.all_reduce(torch.ones(1))
    elif then_wait == "sleep":
        time.sleep(600)


def sleep(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def wait_for_missing() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


def die(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def fail_without_group() -> None:
    """As where a peer dies before this rank has found it."""
    dist.destroy_process_group()
    raise RuntimeError("connection closed by peer")


def unpicklable() -> object:
    return lambda: None


@pytest.mark.parametrize("n", [1, 4])
def test_results_come_by_rank_from_one_group(ranks: Pool, n: int) -> None:
    assert ranks(n, place, tag="here") == [(rank, n, "here") for rank in range(n)]
    for result in ranks(n, total):
        assert torch.equal(result, torch.full((3,), n * (n + 1) / 2))


def test_every_call_starts_from_the_same_seed(ranks: Pool) -> None:
    assert len({*ranks(2, draw), *ranks(2, draw)}) == 1


@pytest.mark.parametrize("n", [0, 5])
def test_number_of_ranks_is_checked(ranks: Pool, n: int) -> None:
    with pytest.raises(ValueError, match=f"{n} ranks"):
        ranks(n, place)


def test_exception_names_its_rank(ranks: Pool) -> None:
    before = ranks(3, process)
    with pytest.raises(RankError, match="no such thing on 1") as caught:
        ranks(3, fail, 1)
    assert caught.value.types == {1: "KeyError"}
    assert "in fail" in caught.value.errors[1]
    assert ranks(3, process) == before


def test_failure_frees_ranks_in_a_collective(ranks: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(2, fail, 0, then_wait="reduce", grace=60)
    assert caught.value.types[0] == "KeyError"
    assert 1 in caught.value.errors
    assert time.monotonic() - start < 30
    assert ranks(2, place) == [(0, 2, ""), (1, 2, "")]


def test_failure_ends_ranks_that_go_on(ranks: Pool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, fail, 1, then_wait="sleep", grace=1)
    assert caught.value.types == {0: "Unfinished", 1: "KeyError"}
    assert "in fail" in caught.value.errors[0]
    assert ranks(2, place) == [(0, 2, ""), (1, 2, "")]


def test_collective_without_its_peer_ends(ranks: Pool) -> None:
    with pytest.raises(RankTimeout, match="ranks 0 did not finish in 2 s") as caught:
        ranks(2, wait_for_missing, timeout=2)
    assert "all_reduce" in caught.value.stacks[0]
    assert ranks(2, place) == [(0, 2, ""), (1, 2, "")]


def test_interrupted_call_leaves_nothing_behind(ranks: Pool) -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    ranks(2, place)
    before = signal.signal(signal.SIGUSR2, interrupt)
    timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            ranks(2, sleep, 0)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    assert ranks(2, place) == [(0, 2, ""), (1, 2, "")]


def test_dead_worker_is_reported_and_replaced(ranks: Pool) -> None:
    with pytest.raises(RankError, match="exit code 3") as caught:
        ranks(2, die, 1)
    assert caught.value.types[1] == "WorkerDied"
    assert ranks(2, place) == [(0, 2, ""), (1, 2, "")]


def test_worker_that_could_not_join_is_replaced(ranks: Pool) -> None:
    before = ranks(2, process)
    with pytest.raises(RankError, match="connection closed by peer"):
        ranks(1, fail_without_group)
    after = ranks(2, process)
    assert before[0] not in after and before[1] in after


def test_result_that_cannot_travel_is_a_failure(ranks: Pool) -> None:
    with pytest.raises(RankError, match="unpicklable"):
        ranks(1, unpicklable)
