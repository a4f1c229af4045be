"""Benchmarks of the operators. Run ``python -m benchmarks.run --help`` in the root of the repository.

A new operator only needs a file ``benchmarks/ops/<op>.py`` with a list ``CASES`` of ``benchmarks.case.Case``.
"""
