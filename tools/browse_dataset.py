"""Run ``visdet browse`` from a clone."""

import sys

from visdet.commands import main

if __name__ == "__main__":
    main(["browse", *sys.argv[1:]])
