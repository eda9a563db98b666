"""Ranks of :mod:`tests.common.run.scripted_evaluation` under the suite's own launcher: first, how many."""

import sys

from common.distributed.launcher import relaunch

if __name__ == "__main__":
    command = (sys.executable, "-m", "tests.common.run.scripted_evaluation", sys.argv[2])
    sys.exit(relaunch(int(sys.argv[1]), sys.argv[3:], command=command))
