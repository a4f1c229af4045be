"""A folder for PYTHONPATH, whose ``sitecustomize`` Python runs at every start (docs/bridges.md)."""
