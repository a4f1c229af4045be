"""Run ``visdet make-shapes`` from a clone."""

import sys

from visdet.commands import main

if __name__ == "__main__":
    main(["make-shapes", *sys.argv[1:]])
