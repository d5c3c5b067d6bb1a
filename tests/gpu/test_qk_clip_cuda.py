"""QK-clip on a GPU: logits of bf16 in fp32, in captured programs, without waiting for the device."""

from __future__ import annotations

import pytest
import torch

import fxshard
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.kernels.logits_op import largest_logits
from fxshard.kernels.window_op import UNLIMITED, document_bounds, visible
from tests.gpu.waiting import no_waiting

pytestmark = pytest.mark.gpu
BF16 = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)


@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize("window", [UNLIMITED, 100])
def test_logits_are_not_rounded_to_bf16(shared: int, window: int) -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(2, 500, n, 64, device="cuda").bfloat16().transpose(1, 2) for n in (4, shared))
    documents = (torch.rand(2, 500, device="cuda") < 0.01).cumsum(-1)
    bounds = document_bounds(documents) if window < 500 else None
    seen = visible(500, window, 0, bounds, query.device)
    exact = query.double() @ key.double().repeat_interleave(4 // shared, 1).mT * 0.125
    exact = exact.masked_fill(~seen, -torch.inf).amax((0, 2, 3)).float()
    for at_a_time in (2**26, 10**6):
        found = largest_logits(query, key, None, bounds, window, 0, 0.125, at_a_time)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


def trained(cuda_graphs: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        plain = Llama(LlamaConfig(vocab=512, dim=256, layers=2, heads=4, kv_heads=2, hidden=704))
    plain.embed.requires_grad_(False)  # that gradient is added up by atomic additions
    choice = fxshard.Muon(qk_clip=0.3)
    model = fxshard.compile(plain, optimizer=choice, precision=BF16, cuda_graphs=cuda_graphs, lowering="eager")
    for number in range(5):
        x = torch.randint(0, 512, (2, 128), generator=torch.Generator().manual_seed(number)).cuda()
        model(x, x).backward()
        if number < 3:
            model.optimizer.step()
        else:
            with no_waiting():
                model.optimizer.step()
        model.optimizer.zero_grad()
    return model.full_state_dict()


def test_captured_programs_measure_as_others_do() -> None:
    replayed, plain = trained(True), trained(False)
    assert all(torch.equal(replayed[name], plain[name]) for name in plain)
