"""``python -m tests.launch MODULE RANKS ARGUMENTS...``: start ``MODULE`` as ranks, with the suite's own launcher."""

import sys

from common.distributed.launcher import relaunch

if __name__ == "__main__":
    sys.exit(relaunch(int(sys.argv[2]), sys.argv[3:], command=(sys.executable, "-m", sys.argv[1])))
