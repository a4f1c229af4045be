"""Tools that test the operators, such as the fuzzer ``python -m visdet.testing.fuzz``."""
