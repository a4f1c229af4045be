"""A folder for PYTHONPATH: Python runs its ``sitecustomize`` at every start (docs/compat_transformers.md)."""
