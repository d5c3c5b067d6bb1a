"""The processes that compile beside the one that trains: whatever becomes of them, nothing but time depends on it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from fxshard import ConfigError, elsewhere
from fxshard.helpers import crew, member
from fxshard.helpers.crew import MOST, Crew
from tests.helpers.crews import ASLEEP, ENDED, alive, ready, touch, until

pytestmark = pytest.mark.timeout(60)

MEMBERS = """
import sys
from pathlib import Path
from fxshard.helpers import member
member.is_there_a_gpu = lambda: True
member.prepare = lambda gpu: None
member.serve = lambda directory, device: member.work(directory)
member.serve_kernels = lambda directory: member.work(directory, member.KERNELS)
sys.exit(member.main(Path(sys.argv[1]), int(sys.argv[2])))
"""
"""All that a crew does, without torch, which takes seconds to import."""


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
        made.append(Crew(count, command=(str(path),)))
        return made[-1]

    yield make
    for each in made:
        each.dismiss()


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


def test_kernels_are_somebody_elses(hire: Hire, tmp_path: Path) -> None:
    """Who is there while the others are busy, or not there yet; they are waited for like anything that is wanted."""
    helpers = ready(hire(1), tmp_path / "ready")
    helpers.publish(take_long(tmp_path / "begun"), wanted=False)
    until((tmp_path / "begun").exists)
    number = helpers.publish(say_who(tmp_path / "kernel"), queue=crew.KERNELS)
    assert helpers.open >= {number}
    helpers.finish()
    assert (tmp_path / "kernel").exists() and not helpers.open
    assert helpers.present() == 1, "who compiles kernels does nothing else"


def test_members_are_told_which_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The GPU that this process uses, where it does; none is asked for here."""
    said = tmp_path / "said"
    script = f"import pathlib, sys; pathlib.Path({str(said)!r}).write_text(repr(sys.argv[2:]))"
    for device, arguments in ((3, ["2", "3"]), (None, ["2", ""])):
        helpers = Crew(2, device, ("-c", script))
        helpers._process.wait()
        helpers.dismiss()
        assert said.read_text() == repr(arguments)


@pytest.mark.parametrize("used", [True, False])
def test_the_device_in_use_is_told(made: mock.Mock, monkeypatch: pytest.MonkeyPatch, used: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(elsewhere, "has_run", lambda: False)
    elsewhere.start()
    made.assert_called_once_with(3, 2 if used else None)


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
crew = Crew(1, command=(members,))
crew.publish(partial(exec, job))
while not (os.path.exists(said) and Path(said).read_text()):
    time.sleep(0.01)
print(crew._process.pid, Path(said).read_text(), crew._directory, flush=True)
exec(end)
"""


@pytest.mark.parametrize("queue", [crew.QUEUE, crew.KERNELS])
def test_who_comes_when_the_owner_has_gone_leaves(tmp_path: Path, queue: str) -> None:
    """Were it a failure, the others would be killed, and nobody would remove their directory."""
    for name in (queue, crew.DONE):
        os.mkfifo(tmp_path / name)
    member.work(tmp_path, queue)  # nobody reads what is done


def test_who_is_done_when_the_owner_has_gone_leaves(tmp_path: Path) -> None:
    for name in (crew.KERNELS, crew.DONE):
        os.mkfifo(tmp_path / name)
    listening = os.open(tmp_path / crew.DONE, os.O_RDONLY | os.O_NONBLOCK)
    jobs = os.open(tmp_path / crew.KERNELS, os.O_RDWR)
    (tmp_path / "0.job").write_bytes(pickle.dumps(partial(os.close, listening)))
    os.write(jobs, bytes(crew.NUMBER))
    member.work(tmp_path, crew.KERNELS)  # during its first job the owner stops listening
    os.close(jobs)


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
    made.assert_called_once_with(3, None)


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
    helpers = Crew(1, command=("-c", ASLEEP))
    monkeypatch.setattr(crew, "_hired", [helpers])
    child = os.fork()
    if child == 0:
        crew._forget()
        descriptors = (*helpers._queues.values(), helpers._done)
        still_open = [os.path.exists(f"/proc/self/fd/{descriptor}") for descriptor in descriptors]
        os._exit(any(still_open) or bool(crew._hired))
    assert os.waitpid(child, 0)[1] == 0
    helpers.dismiss()


def test_none_is_hired_where_none_is_wanted(made: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(crew.VARIABLE, "0")
    crew.hire()
    assert crew.hired() is None
    made.assert_not_called()
