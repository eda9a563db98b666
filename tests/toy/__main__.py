"""``python -m tests.toy``: ``mlperf-suite`` with one more workload."""

from common import cli
from tests import toy

toy.register()
cli.main()
