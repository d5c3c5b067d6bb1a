"""What Inductor's cache has from earlier, as far as we know."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import fxshard
from fxshard import _compat, elsewhere
from fxshard.helpers import crew
from fxshard.helpers.known import Known, has_run, note_run
from tests.remembered.starts import uncompiled
from tests.toy import Mlp


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


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that runs."""
    path = tmp_path / "train.py"
    path.write_text("train()")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)
    monkeypatch.setattr(sys, "argv", [str(path), "--layers", "4"])
    return path


def test_a_program_that_has_run_is_known(script: Path, cache: Path) -> None:
    assert not has_run() and not list(cache.rglob("*"))
    note_run()
    note_run()
    assert has_run() and len(list(cache.rglob("*.done"))) == 1


def test_one_that_was_changed_or_called_otherwise_is_another(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note_run()
    monkeypatch.setattr(sys, "argv", [str(script), "--layers", "8"])
    assert not has_run()
    monkeypatch.setattr(sys, "argv", [str(script), "--layers", "4"])
    assert has_run()
    script.write_text("train(more=True)")
    assert not has_run()


def test_what_is_no_script_or_is_gone_is_not_known(script: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs given on a command line have the same name."""
    script.unlink()
    note_run()
    assert not has_run() and not list(cache.rglob("*"))
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    monkeypatch.setattr(sys, "argv", [])
    note_run()
    assert not has_run() and not list(cache.rglob("*"))


def test_in_a_directory_that_is_gone_nothing_is_known(
    script: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    note_run()
    assert not has_run() and not list(cache.rglob("*"))
    monkeypatch.chdir(tmp_path)


def test_nobody_is_hired_for_what_has_run(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(crew.VARIABLE, "2")
    with mock.patch.object(crew, "hire") as hire:
        elsewhere.start()
        hire.assert_called_once_with(None)
        note_run()
        elsewhere.start()
        hire.assert_called_once_with(None)


@pytest.mark.parametrize("ran", [True, False])
def test_inductors_processes_are_not_started_early_for_what_has_run(
    script: Path, monkeypatch: pytest.MonkeyPatch, ran: bool
) -> None:
    """They would take processor time while everything is read from its cache."""
    if ran:
        note_run()
    monkeypatch.setenv("TORCH_WARM_POOL", "0")
    monkeypatch.delenv(crew.VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with (
        mock.patch.object(elsewhere.beside, "begin") as beside,
        mock.patch.object(_compat, "start_compile_processes") as begun,
    ):
        elsewhere.start()
    assert begun.called is not ran and beside.called, "the cache is asked in both cases, and begins with a hash"


def test_to_know_it_takes_nothing_of_torchs_compiler() -> None:
    """Which takes a second to import, and a crew that is needed is not to wait for that."""
    script = """
import sys
from fxshard import _compat
print(_compat.compile_cache())
assert "torch._inductor" not in sys.modules
"""
    kept = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=kept, stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    assert ran.stdout.strip() == default_cache_dir()


def test_a_first_step_through_inductor_notes_it(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "inductor_compile", uncompiled)
    model = fxshard.compile(Mlp(), lowering="inductor")
    loss = model(torch.randn(4, 7), torch.randn(4, 5))
    assert not has_run()
    loss.backward()
    assert has_run()
