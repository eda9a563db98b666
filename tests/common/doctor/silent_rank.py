"""A rank that sends its identity and then nothing more."""

import os
import signal

import torch

from common.distributed.startup import find_rank_info, initialise
from common.doctor.meeting import Meeting

if __name__ == "__main__":
    rank_info = find_rank_info(os.environ)
    initialise(rank_info, torch.device("cpu"), 200)
    identity = {"rank": rank_info.rank, "local_rank": 0, "node": rank_info.node, "name": "n2", "device": "cpu"}
    Meeting(rank_info).post("rank", identity)
    signal.pause()
