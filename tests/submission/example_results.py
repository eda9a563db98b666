"""Write the results of docs/submitting.md: ``python tests/submission/example_results.py DIR``; no GPU made the logs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from closed_logs import closed_log, drawn_convergence
from launched import make_repository, write_series

EXAMPLE = Path(__file__).parents[2] / "configs/submission/example.yaml"


def write_results(root: Path) -> None:
    """Write two series of ResNet-50, one of 3D U-Net, BERT's logs of another program, and ``submission.yaml``."""
    commit = make_repository(root / "clone")
    write_series(
        root / "results/resnet", "resnet", commit, [35, 35, 31, None, 39, 35, 35], lambda run: 10 + (run % 3) / 4
    )
    write_series(root / "more/unet3d", "unet3d", commit)
    write_series(root / "new/resnet", "resnet", commit, [39, 39, 39, 39, 35])
    (root / "bert/code").mkdir(parents=True)
    for run, samples in enumerate(drawn_convergence("bert")):
        (root / f"bert/run_{run}.log").write_text(closed_log("bert", 1000 + run, samples, minutes=9 + run / 10))
    for name in ("code/train.py", "README.md", "setup.sh", "init_datasets.sh"):
        (root / "bert" / name).write_text("# of the other program\n")
    shutil.copy(EXAMPLE, root / "submission.yaml")


if __name__ == "__main__":
    write_results(Path(sys.argv[1]))
