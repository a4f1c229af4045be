# make demo   set up, then train, evaluate and draw a small DINO on generated images (two CPU cores, minutes)
# make demo-drive   set up, then train SparseDrive's two stages on generated driving scenes, evaluate and draw it
# make test   set up, then lint, compile every .cu file, build the documentation, and run the tests
# make docs   the documentation as a site, in work_dirs/docs
# make bench  operators against plain torch and installed peers, checked first, then whole models; tables in work_dirs/bench
# make check-mmdet  stock mmdet 3.3 configs on visdet's operators, in an environment of its own (docs/mmcv_lite.md)
# make check-mmrotate  stock mmrotate 1.x configs on visdet's operators, in an environment of its own (docs/mmrotate.md)
# make check-mmdet3d  stock mmdet3d 1.4 configs on visdet's operators, in an environment of its own (docs/mmdet3d.md)
# make check-mmcv1  mmcv 1.x as pure Python under visdet.compat, in an environment of its own
# make wheel  one wheel for every Python and torch, with code for every GPU from compute capability 7.5 on, in dist
# make wheel-aarch64  a wheel for Linux on aarch64 without CUDA, by Debian's g++-aarch64-linux-gnu, in dist
# make check-wheel  a wheel in a fresh environment beside WITH_TORCH, and the operators' tests run on it
# make abi-check  the operators' tests under the oldest supported torch, on libraries built with the newest
# make check-devkit  nuScenes' metrics and the converter against the devkit
# make test-onedl  the engine's and the tools' tests on onedl-mmengine instead of mmengine
# make test-pythons  the quick tests on Python 3.10 and 3.13
# make check-packages  the bridges of ultralytics, rfdetr, groundingdino and libreyolo against those packages
# make check-trees  docs/real_photographs.md from the wheel with the photographs to detections (20 minutes on a CPU)
# make check-transformers  all detectors of transformers on visdet's operators (docs/compat_transformers.md)
# make hf-kernel  the operators as a kernel repository for Hugging Face's package kernels, in dist/hf-kernel
# make setup  virtual environment in .venv, dependencies, operators; quick when nothing changed
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK = 1

# The pair the package is developed with. Any torch >= 2.10 serves: make setup TORCH="torch torchvision".
TORCH ?= torch==2.14.1 torchvision==0.29.1
CONFIG ?= configs/dino/dino_shapes.py
WORK_DIR ?= work_dirs/$(basename $(notdir $(CONFIG)))
SOURCES := setup.py $(shell find visdet/ops/csrc -type f)
LINTED := visdet tools tests configs benchmarks docs setup.py

.PHONY: setup demo demo-drive train test lint docs format cuda-check abi-check check-mmdet wheel check-wheel bench clean

setup: $(VENV)/.installed $(VENV)/.built

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet "setuptools>=77" wheel ninja
	$(BIN)/python tools/install_requirements.py --extra train --extra export --extra test --extra lint --extra docs
	touch $@

$(VENV)/.built: $(SOURCES) $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps -e .
	$(BIN)/python -m visdet.doctor
	touch $@

# bfloat16 where the processor computes in it: a third less time, the same accuracy.
AMP ?= $(shell grep -qsw avx512_bf16 /proc/cpuinfo && echo --amp)
# Threads that wait spin for a moment before they sleep. To wake a thread that sleeps takes as long as many of the demos'
# operators, and a thread that spins takes its core from other processes. The demos' threads therefore spin for longer
# than those of the tools only where at least 1.7 cores are idle within a second. GOMP_SPINCOUNT=N sets another number.
# With less than 1.3 idle cores, two threads would wait for each other, in convolutions above all: one thread takes half
# the time. OMP_NUM_THREADS=N sets another number.
ifneq ($(filter demo demo-drive,$(MAKECMDGOALS)),)
# In hundredths of a core; nothing where the system does not say.
IDLE := $(shell idle() { awk '/^cpu /{print $$5}' /proc/stat; }; before=$$(idle) && sleep 1 && echo $$(($$(idle) - before)))
ifeq ($(GOMP_SPINCOUNT)$(OMP_WAIT_POLICY),)
export GOMP_SPINCOUNT := $(shell test "$(IDLE)" -ge 170 2> /dev/null && echo 4000 || echo 1000)
endif
ifeq ($(origin OMP_NUM_THREADS),file)
OMP_NUM_THREADS := $(shell test "$(IDLE)" -lt 130 2> /dev/null && echo 1 || echo 2)
endif
endif
demo: setup
	$(BIN)/visdet train $(CONFIG) --work-dir $(WORK_DIR) $(AMP)
	@$(BIN)/visdet curves $(WORK_DIR)
	@echo
	@echo "Look at    $(WORK_DIR)/val_pictures/  (truth beside detections)   $(WORK_DIR)/curves.png"
	@echo "Curves     $(BIN)/tensorboard --logdir $(WORK_DIR)"
	@echo "Detect     $(BIN)/visdet infer $(CONFIG) $(WORK_DIR)/best_*.pth data/shapes/val"

