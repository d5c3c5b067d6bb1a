"""What every test stands on: one thread, a fixed seed, the pool of ranks, and the `shows` and `gpu` markers."""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.pool import Pool, forget

pytest_plugins = ["tests.shows"]

# The first example of a property may import or compile something: no deadline. The same examples on every run.
settings.register_profile("thorough", deadline=None, derandomize=True)
settings.register_profile("suite", settings.get_profile("thorough"), max_examples=40)


def pytest_configure(config: pytest.Config) -> None:
    """Compute with one thread, as the ranks of the pool do, so that results can be compared bitwise.

    Processes that tests start do the same, and Inductor starts none: two workers of the suite fill two cores.
    """
    settings.load_profile("suite" if config.getoption("markexpr") else "thorough")
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    gc.disable()  # until all is imported and collected: little of that is garbage
    # torch writes out every graph for whoever listens to this logger, and pytest listens to all that do not propagate.
    logging.getLogger("torch.__trace").propagate = True


LONGEST = (
    *("test_lengths", "test_repetition", "test_stages", "passes/test_fold_layers", "test_auto_state"),
    *("test_huggingface", "integrations/test_peft_parameters", "integrations/test_trainer"),
    *("precision/test_float8_ranks", "test_padded_products", "test_activation_budget", "test_backend", "test_writes"),
    *("integrations/test_peft", "test_rooms", "test_retained_graphs", "test_qk_clip", "test_examples", "test_hsdp"),
    *("test_tensor_parallel", "test_loaded_rows", "precision/test_float8", "fused/test_dense"),
    *("precision/test_gathers", "passes/test_open_sizes", "test_ordering", "test_replay", "test_optimizer_state"),
    *("test_offload", "integrations/test_accelerate", "fused/test_sharded", "test_checkpointing", "test_budget"),
    *("test_lifetime", "optim/test_tensor_parallel_exchange", "test_groups", "test_breaks"),
    *("precision/test_frozen_linears", "test_failures", "test_doc_code", "test_plan_mesh", "test_shared_state"),
    *("checkpoint/test_resume", "checkpoint/test_tensor_parallel", "test_tensor_parallel_capture", "test_packed"),
    *("test_expert_parallel", "test_own_passes", "test_likeness", "test_muon", "test_memory", "test_fuzz"),
    *("test_loss", "test_module", "passes/test_recognize_masks", "test_planning", "optim/test_state"),
)
"""Files that take more than ten seconds on two cores, those that take longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``--no-loadscope-reorder`` workers take files in this order: none is left with a long one at the end."""
    folder = Path(__file__).parent
    place = {folder / f"{name}.py": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish() -> None:
    """What was imported is no garbage: do not look at it again each time some is sought."""
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)  # compilers make many objects and little garbage
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests where there is no GPU."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Start each test with the same seed and nothing compiled."""
    forget()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """`ranks(2, fn, *args)` runs `fn` on two gloo ranks and returns their results; see `tests.pool`."""
    with Pool() as pool:
        yield pool
