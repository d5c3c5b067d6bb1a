"""What Inductor's cache has from earlier, as far as we know."""

from pathlib import Path

import pytest
import torch
from torch._inductor import config

from fxshard import _compat
from fxshard.helpers.known import Known


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_structure_is_remembered_beside_the_cache(cache: Path) -> None:
    known = Known()
    assert "one" not in known and not list(cache.rglob("*"))
    known.add("one")
    known.add("one")
    assert "one" in known and "one" in Known()
    assert "other" not in known
    assert [path.parent.parent for path in cache.rglob("*") if path.is_file()] == [cache]


def test_another_cache_has_not_got_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Known().add("one")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "another"))
    assert "one" not in Known()


def test_nor_has_one_that_was_moved(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are part of what was compiled."""
    Known().add("one")
    cache.rename(tmp_path / "moved")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "moved"))
    assert "one" not in Known()


def test_other_products_are_other_code() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        Known().add("one")
        torch.set_float32_matmul_precision("high")
        assert "one" not in Known()
        torch.set_float32_matmul_precision("highest")
        assert "one" in Known()
    finally:
        torch.set_float32_matmul_precision(before)


def test_deterministic_algorithms_are_other_code() -> None:
    Known().add("one")
    before, filled = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(not before)
        assert "one" not in Known()
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = not filled
        assert "one" not in Known()
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled
    assert "one" in Known()


def test_products_whose_precision_was_set_by_its_new_name_are_other_code() -> None:
    """After which asking by the old name is an error."""
    before = torch.backends.cuda.matmul.fp32_precision
    Known().add("one")
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert "one" not in Known()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_another_default_dtype_is_other_code() -> None:
    """Inductor's cache goes by it, too."""
    before = torch.get_default_dtype()
    Known().add("one")
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert "one" not in Known()
    finally:
        torch.set_default_dtype(before)


def test_other_options_are_other_code() -> None:
    Known().add("one")
    with config.patch(max_autotune=not config.max_autotune):
        assert "one" not in Known()
        Known().add("one")
    assert "one" in Known()


def test_another_torch_is_another_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    Known().add("one")
    monkeypatch.setattr(torch, "__version__", "3.0")
    circumstances = _compat.compile_circumstances()
    assert circumstances is not None and circumstances["torch"] == "3.0" and "one" not in Known()


def test_lowerings_of_ones_own_are_unknown_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's cache does not know of them either: what others compile would be taken for ours."""
    from torch._inductor.lowering import lowerings

    def sine(x: object) -> object:
        return x

    monkeypatch.setitem(lowerings, torch.ops.aten.sin.default, sine)
    assert _compat.compile_circumstances() is None


def test_as_many_threads_are_used_elsewhere() -> None:
    """C++ that Inductor writes says how many, and its cache does not."""
    circumstances = _compat.compile_circumstances()
    assert circumstances is not None and circumstances["threads"] == torch.get_num_threads()
    try:
        _compat.processes._adopt({**circumstances, "threads": 3})
        assert torch.get_num_threads() == 3
    finally:
        _compat.processes._adopt(circumstances)
