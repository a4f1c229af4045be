"""Shared test set-up: one thread a process, and a quiet backend for plots."""

import gc
import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

sys.path.insert(0, str(Path(__file__).resolve().parent))
# Neither the benchmarks nor the examples nor the tools are a part of the installed package, and tests take helpers that
# are beside other tests.
sys.path += [
    str(Path(__file__).resolve().parents[1] / folder)
    for folder in (
        "",
        "examples",
        "examples/gaussian_field",
        "examples/two_view_depth",
        "tools",
        "tests/datasets",
        "tests/models",
        "tests/models/sparsedrive",
    )
]

import pytest
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# A shell lets what it starts in the background, or under nohup, ignore these signals, and so do its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    """Run a test on the CPU and, where there is one, on a GPU."""
    return request.param


@pytest.fixture
def stdout(capsys):
    """Return a function that returns what has been printed since its last call."""
    return lambda: capsys.readouterr().out


@pytest.fixture
def logged(monkeypatch):
    """Return a function that lets what a module logs by add to a list in place of the log, and returns the list."""

    def list_of(module, by="print_log"):
        messages = []
        monkeypatch.setattr(module, by, lambda message, **_: messages.append(message))
        return messages

    return list_of


@pytest.fixture
def program(monkeypatch, capsys, tmp_path):
    """A function that runs ``python -m visdet`` in an empty folder, and returns its status and both outputs."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["visdet", *map(str, arguments)])
        status = 0
        try:
            runpy.run_module("visdet", run_name="__main__")
        except SystemExit as stop:
            status = stop.code or 0
        return status, *capsys.readouterr()

    return run


def pytest_collection_modifyitems(items):
    """Skip the tests that need a CUDA device, or several (``pytest.mark.cuda(devices=2)``), where there are fewer."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        marker = item.get_closest_marker("cuda")
        needed = marker.kwargs.get("devices", 1) if marker else 0
        if found < needed:
            reason = "needs a CUDA device" if needed == 1 else f"needs {needed} CUDA devices"
            item.add_marker(pytest.mark.skip(reason=reason))
    # A process that has no more tests takes those at the end of another's, which are short therefore.
    slow_modules = {item.module for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.module not in slow_modules)


def pytest_collection_finish():
    # Processes that tests start by "forkserver" share what takes seconds to import.
    multiprocessing.set_forkserver_preload(
        ["visdet.engine.trainer", "tests.fuzz.processes", "tests.fuzz.operators"]
    )
    # What tests write need not outlive a loss of power, which some disks promise in no less than a second.
    os.fsync = _does_nothing
    # A training asks whether a program has frozen objects. They are millions here, and are counted one by one.
    gc.get_freeze_count = _one


def _does_nothing(handle):
    """Stand for ``os.fsync``."""


_counted = gc.get_freeze_count


def _one():
    """Stand for ``gc.get_freeze_count``."""
    return 1


@pytest.fixture
def frozen_objects_are_counted(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", _counted)


@pytest.fixture(autouse=True, scope="module")
def living_objects_are_frozen():
    """Let Python's garbage collector leave out the modules and tests, which it would search at each training."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def random_numbers_are_the_same():
    """Let each test draw the same numbers from torch, whatever has run before it."""
    torch.manual_seed(0)


@pytest.fixture
def deterministic_for_a_test(monkeypatch):
    """Let a test train deterministically, and the others as before."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cudnn.deterministic = False


@pytest.fixture(autouse=True)
def mmengine_is_unlocked():
    """Release mmengine's lock, for which all other threads would wait for ever, after a test that leaves it locked.

    What visdet builds leaves it to no thread; mmengine's own classes do, if their constructors fail.
    """
    yield
    if manager := sys.modules.get("mmengine.utils.manager"):
        while manager._lock._is_owned():
            manager._lock.release()
