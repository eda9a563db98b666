"""Ranks of the toys' command line under the suite's own launcher: first, how many."""

import sys

from common.distributed.launcher import relaunch

if __name__ == "__main__":
    sys.exit(relaunch(int(sys.argv[1]), sys.argv[2:], command=(sys.executable, "-m", "tests.toy")))
