"""pytest plugin: `pytest --shows` lists which tests show which statement, without running them."""

import re

import pytest

Table = dict[str, list[str]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--shows`."""
    parser.addoption("--shows", action="store_true", help="list the statements shown, and by which tests; run nothing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a `shows` marker that names nothing, whether or not the table is asked for."""
    for item in items:
        for marker in item.iter_markers("shows"):
            if not marker.args or not all(isinstance(name, str) for name in marker.args):
                raise pytest.UsageError(
                    f'{item.nodeid}: shows{marker.args!r} needs the ids of statements, as in shows("S2")'
                )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Print the table in place of running the tests."""
    if not session.config.getoption("--shows"):
        return None
    table = shown(session.items)
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    width = max(map(len, table), default=0)
    reporter.write_line("")
    for name, tests in table.items():
        for i, test in enumerate(tests):
            reporter.write_line(f"{name if i == 0 else '':<{width}}  {test}")
    reporter.write_line(f"\n{len(table)} statements shown: {' '.join(table)}")
    return True


def shown(items: list[pytest.Item]) -> Table:
    """Statement → node ids of its tests; the cases of one parametrized test count as one."""
    table: Table = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        for marker in item.iter_markers("shows"):
            for name in marker.args:
                tests = table.setdefault(name, [])
                if test not in tests:
                    tests.append(test)
    return dict(sorted(table.items(), key=lambda row: natural(row[0])))


def natural(name: str) -> tuple[str, int]:
    """Sort key that puts L2 before L10."""
    match = re.fullmatch(r"(\D*)(\d+)", name)
    return (match[1], int(match[2])) if match else (name, 0)
