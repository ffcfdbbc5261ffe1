"""The session: one temporary folder, which is removed, no process left behind, and how to repeat a failure alone.

The process that only hands tests to workers loads nothing else; workers also load `ranks.py`.
"""

import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import counts
import pytest
import stress

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is used: ranks of the tests compute on CPUs on every machine

#: The temporary folder. Its name also marks, in their environment, the processes that the suite starts.
SESSION = pytest.StashKey[Path]()


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")  # of pytest-xdist


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not is_worker(config):
        config.stash[SESSION] = folder = Path(tempfile.mkdtemp(prefix="cuboid-tests-"))
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    if is_worker(config) or not config.option.numprocesses:
        config.pluginmanager.import_plugin("ranks")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, Any, Any]:
    """Nothing the suite has started may outlive it."""
    result = yield
    if not is_worker(session.config):
        left = processes_left(session.config.stash[SESSION])
        if left:
            print("\nprocesses that the suite has left behind, now killed:", *left, sep="\n  ", file=sys.stderr)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return result


def pytest_unconfigure(config: pytest.Config) -> None:
    folder = config.stash.get(SESSION, None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def processes_left(folder: Path) -> list[str]:
    """After a while in which they may end. They have this session's folder in their environment, this process has not:
    it was set after it began."""
    mark, names = f"TMPDIR={folder}\0".encode(), dict[int, str]()
    for last in [False] * 600 + [True]:
        names.clear()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes() + b"\0":
                    names[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it has ended, or belongs to another user
                continue
        if not names or last:
            break
        time.sleep(0.1)
    for process_id in names:
        with suppress(ProcessLookupError):  # it has ended after all
            os.kill(process_id, 9)
    return [f"{process_id} {name}" for process_id, name in names.items()]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        command = ["pytest", "-n", "0", "-m", "", f"{item.path.relative_to(item.config.rootpath)}::{item.name}"]
        report.sections.append(("to repeat this one alone", f"{stress.variables()}{shlex.join(command)}"))
    return report


def pytest_make_parametrize_id(val: object) -> str | None:
    """Texts, shortened to what a shell takes as it is: people read and type the name of a failed test."""
    return re.sub(r"[^\w.,=+-]+", "_", val)[:32].strip("_") if isinstance(val, str) else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section("what was run")
    terminalreporter.write_line(counts.summary(config.option.markexpr))
    skipped = Counter(each.longrepr[2] for each in terminalreporter.stats.get("skipped", []))
    for reason, count in skipped.items():  # which `-q` does not tell
        terminalreporter.write_line(f"{count} × {reason}")
