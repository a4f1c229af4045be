"""Run ``visdet infer`` from a clone."""

import sys

from visdet.commands import main

if __name__ == "__main__":
    main(["infer", *sys.argv[1:]])
