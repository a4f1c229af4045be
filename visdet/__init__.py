"""Detection operators, modules and detectors for PyTorch, chosen from mmengine-style configs."""

__version__ = "0.1.0"
