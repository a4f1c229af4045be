"""Run ``visdet visualize-driving`` from a clone."""

import sys

from visdet.commands import main

if __name__ == "__main__":
    main(["visualize-driving", *sys.argv[1:]])
