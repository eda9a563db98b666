"""A rank that says who it is, and then nothing more."""

import os
import signal

import torch

from common.distributed.startup import find_rank_info, initialise
from common.doctor.meeting import Meeting

if __name__ == "__main__":
    place = find_rank_info(os.environ)
    initialise(place, torch.device("cpu"), 200)
    who = {"rank": place.rank, "local_rank": 0, "node": place.node, "name": "n2", "device": "cpu"}
    Meeting(place).post("rank", who)
    signal.pause()
