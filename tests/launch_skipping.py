"""Two ranks of :mod:`tests.skip_a_collective` under the suite's own launcher."""

import sys

from common.distributed.launcher import relaunch

if __name__ == "__main__":
    command = (sys.executable, "-m", "tests.skip_a_collective", sys.argv[1])
    sys.exit(relaunch(2, sys.argv[2:], command=command))
