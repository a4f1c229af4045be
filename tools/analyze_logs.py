"""Run ``visdet curves`` from a clone."""

import sys

from visdet.commands import main

if __name__ == "__main__":
    main(["curves", *sys.argv[1:]])
