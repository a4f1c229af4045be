"""What needs packages or versions that CI does not have, each in an environment of its own: ``nox -s NAME``.

``nox --list`` shows what there is. A test that is skipped elsewhere, because a package is missing, fails here. What
stands after ``--`` replaces the packages of a session: ``nox -s check-mmdet -- mmdet==3.2.0 mmcv-lite==2.0.1``.
"""

import os
from pathlib import Path

import nox

TORCH = os.environ.get("TORCH", "torch==2.14.1 torchvision==0.29.1").split()
PYTEST = ("pytest", "pytest-timeout")

nox.options.sessions = []


def install(session: nox.Session, *packages: str, torch: list[str] = TORCH) -> None:
    """Install torch, then the packages or those that stand after ``--``."""
    session.install(*torch)
    wanted = session.posargs or packages
    if wanted:
        session.install(*wanted)


def requirements(session: nox.Session, *arguments: str) -> None:
    """Install the requirements of training and of the tests."""
    session.run("python", "tools/install_requirements.py", "--extra", "train", "--extra", "test", *arguments)


def run(session: nox.Session, *arguments: str, **variables: str) -> None:
    """Run Python on this checkout, whose operators ``make setup`` has built."""
    session.run(
        "python", *arguments, env={"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1", **variables}
    )


@nox.session(name="check-mmdet")
def check_mmdet(session: nox.Session) -> None:
    """Stock configs of mmdet on mmcv-lite; PAA needs scikit-learn."""
    install(session, "mmengine", "mmcv-lite==2.1.0", "mmdet==3.3.0", "scikit-learn", "tqdm")
    run(session, "tools/check_mmdet_configs.py")


@nox.session(name="check-mmrotate")
def check_mmrotate(session: nox.Session) -> None:
    """Stock configs of mmrotate, which refuses newer versions of mmcv and mmdet."""
    install(session, "mmrotate==1.0.0rc1", "mmdet==3.0.0", "mmcv-lite==2.0.1")
    run(session, "tools/check_mmrotate_configs.py")


@nox.session(name="check-mmdet3d")
def check_mmdet3d(session: nox.Session) -> None:
    """Stock configs of mmdet3d, without its requirement of an older numpy."""
    install(session, "mmengine", "mmcv-lite==2.1.0", "mmdet==3.3.0")
    session.install("numba", "trimesh", "plyfile", "pandas", "scikit-learn", "scikit-image", "cachetools")
    tools = ("nuscenes-devkit", "lyft-dataset-sdk", "pyquaternion", "open3d")
    session.install("--no-deps", "mmdet3d==1.4.0", *tools)
    run(session, "tools/check_mmdet3d_configs.py")


@nox.session(name="check-mmcv1")
def check_mmcv1(session: nox.Session) -> None:
    """mmcv 1.x as pure Python; its setup needs an old setuptools, and asks for OpenCV only where none is installed."""
    session.install(*TORCH, "setuptools<81", "wheel", "opencv-python-headless", *PYTEST)
    session.install("--no-build-isolation", *(session.posargs or ["mmcv==1.7.2"]))
    run(session, "-m", "pytest", "tests/compat/test_mmcv_1.py", VISDET_CHECK="check-mmcv1")


@nox.session(name="check-devkit")
def check_devkit(session: nox.Session) -> None:
    """nuScenes' metrics and the converter against the devkit, which asks for numpy below 2 without need."""
    session.install(*TORCH)
    requirements(session)
    session.install("pyquaternion", "cachetools", "descartes", "fire", "parameterized", "scikit-learn")
    session.install("tqdm", "pandas", "motmetrics", "shapely")
    session.install("--no-deps", *(session.posargs or ["nuscenes-devkit"]))
    tests = ("tests/evaluation/test_nuscenes_devkit.py", "tests/tools/test_prepare_nuscenes_devkit.py")
    run(session, "-m", "pytest", *tests, VISDET_CHECK="check-devkit")


@nox.session(name="check-packages")
def check_packages(session: nox.Session) -> None:
    """Other packages' attention and trainings; groundingdino asks for a supervision that rfdetr refuses."""
    session.install(*TORCH, "setuptools", "wheel", *PYTEST)
    packages = ["ultralytics", "rfdetr", "libreyolo", "addict", "yapf", "timm"]
    session.install(*(session.posargs or packages), "scipy", "torch-linear-assignment")
    session.install("--no-build-isolation", "--no-deps", "groundingdino-py")
    tests = ("tests/compat/test_other_packages.py", "tests/compat/test_trained_twice.py")
    run(session, "-m", "pytest", *tests, VISDET_CHECK="check-packages")


@nox.session(name="check-transformers")
def check_transformers(session: nox.Session) -> None:
    """All detectors of transformers."""
    install(session, "transformers", "timm", "scipy", "kernels", "numpy", *PYTEST)
    names = ("test_bridge", "test_transformers", "test_transformers_install", "test_hf_kernel")
    tests = [f"tests/compat/{name}.py" for name in names]
    run(session, "-m", "pytest", *tests, VISDET_CHECK_TRANSFORMERS="1")


@nox.session(name="check-runtimes")
def check_runtimes(session: nox.Session) -> None:
    """The table of other runtimes in docs/export.md; npm brings the one of browsers, and node runs it."""
    session.install(*TORCH)
    requirements(session, "--extra", "export")
    packages = ["MNN", "apache-tvm", "tract", "iree-base-compiler[onnx]", "iree-base-runtime"]
    session.install(*(session.posargs or packages))
    folder = session.create_tmp()
    session.run("npm", "install", "--prefix", folder, "onnxruntime-web", external=True)
    arguments = ("-m", "benchmarks.runtimes", "work_dirs/runtimes", "--write-docs")
    run(session, *arguments, NODE_PATH=f"{folder}/node_modules")


@nox.session(name="test-onedl")
def test_onedl(session: nox.Session) -> None:
    """Engine, data, metrics and tools on onedl-mmengine, which provides the package mmengine."""
    session.install(*TORCH)
    requirements(session, "--mmengine", *(session.posargs or ["onedl-mmengine==0.10.12"]))
    rooms = ("engine", "tools", "configs", "datasets", "evaluation", "visualization")
    run(session, "-m", "pytest", "-m", "not slow", *(f"tests/{room}" for room in rooms))


@nox.session(name="test-pythons", python=["3.10", "3.13"])
def test_pythons(session: nox.Session) -> None:
    """The tests that are not slow on other versions of Python."""
    session.install(*TORCH)
    requirements(session)
    run(session, "-m", "pytest", "-m", "not slow", *session.posargs)


@nox.session(name="abi-check")
def abi_check(session: nox.Session) -> None:
    """The operators' tests under the oldest supported torch, on libraries built with the newest."""
    oldest = ["torch==2.10.*", "torchvision==0.25.*"]
    install(session, "numpy", "hypothesis", *PYTEST, torch=oldest)
    run(session, "-m", "pytest", "tests/ops")
