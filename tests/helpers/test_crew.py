"""The processes that compile beside the one that trains: whatever becomes of them, nothing but time depends on it."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.codecache import compiled_fx_graph_hash
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fxshard
from fxshard import ConfigError, _compat, elsewhere
from fxshard.helpers import crew
from fxshard.helpers.crew import MOST, Crew
from fxshard.lowering import SegmentCompiler, structure
from tests.toy import Mlp

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
MEMBERS = """
import sys
from pathlib import Path
from fxshard.helpers import member
member.prepare = lambda directory: None
member.serve = member.work
sys.exit(member.main(Path(sys.argv[1]), int(sys.argv[2])))
"""
"""All that a crew does, without torch, which takes seconds to import."""
ENDED, ASLEEP = "", "import time; time.sleep(600)"
"""What a crew may be instead, to nobody's loss."""


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait for something that other processes do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing happened in {seconds} s"
        time.sleep(0.01)


def alive(process: int) -> int | None:
    """The group of a process that runs; one that has ended and waits for its parent does not."""
    try:
        state, _, group, *_ = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(group) if state not in "ZX" else None


def living(group: int) -> list[int]:
    """The processes of a group that run."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [process for process in numbers if alive(process) == group]


def touch(path: Path) -> partial[None]:
    return partial(Path.touch, path)


def say_who(path: Path) -> partial[None]:
    """A job that writes down which process does it."""
    return partial(exec, f"import os; open({str(path)!r}, 'a').write(f'{{os.getpid()}}\\n')")


def take_long(begun: Path, seconds: float = 600) -> partial[None]:
    """A job during which something can happen."""
    return partial(exec, f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep({seconds})")


Hire = Callable[..., Crew]


@pytest.fixture
def hire(tmp_path: Path) -> Iterator[Hire]:
    """Makes crews that do what a script says; none outlives its test."""
    made: list[Crew] = []

    def make(count: int, script: str = MEMBERS) -> Crew:
        path = tmp_path / f"crew{len(made)}.py"
        path.write_text(script)
        made.append(Crew(count, (str(path),)))
        return made[-1]

    yield make
    for each in made:
        each.dismiss()


def ready(helpers: Crew, path: Path, seconds: float = 30) -> Crew:
    """A crew, once it is at work: one that is not there is not waited for."""
    helpers.publish(touch(path))
    until(path.exists, seconds)
    return helpers


def processes(helpers: Crew, path: Path) -> list[int]:
    """The first process of a crew of one, and the one that does its jobs."""
    helpers.publish(say_who(path))
    until(lambda: path.exists() and path.read_text())
    return [helpers._process.pid, int(path.read_text())]


def test_every_job_is_done_once(hire: Hire, tmp_path: Path) -> None:
    helpers, jobs = ready(hire(3), tmp_path / "ready"), [tmp_path / str(number) for number in range(60)]
    assert [helpers.publish(say_who(path)) for path in jobs] == list(range(1, 61))
    until(lambda: all(path.exists() for path in jobs))
    helpers.finish()
    assert [len(path.read_text().splitlines()) for path in jobs] == [1] * 60
    assert helpers.finished == 61
    helpers.finish()
    assert helpers.finished == 61


def test_members_work_side_by_side(hire: Hire, tmp_path: Path) -> None:
    """Two jobs that wait for each other."""
    helpers, one, other = hire(2), tmp_path / "one", tmp_path / "other"
    meet = "import pathlib, time\npathlib.Path({!r}).touch()\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.01)"
    helpers.publish(partial(exec, meet.format(str(one), str(other))))
    helpers.publish(partial(exec, meet.format(str(other), str(one))))
    until(lambda: one.exists() and other.exists())
    helpers.finish()
    assert helpers.finished == 2


def test_who_is_there_is_known(hire: Hire) -> None:
    helpers = hire(3)
    until(lambda: helpers.present() == 3)
    helpers.dismiss()
    assert hire(1, ASLEEP).present() == 0


def test_what_is_withdrawn_is_neither_done_nor_waited_for(
    hire: Hire, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is it a failure."""
    helpers, done, late = hire(1), tmp_path / "done", tmp_path / "late"
    slow = f"import pathlib, time; pathlib.Path({str(tmp_path / 'begun')!r}).touch(); time.sleep(1)"
    helpers.publish(partial(exec, f"{slow}; pathlib.Path({str(done)!r}).touch()"))
    until((tmp_path / "begun").exists)
    helpers.withdraw(helpers.publish(touch(late)))
    helpers.publish(touch(late), wanted=False)
    helpers.withdraw_unwanted()
    helpers.finish()
    assert done.exists() and helpers.finished == 1 and not helpers.open
    with caplog.at_level("DEBUG", logger="fxshard"):
        ready(helpers, tmp_path / "afterwards").finish()
    assert not late.exists() and helpers.finished == 2 and not caplog.records


