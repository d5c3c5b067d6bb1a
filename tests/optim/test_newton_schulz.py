"""Newton–Schulz: every form computes the polynomial it names, of every matrix by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard._torch.errors import ConfigError
from fxshard.optim import halves
from fxshard.optim.coefficients import COEFFICIENTS, triples
from fxshard.optim.newton_schulz import choose, explain, orthogonalize, stretches
from fxshard.optim.start import unscaled
from tests.optim.reference import distance, orthogonalized

FORMS = ("plain", "symmetric", "gram")
SHAPES = [(48, 48), (32, 88), (88, 32), (140, 70)]
# bf16 keeps 8 bits, and five steps amplify what the first ones round. The worst seen in 16 random matrices:
# 0.021 plain, 0.018 symmetric, and for the gram form 0.025 with quintic coefficients, 0.043 with Polar Express.
ROUNDING = {"plain": 0.03, "symmetric": 0.03, "gram": 0.06}


def spectrum(name: str, n: int = 48, m: int = 96) -> torch.Tensor:
    """A matrix whose singular values are far from those of noise."""
    values = {
        "geometric": torch.logspace(0, -3, n),
        "harmonic": 1 / torch.arange(1, n + 1),
        "spike": torch.cat([torch.ones(1), 0.05 * torch.rand(n - 1)]),
    }[name]
    u, _ = torch.linalg.qr(torch.randn(n, n))
    v, _ = torch.linalg.qr(torch.randn(m, n))
    return u @ torch.diag(values) @ v.T


@pytest.mark.shows("O13")
@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("form", FORMS)
def test_forms_compute_the_named_polynomial(form: str, coefficients: str) -> None:
    matrices = [torch.randn(shape) for shape in SHAPES]
    for matrix, result in zip(matrices, orthogonalize(matrices, coefficients=coefficients, form=form), strict=True):
        assert result.dtype == torch.bfloat16 and result.shape == matrix.shape
        assert distance(result, orthogonalized(matrix, coefficients)) < ROUNDING[form]


@pytest.mark.shows("O13")
@pytest.mark.parametrize("coefficients", ["quintic", "polar_express"])
@pytest.mark.parametrize("name", ["geometric", "harmonic", "spike"])
def test_forms_are_as_good_as_the_plain_one_on_hard_spectra(name: str, coefficients: str) -> None:
    """Small singular values are where bf16 hurts every form; none may hurt much more than the plain one."""
    matrix = spectrum(name)
    exact = orthogonalized(matrix, coefficients)
    errors = {form: distance(orthogonalize([matrix], form=form, coefficients=coefficients)[0], exact) for form in FORMS}
    assert errors["symmetric"] < 1.3 * errors["plain"] + 0.01
    assert errors["gram"] < 2.5 * errors["plain"] + 0.04


@given(
    sizes=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24)), min_size=1, max_size=5),
    form=st.sampled_from(FORMS),
    limit=st.sampled_from([1, 2000, 2**30]),
)
@settings(max_examples=25)
def test_a_matrix_does_not_see_its_neighbours(sizes: list[tuple[int, int]], form: str, limit: int) -> None:
    matrices = [torch.randn(shape) for shape in sizes] + [torch.randn(3, *sizes[0]), torch.randn(sizes[0])]
    together = orthogonalize(matrices, form=form, max_batch_bytes=limit)
    for matrix, result in zip(matrices, together, strict=True):
        assert torch.equal(result, orthogonalize([matrix], form=form)[0])


@pytest.mark.shows("O10")
@pytest.mark.parametrize("form", FORMS)
def test_experts_are_orthogonalised_one_by_one(form: str) -> None:
    experts = torch.randn(5, 40, 24)
    together = orthogonalize([experts], form=form)[0]
    for expert, result in zip(experts, together, strict=True):
        assert torch.equal(result, orthogonalize([expert], form=form)[0])
        assert distance(result, orthogonalized(expert)) < ROUNDING[form]


def test_zero_stays_zero_and_scale_does_not_matter() -> None:
    matrix = torch.randn(16, 24)
    zero, one, tiny, huge = orthogonalize([torch.zeros(16, 24), matrix, matrix * 2.0**-18, matrix * 2.0**40])
    assert not zero.any()
    assert torch.equal(one, tiny) and torch.equal(one, huge)


def test_padding_enters_nothing() -> None:
    matrix = torch.randn(2, 20, 30)
    padded, scale = unscaled([matrix], multiple=16)
    assert padded.shape == (2, 32, 32)
    assert torch.equal(padded[:, :20, :30], matrix.bfloat16()) and torch.equal(scale, unscaled([matrix])[1])
    assert not padded[:, 20:].any() and not padded[:, :, 30:].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("exponent", [-16, 0, 16])
def test_magnitudes(form: str, exponent: int) -> None:
    """Products of unscaled values leave the range of fp32 nowhere between the smallest norm and the largest."""
    matrix = torch.randn(24, 40) * torch.logspace(0, -6, 40) * 10.0**exponent
    result = orthogonalize([matrix], form=form)[0]
    assert distance(result, orthogonalized(matrix)) < 2 * ROUNDING[form]
    assert not orthogonalize([matrix * 1e-20 * 10.0**-exponent], form=form)[0].abs().gt(1e-9).any()


@pytest.mark.parametrize("form", FORMS)
def test_a_norm_beyond_fp32_moves_nothing(form: str) -> None:
    matrix = torch.randn(24, 40)
    overflowing, other = orthogonalize([matrix * 1e37, matrix], form=form)
    assert not overflowing.any()
    assert torch.equal(other, orthogonalize([matrix], form=form)[0])


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("side", [5, 256, 270])
def test_half_products_are_whole_products(side: int, tall: bool) -> None:
    x = (torch.randn(2, side, 40) / 7).bfloat16()
    given_ = x.mT.contiguous() if tall else x
    gram = halves.symmetric_product(given_, given_, tall=tall)
    assert torch.equal(gram, gram.mT)
    torch.testing.assert_close(gram.float(), x.float() @ x.float().mT, rtol=1e-2, atol=1e-2)
    z = halves.polynomial(gram, 3.0, -2.0, 0.5)
    wide = gram.float()
    torch.testing.assert_close(z.float(), 3.0 * torch.eye(side) - 2 * wide + 0.5 * wide @ wide, rtol=2e-2, atol=2e-2)
    moved = halves.product(z, given_, tall=tall)
    expected = z.float() @ x.float()
    torch.testing.assert_close(moved.float(), expected.mT if tall else expected, rtol=3e-2, atol=3e-2)


def test_the_gram_form_starts_afresh_before_its_errors_grow() -> None:
    lengths = {name: [len(part) for part in stretches(triples(name, 5))] for name in COEFFICIENTS}
    assert lengths["quintic"] == [3, 2]
    assert lengths["polar_express"] == [2, 2, 1]
    assert lengths["cubic"] == [5]
    assert [triple for part in stretches(triples("polar_express", 7)) for triple in part] == list(
        triples("polar_express", 7)
    )


def test_the_choice_can_be_asked_for() -> None:
    cpu = torch.device("cpu")
    assert choose((2048, 5632), cpu) == ("plain", False)
    assert choose((2048, 5632), cpu, "gram") == ("gram", False)
    assert "torch.mm" in explain((64, 64), cpu)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match=r"unknown coefficients 'septic'; known sets: quintic"):
        orthogonalize([torch.randn(4, 4)], coefficients="septic")
    with pytest.raises(ConfigError, match="steps=0"):
        orthogonalize([torch.randn(4, 4)], steps=0)
    with pytest.raises(ConfigError, match=r"shape \[4\] is neither a matrix"):
        orthogonalize([torch.randn(4)])
    assert orthogonalize([]) == []