DRIVE := work_dirs/sparsedrive_toy
DRIVE_SCENES := data/driving_scenes
# The validation of the second stage measures the boxes and the map of the first one, too.
demo-drive: setup $(DRIVE_SCENES)/kmeans_plan_1.npy
	$(BIN)/visdet train configs/sparsedrive/sparsedrive_toy_stage1.py --work-dir $(DRIVE)_stage1 $(AMP) \
		--cfg-options val_dataloader=None val_cfg=None val_evaluator=None
	$(BIN)/visdet train configs/sparsedrive/sparsedrive_toy_stage2.py --work-dir $(DRIVE)_stage2 $(AMP) \
		--cfg-options load_from="$$(cat $(DRIVE)_stage1/last_checkpoint)"
	$(BIN)/visdet test configs/sparsedrive/sparsedrive_toy_stage2.py \
		"$$(cat $(DRIVE)_stage2/last_checkpoint)" --work-dir $(DRIVE)_test
	$(BIN)/visdet visualize-driving configs/sparsedrive/sparsedrive_toy_stage2.py \
		"$$(cat $(DRIVE)_stage2/last_checkpoint)" --out-dir $(DRIVE)_pictures
	@$(BIN)/visdet curves $(DRIVE)_stage2
	@echo
	@echo "Look at    $(DRIVE)_pictures/scene_000_*.png  (cameras and the view from above, a picture per frame)"
	@echo "Play       $(DRIVE)_pictures/scene_000.gif    (the whole scene)"
	@echo "Curves     $(BIN)/tensorboard --logdir work_dirs"

$(DRIVE_SCENES)/kmeans_plan_1.npy: | setup
	$(BIN)/visdet make-anchors $(DRIVE_SCENES) --out-dir $(DRIVE_SCENES) --det 128 --map 30 --plan 1 \
		--max-distance 33

train: setup
	$(BIN)/visdet train $(CONFIG)

# Two processes: each test uses one thread, and no two share a file or a port.
TEST_PROCESSES ?= 2
test: setup
	$(MAKE) --no-print-directory --jobs=2 lint cuda-check docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal

