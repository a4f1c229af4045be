# make demo         set up, then train, evaluate and draw a small DINO on generated images (two CPU cores, minutes)
# make demo-drive   set up, then train SparseDrive's two stages on generated driving scenes, evaluate and draw it
# make test         set up, then lint, compile every .cu file, build the documentation, and run the tests
# make docs         the documentation as a site, in work_dirs/docs
# make bench        operators against plain torch and installed peers, then whole models; tables in work_dirs/bench
# make wheel        one wheel for every Python and torch, in dist; wheel-aarch64 makes one for the CPU there
# make check-wheel  a wheel in a fresh environment, and the operators' tests run on it
# make check-trees  docs/real_photographs.md from a wheel with the photographs to detections (20 minutes)
# make hf-kernel    the operators as a kernel repository for Hugging Face's package kernels, in dist/hf-kernel
# make setup        virtual environment in .venv, dependencies, operators; quick when nothing changed
# make nox          the names of what runs in an environment of its own (noxfile.py), such as make check-mmdet
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
LINTED := visdet tools tests configs benchmarks docs setup.py noxfile.py

.PHONY: setup demo demo-drive train test lint docs format cuda-check wheel check-wheel bench clean

setup: $(VENV)/.installed $(VENV)/.built

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel ninja
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python tools/install_requirements.py --extra train --extra export --extra test --extra lint --extra docs
	touch $@

$(VENV)/.built: $(SOURCES) $(VENV)/.installed
	$(BIN)/python setup.py --quiet build_ext --inplace
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps -e .
	$(BIN)/python -m visdet.doctor
	touch $@

# bfloat16 where the processor computes in it: a third less time, the same accuracy.
AMP ?= $(shell grep -qsw avx512_bf16 /proc/cpuinfo && echo --amp)
# Waking a thread takes as long as many of the demos' operators, and a thread that spins takes its core from others. The
# demos' threads therefore spin for longer where at least 1.7 cores are idle, and there is one where fewer than 1.3 are.
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
	rm -rf $(WORK_DIR)
	$(BIN)/visdet train $(CONFIG) --work-dir $(WORK_DIR) $(AMP)
	@$(BIN)/visdet curves $(WORK_DIR)
	@echo
	@echo "Look at    $(WORK_DIR)/val_pictures/  (truth beside detections)   $(WORK_DIR)/curves.png"
	@echo "Curves     $(BIN)/tensorboard --logdir $(WORK_DIR)"
	@echo "Detect     $(BIN)/visdet infer $(WORK_DIR)/best.pth data/shapes/val"

DRIVE := work_dirs/sparsedrive_toy
DRIVE_SCENES := data/driving_scenes
# The validation of the second stage measures the boxes and the map of the first one, too.
demo-drive: setup $(DRIVE_SCENES)/kmeans_plan_1.npy
	rm -rf $(DRIVE)_stage1 $(DRIVE)_stage2
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

bench: setup
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.models
	$(BIN)/python -m benchmarks.runs
	$(BIN)/python -m benchmarks.transforms

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

# The page on trees. The photographs are in the wheel of deepforest.
check-trees: setup
	$(BIN)/python -m pip download --quiet --no-deps --dest work_dirs/deepforest deepforest
	cd work_dirs/deepforest && $(CURDIR)/$(BIN)/python -m zipfile -e deepforest-*.whl .
	VISDET_TREES=$(CURDIR)/work_dirs/deepforest/deepforest/data $(BIN)/python -m pytest tests/test_real_photographs.py

.PHONY: hf-kernel
hf-kernel: setup
	$(BIN)/python tools/make_hf_kernel.py --out dist/hf-kernel

# What needs other packages or versions has an environment of its own: noxfile.py.
ENVIRONMENTS := check-mmdet check-mmrotate check-mmdet3d check-mmcv1 check-devkit check-packages check-transformers \
	check-runtimes test-onedl test-pythons abi-check
.PHONY: nox $(ENVIRONMENTS)
$(ENVIRONMENTS): setup
	$(BIN)/nox -s $@
nox: setup
	$(BIN)/nox --list
