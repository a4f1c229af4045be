"""One file per operator with a list ``CASES``. ``benchmarks.run`` finds all files in this folder."""
