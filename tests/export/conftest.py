"""What several tests of exports need."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """Return the folder of the built examples."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    root, folder = Path(__file__).parents[2], tmp_path_factory.mktemp("programs")
    configured, built = (
        subprocess.run(["cmake", *arguments], capture_output=True, text=True)
        for arguments in (
            ["-S", root / "examples" / "aoti", "-B", folder, f"-DTORCH={Path(torch.__file__).parent}"],
            ["--build", folder],
        )
    )
    if "Could NOT find JPEG" in configured.stderr:
        pytest.skip("libjpeg and its headers are not installed")
    assert built.returncode == 0, configured.stderr + built.stdout + built.stderr
    return folder
