"""What every rank imports, imported once: the workers of `tests.pool` are forked from a process that has done this."""

import contextlib
import gc
import importlib
import os

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no further processes, which would outlive a kill

import torch._dynamo
import torch._functorch.partitioners
import torch._inductor.compile_fx
import torch.distributed.fsdp
import torch.distributed.tensor

import fxshard.frontend.api
import fxshard.frontend.planning
import tests.training

__all__ = ["fxshard", "tests", "torch"]

if "PYTEST_XDIST_WORKER" in os.environ:  # many tests are to come, and some of them take models from there
    with contextlib.suppress(ImportError):
        for name in ("transformers.models.llama.modeling_llama", "transformers.trainer"):
            importlib.import_module(name)

gc.collect()
gc.freeze()  # none of this is garbage: do not look at it again
gc.set_threshold(20_000, 50, 50)  # compilers make many objects and little garbage
