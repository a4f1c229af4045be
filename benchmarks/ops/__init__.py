"""One file per operator, each with a list ``CASES``; ``benchmarks.run`` finds them by looking into this folder."""
