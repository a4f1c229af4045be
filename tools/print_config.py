"""Run ``visdet print-config`` from a clone."""

import sys

from visdet.commands import main

if __name__ == "__main__":
    main(["print-config", *sys.argv[1:]])
