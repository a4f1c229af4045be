"""Run ``visdet prepare-nuscenes`` from a clone."""

import sys

from visdet.commands import main

if __name__ == "__main__":
    main(["prepare-nuscenes", *sys.argv[1:]])
