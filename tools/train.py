"""Run ``visdet train`` from a clone."""

import sys

from visdet.commands import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