lint: setup
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/clang-format --dry-run --Werror $(filter %.h %.cpp %.cu %.cuh,$(SOURCES)) $(wildcard examples/*/*.h examples/*/*.cpp)
	$(BIN)/mypy
	$(BIN)/torch-abi-audit --check torch visdet/ops/*.so

# The site with the API reference, in work_dirs/docs. A broken link or a public name without an entry is an error.
docs: setup
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs work_dirs/docs

format: setup
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)
	$(BIN)/clang-format -i $(filter %.h %.cpp %.cu %.cuh,$(SOURCES)) $(wildcard examples/*/*.h examples/*/*.cpp)

# Every .cu file for the oldest supported GPU and for sm_90, on a machine with or without a GPU; nvcc comes from the package
# registry where there is none.
cuda-check: setup
	$(BIN)/python tools/cuda_check.py

# Built with the newest torch, loaded and run under the oldest supported one, in a virtual environment of its own.
OLDEST_TORCH ?= torch==2.10.* torchvision==0.25.*
abi-check: setup
	$(PYTHON) -m venv $(VENV)-oldest-torch
	$(VENV)-oldest-torch/bin/python -m pip install --quiet $(OLDEST_TORCH) numpy pytest pytest-timeout hypothesis
	OMP_NUM_THREADS=1 $(VENV)-oldest-torch/bin/python -m pytest tests/ops

bench: setup
	$(BIN)/python -m benchmarks.run --out work_dirs/bench
	$(BIN)/python -m benchmarks.models --out work_dirs/bench
	$(BIN)/python -m benchmarks.runs --out work_dirs/bench
	$(BIN)/python -m benchmarks.transforms --out work_dirs/bench

wheel: setup
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@ls -l dist/*.whl

# The libraries of torch for aarch64 are needed to link; the headers are those of the torch of this machine.
TORCH_AARCH64 ?= torch==2.10.0
.PHONY: wheel-aarch64
wheel-aarch64: setup
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --platform manylinux_2_28_aarch64 \
		--dest build/aarch64 $(TORCH_AARCH64)
	$(BIN)/python -m zipfile -e build/aarch64/torch-*.whl build/aarch64
	CXX=aarch64-linux-gnu-g++ LDFLAGS=-L$(CURDIR)/build/aarch64/torch/lib VISDET_CUDA=0 \
		$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@ls -l dist/*.whl

# make check-wheel WITH_TORCH="torch==2.10.* torchvision==0.25.*" WHEEL=dist/visdet_ops-….whl checks an existing wheel;
# without WHEEL one is built for WHEEL_GPU alone.
WITH_TORCH ?= $(TORCH)
WHEEL_GPU ?= 9.0
check-wheel: setup
	TORCH_CUDA_ARCH_LIST="$(WHEEL_GPU)" OMP_NUM_THREADS=1 $(BIN)/python tools/check_wheel.py \
		--torch $(WITH_TORCH) --environment $(VENV)-wheel $(if $(WHEEL),--wheel $(WHEEL))

clean:
	rm -rf build dist visdet_ops.egg-info visdet/ops/*.so .pytest_cache .ruff_cache .mypy_cache

# mmdet 3.3 on mmcv-lite, in an environment of its own. PAA needs scikit-learn.
MMDET ?= mmcv-lite==2.1.0 mmdet==3.3.0 scikit-learn tqdm
check-mmdet: setup
	$(PYTHON) -m venv $(VENV)-mmdet
	$(VENV)-mmdet/bin/python -m pip install --quiet $(TORCH) mmengine $(MMDET)
	PYTHONPATH=$(CURDIR) $(VENV)-mmdet/bin/python tools/check_mmdet_configs.py

# mmrotate 1.x on mmcv-lite, in an environment of its own. mmrotate refuses newer versions of mmcv and mmdet.
MMROTATE ?= mmrotate==1.0.0rc1 mmdet==3.0.0 mmcv-lite==2.0.1
.PHONY: check-mmrotate
check-mmrotate: setup
	$(PYTHON) -m venv $(VENV)-mmrotate
	$(VENV)-mmrotate/bin/python -m pip install --quiet $(TORCH) $(MMROTATE)
	PYTHONPATH=$(CURDIR) $(VENV)-mmrotate/bin/python tools/check_mmrotate_configs.py

# mmdet3d 1.4 under visdet.compat, in an environment of its own, without its requirement of an older numpy.
MMDET3D ?= mmcv-lite==2.1.0 mmdet==3.3.0
.PHONY: check-mmdet3d
check-mmdet3d: setup
	$(PYTHON) -m venv $(VENV)-mmdet3d
	$(VENV)-mmdet3d/bin/python -m pip install --quiet $(TORCH) mmengine $(MMDET3D)
	$(VENV)-mmdet3d/bin/python -m pip install --quiet numba trimesh plyfile pandas scikit-learn scikit-image cachetools
	$(VENV)-mmdet3d/bin/python -m pip install --quiet --no-deps mmdet3d==1.4.0 nuscenes-devkit lyft-dataset-sdk \
		pyquaternion open3d
	PYTHONPATH=$(CURDIR) $(VENV)-mmdet3d/bin/python tools/check_mmdet3d_configs.py

# mmcv 1.x under visdet.compat, in an environment of its own; nothing is skipped there. Its setup needs an old setuptools.
MMCV1 ?= mmcv==1.7.2
.PHONY: check-mmcv1
check-mmcv1: setup
	$(PYTHON) -m venv $(VENV)-mmcv1
	$(VENV)-mmcv1/bin/python -m pip install --quiet $(TORCH) "setuptools<81" wheel pytest pytest-timeout
	$(VENV)-mmcv1/bin/python -m pip install --quiet --no-build-isolation $(MMCV1)
	VISDET_CHECK=check-mmcv1 PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $(VENV)-mmcv1/bin/python -m pytest \
		tests/compat/test_mmcv_1.py

# nuScenes' metrics and the converter against the devkit, in an environment of their own; nothing is skipped there.
# The devkit is installed without its own requirements: it asks for numpy below 2.
DEVKIT ?= pyquaternion cachetools descartes fire parameterized scikit-learn tqdm pandas motmetrics shapely
.PHONY: check-devkit
check-devkit: setup
	$(PYTHON) -m venv $(VENV)-devkit
	$(VENV)-devkit/bin/python -m pip install --quiet $(TORCH)
	$(VENV)-devkit/bin/python tools/install_requirements.py --extra train --extra test
	$(VENV)-devkit/bin/python -m pip install --quiet $(DEVKIT)
	$(VENV)-devkit/bin/python -m pip install --quiet --no-deps nuscenes-devkit
	VISDET_CHECK=check-devkit OMP_NUM_THREADS=1 $(VENV)-devkit/bin/python -m pytest \
		tests/evaluation/test_nuscenes_devkit.py tests/tools/test_prepare_nuscenes_devkit.py

# Engine, data, metrics and tools on onedl-mmengine, which provides the package mmengine too, in an environment of its own.
ONEDL ?= onedl-mmengine==0.10.12
.PHONY: test-onedl
test-onedl: setup
	$(PYTHON) -m venv $(VENV)-onedl
	$(VENV)-onedl/bin/python -m pip install --quiet $(TORCH)
	$(VENV)-onedl/bin/python tools/install_requirements.py --extra train --extra test --mmengine "$(ONEDL)"
	! $(VENV)-onedl/bin/python -m pip show --quiet mmengine 2> /dev/null
	PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $(VENV)-onedl/bin/python -m pytest -m "not slow" \
		tests/engine tests/tools tests/configs tests/datasets tests/evaluation tests/visualization

# The tests that are not slow, on other versions of Python, each in an environment of its own.
PYTHONS ?= python3.10 python3.13
.PHONY: test-pythons
test-pythons: setup
	set -e; for python in $(PYTHONS); do \
		$$python -m venv $(VENV)-$$(basename $$python); \
		environment=$(VENV)-$$(basename $$python)/bin/python; \
		$$environment -m pip install --quiet $(TORCH); \
		$$environment tools/install_requirements.py --extra train --extra test; \
		PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $$environment -m pytest -m "not slow"; \
	done

# The attention modules of other detector packages against visdet.compat; nothing is skipped there.
PACKAGES ?= ultralytics rfdetr groundingdino-py libreyolo
.PHONY: check-packages
check-packages: setup
	$(PYTHON) -m venv $(VENV)-packages
	$(VENV)-packages/bin/python -m pip install --quiet $(TORCH) setuptools wheel pytest pytest-timeout
	$(VENV)-packages/bin/python -m pip install --quiet --no-build-isolation $(PACKAGES)
	VISDET_CHECK=check-packages OMP_NUM_THREADS=1 $(VENV)-packages/bin/python -m pytest \
		tests/compat/test_other_packages.py

# The page on trees. The photographs are in the wheel of deepforest.
check-trees: setup
	$(BIN)/python -m pip download --quiet --no-deps --dest work_dirs/deepforest deepforest
	cd work_dirs/deepforest && $(CURDIR)/$(BIN)/python -m zipfile -e deepforest-*.whl .
	VISDET_TREES=$(CURDIR)/work_dirs/deepforest/deepforest/data $(BIN)/python -m pytest tests/test_real_photographs.py

# All detectors of transformers against visdet.compat, in an environment of their own; nothing is skipped there.
TRANSFORMERS ?= transformers timm scipy kernels
.PHONY: check-transformers
check-transformers: setup
	$(PYTHON) -m venv $(VENV)-transformers
	$(VENV)-transformers/bin/python -m pip install --quiet $(TORCH) $(TRANSFORMERS) numpy pytest pytest-timeout
	VISDET_CHECK_TRANSFORMERS=1 OMP_NUM_THREADS=1 $(VENV)-transformers/bin/python -m pytest \
		tests/compat/test_bridge.py tests/compat/test_transformers.py tests/compat/test_transformers_install.py \
		tests/compat/test_hf_kernel.py

.PHONY: hf-kernel
hf-kernel: setup
	$(BIN)/python tools/make_hf_kernel.py --out dist/hf-kernel
