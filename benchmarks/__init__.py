"""Benchmarks of the operators: ``python -m benchmarks.run --help``, from the root of the repository.

A new operator adds ``benchmarks/ops/<op>.py`` with a list ``CASES`` of ``benchmarks.case.Case``, and nothing else.
"""
