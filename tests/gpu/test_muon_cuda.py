"""Muon on a GPU: the kernels compute what torch computes, a matrix gives the same bits in any company."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch

import fxshard
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.optim import elementwise, halves, symmetric
from fxshard.optim import muon_rule as rule
from fxshard.optim.coefficients import triples
from fxshard.optim.newton_schulz import choose, iterate, orthogonalize
from fxshard.optim.row_moments import row_factors_
from fxshard.optim.start import normalized, unscaled
from tests.gpu.waiting import no_waiting
from tests.optim.reference import check_steps, distance, orthogonalized

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not symmetric.available(CUDA):
        pytest.skip("the kernels are for Hopper")


# Numbers of tiles that are odd, even, fewer than and more than the processors of the device.
@pytest.mark.parametrize(("batch", "side", "depth"), [(1, 256, 256), (3, 384, 640), (2, 640, 1408), (40, 512, 512)])
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.shows("O13")
def test_kernels_equal_torch(batch: int, side: int, depth: int, tall: bool) -> None:
    x = (torch.randn(batch, side, depth, device=CUDA) / depth**0.5).bfloat16()
    x = x.mT.contiguous() if tall else x
    gram = symmetric.symmetric_product(x, x, tall=tall)
    assert torch.equal(gram, gram.mT)
    assert distance(gram, halves.symmetric_product(x, x, tall=tall)) < 3e-3
    z = symmetric.polynomial(gram, 3.4445, -4.775, 2.0315)
    assert distance(z, halves.polynomial(gram, 3.4445, -4.775, 2.0315)) < 3e-3
    assert distance(symmetric.symmetric_product(z, gram), z.double() @ gram.double()) < 3e-3
    assert distance(symmetric.product(z, x, tall=tall), halves.product(z, x, tall=tall)) < 3e-3


@pytest.mark.shows("O13")
@pytest.mark.parametrize("shape", [(512, 512), (256, 704), (704, 256), (300, 1000), (4, 256, 384)])
@pytest.mark.parametrize("form", ["plain", "symmetric", "gram", "auto"])
def test_forms_compute_the_named_polynomial(form: str, shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, device=CUDA)
    result = orthogonalize([matrix], form=form)[0]
    for one, given in zip(result.reshape(-1, *shape[-2:]), matrix.reshape(-1, *shape[-2:]), strict=True):
        assert distance(one, orthogonalized(given)) < 0.04


@pytest.mark.parametrize("shape", [(512, 512), (256, 704), (704, 256), (300, 1000), (64, 96)])
@pytest.mark.parametrize("form", ["plain", "auto"])
def test_a_matrix_does_not_see_its_neighbours(form: str, shape: tuple[int, int]) -> None:
    matrices = [torch.randn(shape, device=CUDA) for _ in range(7)] + [torch.randn(3, *shape, device=CUDA)]
    together = orthogonalize(matrices, form=form)
    for matrix, result in zip(matrices, together, strict=True):
        assert torch.equal(result, orthogonalize([matrix], form=form)[0])


def test_norms_are_those_of_what_is_rounded() -> None:
    matrices = [torch.randn(512, 768, device=CUDA) * 10.0**i for i in (-5, 0, 9)]
    batch, scale = unscaled(matrices, multiple=symmetric.TILE, kernels=True)
    assert torch.equal(batch, torch.stack(matrices).bfloat16())
    exact = torch.stack([1 / matrix.double().norm() for matrix in matrices])
    torch.testing.assert_close(scale.double(), exact, rtol=1e-6, atol=0)
    as_copies = unscaled([matrix.mT.contiguous().mT for matrix in matrices], multiple=symmetric.TILE, kernels=True)
    assert torch.equal(as_copies[0], batch) and torch.equal(as_copies[1], scale)


@pytest.mark.parametrize("shape", [(512, 512), (256, 768), (768, 256)])
@pytest.mark.parametrize("magnitude", [1e-5, 1.0, 1e16])
def test_scaling_products_is_as_good_as_dividing_first(shape: tuple[int, int], magnitude: float) -> None:
    how, tall = choose(shape, CUDA), shape[0] > shape[1]
    matrix = torch.randn(shape, device=CUDA) * magnitude
    exact = orthogonalized(matrix)
    new = orthogonalize([matrix])[0]
    old = iterate(how, (normalized([matrix]), None), triples("quintic", 5), tall=tall)[0]
    assert distance(new, exact) < 1.15 * distance(old, exact) + 1e-3
    assert distance(new, old) < 0.04


def test_a_norm_beyond_fp32_moves_nothing() -> None:
    for shape in [(512, 512), (256, 704), (704, 256)]:
        matrix = torch.randn(shape, device=CUDA)
        overflowing, other, zero = orthogonalize([matrix * 1e37, matrix, torch.zeros_like(matrix)])
        assert not overflowing.any() and not zero.any()
        assert torch.equal(other, orthogonalize([matrix])[0])
        assert torch.equal(orthogonalize([matrix * 2.0**40])[0], other)


def test_the_form_is_chosen_by_shape() -> None:
    assert choose((2048, 2048), CUDA) == ("symmetric", True)
    assert choose((2048, 5632), CUDA) == choose((8, 5632, 2048), CUDA) == ("gram", True)
    assert choose((64, 2048), CUDA) == ("plain", False)


def test_elementwise_kernels_equal_torch() -> None:
    shapes = [(300, 70), (70, 300), (5000,), (3, 64, 64)]
    grads = [torch.randn(shape, device=CUDA) for shape in shapes]
    momenta = [torch.randn(shape, device=CUDA) for shape in shapes]
    params = [torch.randn(shape, device=CUDA) for shape in shapes]
    mine, theirs = copy.deepcopy((momenta, params)), [[t.cpu() for t in tensors] for tensors in (momenta, params)]
    updates = rule.momentum_(grads, mine[0], 0.95, True)
    expected = rule.momentum_([grad.cpu() for grad in grads], theirs[0], 0.95, True)
    directions = [update.bfloat16() for update in updates]
    rule.apply_(mine[1], directions, 0.1, 0.2, [1.0, 2.0, 1.0, 3.0])
    rule.apply_(theirs[1], [direction.cpu() for direction in directions], 0.1, 0.2, [1.0, 2.0, 1.0, 3.0])
    for one, other in zip([*updates, *mine[0], *mine[1]], [*expected, *theirs[0], *theirs[1]], strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-6)
    batch = normalized([grads[3]])
    torch.testing.assert_close(batch.cpu(), normalized([grads[3].cpu()]), rtol=1e-2, atol=1e-6)
    assert rule.finite(grads).all()
    grads[2][4999] = float("nan")
    assert rule.finite(grads).tolist() == [True, True, False, True]


@pytest.mark.shows("O2")
def test_equals_torch_within_bf16_rounding() -> None:
    mine = [torch.nn.Parameter(torch.randn(shape, device=CUDA)) for shape in [(512, 512), (704, 256), (256, 704)]]
    theirs = copy.deepcopy(mine)
    ours = fxshard.Muon(lr=0.05, weight_decay=0.1).build([(f"{i}.weight", p) for i, p in enumerate(mine)])
    torchs = torch.optim.Muon(theirs, lr=0.05, weight_decay=0.1)
    check_steps(ours, torchs, mine, theirs)


# -- the host does not wait --------------------------------------------------------------------------------------------

DENSE = LlamaConfig(vocab=512, dim=256, layers=2, heads=4, hidden=704)
MIXTURE = LlamaConfig(vocab=512, dim=256, layers=2, heads=4, hidden=384, experts=4)
BF16 = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)


def sharded(config: LlamaConfig, nan: str = "raise", **options: object) -> fxshard.ShardedModule:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Llama(config)
    choice = fxshard.Muon(lr=1e-2, weight_decay=0.1, adamw=fxshard.AdamW(lr=1e-3), nan=nan)
    return fxshard.compile(model, optimizer=choice, precision=BF16, **options)  # type: ignore[arg-type]


def gradients(model: fxshard.ShardedModule, seed: int) -> None:
    x = torch.randint(0, 512, (2, 128), generator=torch.Generator().manual_seed(seed)).cuda()
    model(x, x).backward()


def everything(model: fxshard.ShardedModule) -> list[torch.Tensor]:
    """Parameters, momenta, moments and step counts, without asking the optimizer for them."""
    held = [value for state in model.optimizer.state.values() for _, value in sorted(state.items())]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *held)]


def unchanged(model: fxshard.ShardedModule, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(everything(model), before, strict=True))


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "experts"])
def test_a_step_synchronises_nowhere(config: LlamaConfig) -> None:
    """torch raises where the host would wait for the device: in the optimizer, and in the whole step."""
    model = sharded(config)
    x = torch.randint(0, 512, (2, 128), generator=torch.Generator().manual_seed(0)).cuda()

    def optimizer_step() -> None:
        model.optimizer.step()
        model.optimizer.zero_grad()

    for _ in range(3):
        model(x, x).backward()
        optimizer_step()
    model(x, x).backward()
    with no_waiting():
        optimizer_step()
        model(x, x).backward()
        optimizer_step()
    assert model.optimizer.skipped_steps == 0  # type: ignore[union-attr]


def test_tables_are_sent_once() -> None:
    grads, momenta = ([torch.randn(300, 70, device=CUDA) for _ in range(3)] for _ in range(2))
    rule.momentum_(grads, momenta, 0.95, False)
    before = elementwise._kept.cache_info()
    rule.momentum_(grads, momenta, 0.95, False)
    after = elementwise._kept.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 1)


@pytest.mark.parametrize("shape", [(512, 512), (3, 256, 704), (301, 1001), (64, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the kernels take one, torch the other
def test_kernels_write_what_they_are_allowed_to(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grads, start, params = ([torch.randn(shape, device=CUDA).to(dtype) for _ in range(2)] for _ in range(3))

    def step(refused: torch.Tensor | None) -> list[torch.Tensor]:
        momenta, values = copy.deepcopy((start, params))
        directions = orthogonalize(rule.momentum_(grads, momenta, 0.95, True, refused))
        rule.apply_(values, directions, 0.1, 0.2, [1.0, 2.0], refused)
        return [*momenta, *values]

    for mine, theirs in zip(step(torch.zeros((), device=CUDA)), step(None), strict=True):
        assert torch.equal(mine, theirs)
    grads[1].view(-1)[-1] = math.nan
    for mine, theirs in zip(step(torch.ones((), device=CUDA)), [*start, *params], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "experts"])
@pytest.mark.parametrize("nan", ["raise", "skip"])
@pytest.mark.parametrize("where", ["layers.1.attention.q.weight", "layers.0.mlp_norm.weight"])
def test_gradients_that_are_not_finite_change_nothing(config: LlamaConfig, nan: str, where: str) -> None:
    model = sharded(config, nan, lowering="eager")
    for step in range(2):
        gradients(model, step)
        model.optimizer.step()
        model.optimizer.zero_grad()
    before = everything(model)
    gradients(model, 2)
    dict(model.named_parameters())[where].grad.view(-1)[5] = math.nan  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model.optimizer.step()
    model.optimizer.zero_grad()
    assert unchanged(model, before)
    gradients(model, 3)
    said = rf"not finite in call 3 of step\(\): {where}"
    if nan == "raise":
        with pytest.raises(fxshard.StateError, match=said):
            model.optimizer.step()
        assert unchanged(model, before)
        model.optimizer.step()
    else:
        with pytest.warns(RuntimeWarning, match=said):
            model.optimizer.step()
    assert model.optimizer.skipped_steps == 1  # type: ignore[union-attr]
    after = everything(model)
    assert not unchanged(model, before) and all(bool(tensor.isfinite().all()) for tensor in after)


def test_a_skipped_step_leaves_no_trace() -> None:
    shapes = {"a.weight": (512, 512), "experts": (3, 256, 384), "a.bias": (300,)}
    start = {name: torch.randn(shape, device=CUDA) for name, shape in shapes.items()}
    results = []
    for bad in (False, True):
        params = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
        optimizer = fxshard.Muon(nan="skip", weight_decay=0.1).build(params.items())
        for step in range(5):
            if step == 2 and not bad:
                continue
            torch.manual_seed(step)
            for parameter in params.values():
                parameter.grad = torch.randn_like(parameter)
            if step == 2:
                params["a.bias"].grad[299] = math.inf  # type: ignore[index]
            with warnings.catch_warnings(record=True):
                optimizer.step()
        assert optimizer.skipped_steps == int(bad)
        results.append([*params.values(), *(value for p in params.values() for value in optimizer.state[p].values())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(512, 768), (1000, 300), (3, 256, 320)])
def test_row_factors_are_those_of_a_cpu(shape: tuple[int, ...]) -> None:
    """And a matrix has the same bits alone and among others; a refused step moves no second moment."""
    directions = [torch.randn(shape, device=CUDA).bfloat16() for _ in range(5)]
    starts = [torch.rand(*shape[:-1], 1, device=CUDA) for _ in range(5)]
    seconds = [start.clone() for start in starts]
    together = row_factors_([[d] for d in directions], seconds, [None] * 5, 0.9)
    for i, direction in enumerate(directions):
        second = starts[i].clone()
        ((alone,),) = row_factors_([[direction]], [second], [None], 0.9)
        assert torch.equal(alone, together[i][0]) and torch.equal(second, seconds[i])
        second = starts[i].cpu()
        ((wanted,),) = row_factors_([[direction.cpu()]], [second], [None], 0.9)
        torch.testing.assert_close(alone.cpu(), wanted, rtol=1e-5, atol=0)
        torch.testing.assert_close(seconds[i].cpu(), second, rtol=1e-5, atol=0)
    kept = [second.clone() for second in seconds]
    row_factors_([[d] for d in directions], seconds, [None] * 5, 0.9, torch.ones((), device=CUDA))
    assert all(torch.equal(now, before) for now, before in zip(seconds, kept, strict=True))


def test_normuon_trains_without_waiting() -> None:
    """A step beside the plain optimizer on the CPU: equal up to products in bf16; and the host waits for nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab=64, dim=256, layers=2, heads=4, hidden=768)
    plain = Llama(config)
    choice = fxshard.NorMuon(lr=2e-2, adamw=fxshard.AdamW(lr=1e-3))
    model = fxshard.shard(copy.deepcopy(plain).cuda(), optimizer=choice)
    reference = choice.build(plain)
    for step in range(3):
        torch.manual_seed(step)
        grads = {name: torch.randn_like(p) for name, p in plain.named_parameters()}
        for name, parameter in plain.named_parameters():
            parameter.grad = grads[name]
        for name, parameter in model.named_parameters():
            parameter.grad = grads[name].cuda()
        reference.step()
        if step < 2:
            model.optimizer.step()
        else:
            with no_waiting():
                model.optimizer.step()
        model.optimizer.zero_grad()
    found = model.full_state_dict()
    for name, parameter in plain.named_parameters():
        assert distance(found[name].cpu(), parameter.detach()) < 0.03, name
