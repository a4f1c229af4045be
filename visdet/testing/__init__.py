"""Tools that test the operators: see ``python -m visdet.testing.fuzz --help``."""
