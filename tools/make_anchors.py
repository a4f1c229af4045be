"""Run ``visdet make-anchors`` from a clone."""

import sys

from visdet.commands import main

if __name__ == "__main__":
    main(["make-anchors", *sys.argv[1:]])
