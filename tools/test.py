"""Run ``visdet test`` from a clone."""

import sys

from visdet.commands import main

if __name__ == "__main__":
    main(["test", *sys.argv[1:]])