def test_a_crew_that_says_nothing_is_not_waited_for(
    hire: Hire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(crew, "SILENCE", 0)
    monkeypatch.setattr(crew, "PATIENCE", 10)
    helpers = ready(hire(1), tmp_path / "ready")
    helpers.publish(take_long(tmp_path / "begun"))
    helpers.finish()
    assert "said nothing" in caplog.text and helpers.open


def test_a_failure_is_told_and_holds_up_nothing(hire: Hire, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    helpers = hire(1)
    helpers.publish(partial(int, "no number"))
    ready(helpers, tmp_path / "next")
    with caplog.at_level("DEBUG", logger="fxshard"):
        helpers.finish()
    (told,) = [record for record in caplog.records if "no number" in record.getMessage()]
    assert told.levelname == "DEBUG" and "Traceback" in told.getMessage() and "ValueError" in told.getMessage()
    assert helpers.finished == 1


def test_jobs_that_cannot_be_read_are_failures_too(hire: Hire, tmp_path: Path) -> None:
    """A function of a module that is not there, for one."""
    helpers = hire(1)
    with mock.patch.object(pickle, "dumps", return_value=b"cnowhere\nnothing\n."):
        helpers.publish(print)
    ready(helpers, tmp_path / "next").finish()
    assert helpers.finished == 1


@pytest.mark.parametrize("count", [1, 2])
def test_a_member_that_dies_keeps_nobody_waiting(
    hire: Hire, tmp_path: Path, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The others go, too: who waits for the job that died learns of it by that. What they were at is lost with them."""
    helpers = ready(hire(count), tmp_path / "ready")
    if count > 1:
        helpers.publish(take_long(tmp_path / "long"))
        until((tmp_path / "long").exists)
    helpers.publish(partial(exec, f"import os; os.mkdir({str(tmp_path / 'dying')!r}); os._exit(1)"))
    until((tmp_path / "dying").exists)
    with caplog.at_level("DEBUG", logger="fxshard"):
        helpers.finish()
    assert helpers.finished == 1 and "ended before their work was done" in caplog.text
    helpers.publish(touch(tmp_path / "never"))
    helpers.finish()
    assert helpers.present() == 0


@pytest.mark.parametrize("script", [ENDED, ASLEEP], ids=["ended", "asleep"])
def test_with_nobody_there_nothing_is_waited_for(hire: Hire, tmp_path: Path, script: str) -> None:
    helpers = hire(2, script)
    if script == ENDED:
        helpers._process.wait()
    numbers = [helpers.publish(touch(tmp_path / "job")) for _ in range(3)]
    started = time.monotonic()
    helpers.finish()
    assert time.monotonic() - started < 1
    assert helpers.open == set(numbers) and helpers.finished == 0 and not (tmp_path / "job").exists()


def test_what_nobody_wants_is_not_waited_for(hire: Hire, tmp_path: Path) -> None:
    helpers = ready(hire(1), tmp_path / "ready")
    helpers.publish(take_long(tmp_path / "begun"), wanted=False)
    until((tmp_path / "begun").exists)
    helpers.finish()
    assert helpers.finished == 1


def test_a_dismissed_crew_leaves_nothing(hire: Hire, tmp_path: Path) -> None:
    """Also in the middle of a job."""
    helpers = hire(1)
    pids, directory = processes(helpers, tmp_path / "who"), helpers._directory
    helpers.publish(take_long(tmp_path / "begun"))
    until((tmp_path / "begun").exists)
    assert all(map(alive, pids)) and directory.exists()
    helpers.dismiss()
    until(lambda: not any(map(alive, pids)), seconds=5)
    assert not directory.exists()
    helpers.dismiss()


def test_members_that_lost_their_first_process_are_dismissed_too(hire: Hire, tmp_path: Path) -> None:
    helpers = hire(1)
    first, member = processes(helpers, tmp_path / "who")
    helpers.publish(take_long(tmp_path / "begun"))
    until((tmp_path / "begun").exists)
    os.kill(first, signal.SIGKILL)
    helpers.finish()
    helpers.dismiss()
    try:
        until(lambda: not alive(member), seconds=2)
    finally:
        if alive(member):
            os.kill(member, signal.SIGKILL)


def test_a_process_forked_from_the_owner_dismisses_nobody(hire: Hire, tmp_path: Path) -> None:
    """A data loader's worker, for one, when it ends."""
    helpers = hire(1)
    pids = processes(helpers, tmp_path / "who")
    child = os.fork()
    if child == 0:
        try:
            helpers.dismiss()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert all(map(alive, pids)) and helpers._directory.exists()
    ready(helpers, tmp_path / "afterwards").finish()


OWNER = """
import os, sys, time
from functools import partial
from pathlib import Path
from fxshard.helpers.crew import Crew
members, job, said, end = sys.argv[1:]
crew = Crew(1, (members,))
crew.publish(partial(exec, job))
while not (os.path.exists(said) and Path(said).read_text()):
    time.sleep(0.01)
print(crew._process.pid, Path(said).read_text(), crew._directory, flush=True)
exec(end)
"""


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit()"])
def test_a_crew_ends_with_its_owner(tmp_path: Path, end: str) -> None:
    """With one that dies without a word, too."""
    members, said = tmp_path / "members.py", tmp_path / "who"
    members.write_text(MEMBERS)
    arguments = [str(members), say_who(said).args[0], str(said), end]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", OWNER, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    first, member, directory = ran.stdout.split()
    until(lambda: not alive(int(first)) and not alive(int(member)), seconds=5)
    until(lambda: not Path(directory).exists(), seconds=5)


@pytest.mark.parametrize(
    ("asked", "cores", "ranks", "count"),
    [
        ("3", 64, None, 3),
        ("0", 64, None, 0),
        (None, 64, None, MOST),
        (None, 8, None, 4),
        (None, 5, None, 2),
        (None, 2, None, 0),
        (None, 64, "8", 4),
        (None, 16, "8", 0),
    ],
)
def test_as_many_as_the_cores_allow(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, cores: int, ranks: str | None, count: int
) -> None:
    """Two cores for each, of those that this rank has; one alone would be no help."""
    for name, value in ((crew.VARIABLE, asked), ("LOCAL_WORLD_SIZE", ranks)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert crew.wanted() == count


@pytest.mark.parametrize("asked", ["many", "-1", "1.5"])
def test_a_number_is_asked_for(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv(crew.VARIABLE, asked)
    with pytest.raises(ConfigError, match=f"FXSHARD_HELPERS={asked}"):
        crew.wanted()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Stands for the class of crews, in a process that has had none."""
    monkeypatch.setenv(crew.VARIABLE, "3")
    monkeypatch.setattr(crew, "_hired", [])
    monkeypatch.setattr(crew, "_started", [])
    monkeypatch.setattr(crew, "Crew", mock.Mock(side_effect=lambda count: mock.Mock(count=count)))
    return crew.Crew  # type: ignore[return-value]


def test_a_process_hires_once(made: mock.Mock) -> None:
    """A second model compiles by itself."""
    assert crew.hired() is None
    crew.hire()
    first = crew.hired()
    assert isinstance(first, mock.Mock) and first.count == 3
    crew.hire()
    assert crew.hired() is first
    first.dismiss.assert_not_called()
    crew.dismiss()
    first.dismiss.assert_called_once_with()
    assert crew.hired() is None
    crew.dismiss()
    crew.hire()
    assert crew.hired() is None
    made.assert_called_once_with(3)


def test_a_forked_process_has_no_crew_until_it_hires_its_own(made: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    crew.hire()
    parents = crew.hired()
    monkeypatch.setattr(os, "getpid", lambda: 12345)
    assert parents is not None and crew.hired() is None
    crew.hire()
    assert crew.hired() not in (None, parents)


def test_a_forked_process_does_not_keep_the_queue_open(made: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a crew would stay as long as a data loader's worker that outlives the owner."""
    with mock.patch.object(os, "register_at_fork") as register:
        crew.hire()
    register.assert_called_once_with(after_in_child=crew._forget)
    helpers = Crew(1, ("-c", ASLEEP))
    monkeypatch.setattr(crew, "_hired", [helpers])
    child = os.fork()
    if child == 0:
        crew._forget()
        still_open = [os.path.exists(f"/proc/self/fd/{descriptor}") for descriptor in (helpers._queue, helpers._done)]
        os._exit(any(still_open) or bool(crew._hired))
    assert os.waitpid(child, 0)[1] == 0
    helpers.dismiss()


def test_none_is_hired_where_none_is_wanted(made: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(crew.VARIABLE, "0")
    crew.hire()
    assert crew.hired() is None
    made.assert_not_called()


@pytest.mark.parametrize("training", [True, False])
def test_nobody_is_left_when_a_first_graph_is_compiled(made: mock.Mock, training: bool) -> None:
    """Also where there was nothing for them to do."""
    crew.hire()
    helpers = crew.hired()
    assert helpers is not None
    model = fxshard.compile(Mlp(), lowering="eager")
    with torch.set_grad_enabled(training):
        model(torch.randn(4, 7), torch.randn(4, 5))
    helpers.dismiss.assert_called_once_with()  # type: ignore[attr-defined]
    assert crew.hired() is None


def test_nobody_is_left_when_compilation_fails(made: mock.Mock) -> None:
    crew.hire()
    helpers = crew.hired()
    assert helpers is not None
    model = fxshard.compile(Mlp(), lowering="inductor")
    failing = mock.patch.object(SegmentCompiler, "with_help", side_effect=RuntimeError("no such kernel"))
    with failing, pytest.raises(fxshard.FxshardError, match="no such kernel"):
        model(torch.randn(4, 7), torch.randn(4, 5))
    helpers.dismiss.assert_called_once_with()  # type: ignore[attr-defined]


@dataclass
class Idle:
    """Stands for a crew of which so many are there, and do nothing."""

    there: int = 0
    jobs: list[Any] = field(default_factory=list)
    open: set[int] = field(default_factory=set)

    def publish(self, job: Any, *, wanted: bool = True) -> int:
        self.jobs.append(job)
        self.open.add(len(self.jobs) - 1)
        return len(self.jobs) - 1

    def withdraw(self, number: int) -> None:
        self.open.remove(number)

    def withdraw_unwanted(self) -> None:
        pass

    def present(self) -> int:
        return self.there


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of Inductor's with nothing in it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def example(cache: Path) -> Iterator[torch.Tensor]:
    """An input of segments, while Dynamo compiles."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        made = torch.empty(4, 4)
    with tracing(TracingContext(mode)):
        yield made


def segment(example: torch.Tensor, length: int) -> fx.GraphModule:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(length):
            x = x.sin()
        return [x]

    return make_fx(run)(example)


def compiles(graph: fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
    """Stands for Inductor, which writes to graphs."""
    count = len(graph.graph.nodes)
    for node in graph.graph.find_nodes(op="output"):
        graph.graph.erase_node(node)
    return lambda args: count


def test_what_nobody_is_there_for_is_compiled_here(example: torch.Tensor) -> None:
    """Once, the shortest first; what is not ours among the jobs is left to whoever launches it."""
    segments = [segment(example, length) for length in (1, 3, 2, 3)]
    idle, compiler = Idle(), SegmentCompiler("inductor")
    idle.publish("a kernel")
    with mock.patch.object(_compat, "inductor_compile", side_effect=compiles) as inductor:
        compiler.with_help(idle, segments)  # type: ignore[arg-type]
        assert len(idle.jobs) == 4 and idle.open == {0}
        assert [len(call.args[0].graph.nodes) for call in inductor.call_args_list] == [2, 3, 4]  # without the output
        assert compiler.compilations == 3 and compiler.segments == 0
        assert [compiler(each)([]) for each in segments] == [3, 5, 4, 5]
        compiler.with_help(idle, segments)  # type: ignore[arg-type]
    assert compiler.compilations == 3 and compiler.segments == 4 and len(idle.jobs) == 4


@pytest.mark.parametrize(("there", "here"), [(1, 2), (2, 1), (3, 0), (8, 0)])
def test_what_others_are_there_for_is_left_to_them(example: torch.Tensor, there: int, here: int) -> None:
    """Kernels, which were asked for earlier, are nothing that could be done here."""
    segments = [segment(example, length) for length in (1, 2, 3)]
    busy, compiler = Idle(there), SegmentCompiler("inductor")
    kernel = busy.publish("a kernel")
    with mock.patch.object(_compat, "inductor_compile", side_effect=compiles):
        compiler.with_help(busy, segments)  # type: ignore[arg-type]
        assert len(busy.jobs) == 4 and len(busy.open - {kernel}) == 3 - here and compiler.compilations == here
        assert [compiler(each)([]) for each in segments] == [3, 4, 5]
    assert compiler.compilations == 3


def test_what_others_have_done_meanwhile_is_not_compiled_here(example: torch.Tensor) -> None:
    """One of the crew does the shortest of three, while another is at none."""

    class Quick(Idle):
        def present(self) -> int:
            self.open.discard(2)
            return self.there

    quick, compiler = Quick(1), SegmentCompiler("inductor")
    with mock.patch.object(_compat, "inductor_compile", side_effect=compiles) as inductor:
        compiler.with_help(quick, [segment(example, length) for length in (1, 2, 3)])  # type: ignore[arg-type]
    assert [len(call.args[0].graph.nodes) for call in inductor.call_args_list] == [3] and quick.open == {0}


def test_what_cannot_be_packed_is_compiled_later(example: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "packed", lambda segment, inputs: None)
    idle, compiler = Idle(), SegmentCompiler("inductor")
    with mock.patch.object(_compat, "inductor_compile", side_effect=compiles):
        compiler.with_help(idle, [segment(example, 2)])  # type: ignore[arg-type]
        assert not idle.jobs and compiler.compilations == 0
        assert compiler(segment(example, 2))([]) == 4
    assert compiler.compilations == 1


def test_what_was_compiled_earlier_needs_no_help(example: torch.Tensor) -> None:
    """By another program: it is in Inductor's cache."""
    idle = Idle()
    with mock.patch.object(_compat, "inductor_compile", side_effect=compiles):
        SegmentCompiler("inductor")(segment(example, 2))
        SegmentCompiler("inductor").with_help(idle, [segment(example, 2), segment(example, 3)])  # type: ignore[arg-type]
    assert len(idle.jobs) == 1


def test_what_was_packed_is_compiled_as_it_would_be_here(example: torch.Tensor) -> None:
    """The same graph, for the same inputs, under the same options; all of it travels."""
    found = []

    def compile(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        found.append((structure(graph), [(x.shape, x.stride()) for x in inputs], config.max_autotune))

    packed = _compat.packed(segment(example, 3), [example])
    assert packed is not None
    with config.patch(max_autotune=True):
        job = pickle.dumps(partial(_compat.compile_packed, packed, _compat.compile_circumstances()))
    with mock.patch.object(_compat, "inductor_compile", compile):
        pickle.loads(job)()
    assert found == [(structure(segment(example, 3)), [(example.shape, example.stride())], True)]


def test_what_nodes_say_travels(example: torch.Tensor) -> None:
    """Inductor keeps the strides of outputs that are declared visible, and its cache does not look at that."""
    graph, found = segment(example, 2), []
    graph.graph.output_node().meta["user_visible_output_idxs"] = [0]
    for node in graph.graph.nodes:
        node.meta["nn_module_stack"] = {"1": ("L['model']", Mlp)}
    packed = _compat.packed(graph, [example])
    circumstances = _compat.compile_circumstances()
    assert packed is not None and circumstances is not None
    with mock.patch.object(_compat, "inductor_compile", lambda graph, inputs: found.append(graph)):
        _compat.compile_packed(packed, circumstances)
    (arrived,) = found
    assert arrived.graph.output_node().meta["user_visible_output_idxs"] == [0]
    for sent, got in zip(graph.graph.nodes, arrived.graph.nodes, strict=True):
        assert got.name == sent.name and set(got.meta) == set(sent.meta) - _compat._OF_THE_SCRIPT


@pytest.mark.parametrize(
    ("kept", "why"), [(lambda node: lambda: None, "lambda"), (lambda node: node, "raw Node")], ids=["lambda", "node"]
)
def test_a_segment_that_cannot_travel_is_told_of(
    example: torch.Tensor, caplog: pytest.LogCaptureFixture, kept: Any, why: str
) -> None:
    stuck = segment(example, 1)
    for node in stuck.graph.find_nodes(op="placeholder"):
        node.meta["something"] = kept(node)
    with caplog.at_level("DEBUG", logger="fxshard"):
        assert _compat.packed(stuck, [example]) is None
    assert "cannot be compiled ahead" in caplog.text and why in caplog.text


def test_nor_does_one_that_calls_a_function_of_python(example: torch.Tensor) -> None:
    """One that is no operator, as libraries register them with Inductor."""
    stuck = segment(example, 1)
    for node in stuck.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        node.target = copy.copy
    assert _compat.packed(stuck, [example]) is None


def test_options_that_cannot_travel_hold_up_nothing(example: torch.Tensor, hire: Hire) -> None:
    """Inductor keeps nothing in its cache then, and compiles."""
    compiler = SegmentCompiler("inductor")
    with (
        config.patch(reorder_for_compute_comm_overlap_passes=[lambda nodes: nodes]),
        mock.patch.object(_compat, "inductor_compile", side_effect=compiles),
    ):
        helpers = hire(1, ASLEEP)
        compiler.with_help(helpers, [segment(example, 1)])
        assert not helpers.open and compiler.compilations == 0
        assert compiler(segment(example, 1))([]) == 3


@pytest.mark.parametrize("option", [{}, {"fx_graph_cache": False}, {"force_disable_caches": True}])
def test_nothing_travels_without_a_cache(example: torch.Tensor, option: dict[str, bool]) -> None:
    """This process would not find what comes of it."""
    with config.patch(option):
        assert (_compat.packed(segment(example, 1), [example]) is None) == bool(option)


def test_nothing_of_the_script_travels(example: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes are not there in another process, whose main module is another one."""
    model = type("Model", (torch.nn.Module,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Model", model, raising=False)
    graph = segment(example, 1)
    for node in graph.graph.nodes:  # as in backward graphs of a model that the script defines
        node.meta["fwd_nn_module_stack"] = {"1": ("L['model']", model)}
    packed = _compat.packed(graph, [example])
    assert packed is not None and b"__main__" not in packed


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that multiprocessing has spawned: pickle takes the first module that has ``torch``."""
    main = mock.Mock(spec=["torch"], torch=torch)
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    monkeypatch.setattr(sys, "modules", {"__mp_main__": main, **sys.modules})


def laid_out(example: torch.Tensor) -> fx.GraphModule:
    return make_fx(lambda x: [x.t().clone(memory_format=torch.contiguous_format)])(example)


def test_what_torch_names_is_not_looked_for_in_the_script(example: torch.Tensor, script: None) -> None:
    packed = _compat.packed(laid_out(example), [example])
    assert packed is not None and b"__mp_main__" not in packed


def test_others_know_what_they_compile_by_the_same_key(example: torch.Tensor, request: pytest.FixtureRequest) -> None:
    """Or this process does not find it, and all was in vain."""
    theirs, _ = compiled_fx_graph_hash(laid_out(example), [example], {}, [])
    request.getfixturevalue("script")
    ours, _ = compiled_fx_graph_hash(laid_out(example), [example], {}, [])
    assert ours == theirs


def test_memory_formats_can_be_read_without_us() -> None:
    for value in (torch.contiguous_format, torch.channels_last, torch.preserve_format):
        pickled = pickle.dumps(value)
        assert b"fxshard" not in pickled and pickle.loads(pickled) is value


def test_kernels_go_to_the_crew_while_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str | None, int]] = []
    idle = Idle()
    monkeypatch.setattr(crew, "hired", lambda: idle)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("TRITON_CACHE_DIR", "kernels")
    elsewhere.compile_elsewhere(
        lambda capability: seen.append((os.environ.get("TRITON_CACHE_DIR"), capability)), torch.device("cuda", 0)
    )
    (job,) = idle.jobs
    assert not seen
    job()
    assert seen == [("kernels", 90)]


def step(path: Path) -> None:
    """A program that trains: says what came of its first step, and of its crew."""
    compile = fxshard.compile
    helpers = crew.hired()
    if helpers is not None:
        ready(helpers, path, seconds=90)
    torch.manual_seed(0)
    model = compile(Mlp(), lowering="inductor", zero=3)
    loss = model(torch.randn(4, 7), torch.randn(4, 5))
    assert crew.hired() is None
    if helpers is not None:
        until(lambda: not living(helpers._process.pid), seconds=10)
    loss.backward()
    grads = b"".join(parameter.grad.numpy().tobytes() for parameter in model.parameters())
    bits = f"{float(loss.detach()).hex()} {hashlib.sha256(grads).hexdigest()}"
    hits, misses = (counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss"))
    done = helpers.finished if helpers is not None else 0
    print(json.dumps([bits, done, hits, misses, model.compilations.compiled]))


@dataclass(frozen=True)
class Step:
    """What such a program says."""

    bits: str
    done: int
    """Jobs that the crew has done, the first of which shows that it is there."""
    hits: int
    misses: int
    compiled: int


def steps(folder: Path, *counts: int) -> list[Step]:
    """Run such programs side by side, each with so many helpers and a cache of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    program = "import sys; from tests.helpers.test_crew import Path, step; step(Path(sys.argv[1]))"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(folder / f"ready{count}")],
            env={**environment, "TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache{count}"), crew.VARIABLE: str(count)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for count in counts
    ]
    try:
        said = [each.communicate()[0] for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0] * len(counts)
    return [Step(*json.loads(text)) for text in said]


@pytest.mark.timeout(180)
def test_a_step_is_the_same_with_help(tmp_path: Path) -> None:
    """To the bit; some of it comes out of the cache, and nobody is left when it has come."""
    helped, alone = steps(tmp_path, 2, 0)
    assert helped.bits == alone.bits
    assert alone.hits == 0 and alone.misses == alone.compiled == helped.compiled >= 3
    assert helped.done >= 2 and helped.hits >= 1
    assert helped.hits + helped.misses == helped.compiled


@pytest.mark.timeout(180)
@pytest.mark.thorough
def test_a_later_run_asks_for_no_help(tmp_path: Path) -> None:
    """All that it compiles is in the cache, and it knows."""
    (first,) = steps(tmp_path, 2)
    (tmp_path / "ready2").unlink()
    (later,) = steps(tmp_path, 2)
    assert later.bits == first.bits
    assert later.done == 1 and later.misses == 0 and later.hits == later.compiled == first.compiled
