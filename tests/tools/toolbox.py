"""The commands of ``visdet``, in this process and in processes of their own."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable

from programs import ROOT

from visdet.commands import main

TOY = ROOT / "tests" / "engine"
TOY_CONFIG = str(TOY / "toy_config.py")
ENVIRONMENT = {
    **{
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "VISDET_TRACEBACK")
    },
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), str(TOY), os.environ.get("PYTHONPATH")))),
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "120",
}

_names = itertools.count()


def start(tool: str, *arguments: object, processes: int = 0, devices: str = "", **popen) -> subprocess.Popen:
    """Start ``visdet <tool>``, under torchrun where ``processes`` says how many; ``devices``: the GPUs it sees."""
    launch = [sys.executable]
    if processes:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launch, "-m", "visdet", tool, *map(str, arguments)]
    environment = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": devices}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **popen
    )


def kill_when(
    process: subprocess.Popen, is_time: Callable[[], bool], timeout: float, delay: float = 0.0
) -> None:
    """Send SIGKILL to a process ``delay`` seconds after ``is_time``.

    The test fails if the process ends, or ``timeout`` seconds pass, before.
    """
    deadline = time.monotonic() + timeout
    while not is_time() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(delay)
    came_to_it = is_time() and process.poll() is None
    process.kill()
    out, err = process.communicate()
    assert came_to_it, out + err


def run(
    tool: str, *arguments: object, processes: int = 0, devices: str = "", timeout: float = 300
) -> subprocess.CompletedProcess:
    """Run a tool to its end."""
    process = start(tool, *arguments, processes=processes, devices=devices)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"{tool} ran longer than {timeout} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def succeed(tool: str, *arguments: object, **options) -> str:
    """Run a tool that must succeed and return what it printed."""
    done = run(tool, *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fail(tool: str, *arguments: object, **options) -> str:
    """Run a tool that must fail with one message and return the message."""
    done = run(tool, *arguments, **options)
    message = done.stderr
    assert done.returncode == 1, done.stdout + message
    assert message.startswith("error: ") and "Traceback" not in message, message
    return message.removeprefix("error: ")


def run_here(monkeypatch, capsys, tool: str, *arguments: object) -> tuple[int, str, str]:
    """Run a tool in this process; return its exit status, and what it printed to both streams."""
    arguments = [str(argument) for argument in arguments]
    if tool in (
        "train",
        "test",
    ):  # mmengine keeps one log per name, and names runs by the second they start in
        arguments += [] if "--cfg-options" in arguments else ["--cfg-options"]
        arguments.append(f"experiment_name={tool}{next(_names)}")
    monkeypatch.syspath_prepend(str(TOY))
    for name in ("RANK", "WORLD_SIZE", "VISDET_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    status = 0
    try:
        main([tool, *arguments])
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


def succeed_here(monkeypatch, capsys, tool: str, *arguments: object) -> str:
    """Run a tool in this process, where it must succeed, and return what it printed."""
    status, out, err = run_here(monkeypatch, capsys, tool, *arguments)
    assert status == 0, out + err
    return out


def fail_here(monkeypatch, capsys, tool: str, *arguments: object) -> str:
    """Run a tool in this process, where it must fail with one message, and return the message."""
    status, _, message = run_here(monkeypatch, capsys, tool, *arguments)
    assert status == 1 and message.startswith("error: ") and "Traceback" not in message, message
    return message.removeprefix("error: ")
