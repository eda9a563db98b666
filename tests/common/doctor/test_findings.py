"""Messages about limits, outliers, differences and states, and which make a machine unfit."""

import pytest

from common.doctor.findings import MeasuredUnit, find
from common.doctor.limits import Limit
from common.doctor.reading import Reading


def gpu(where, model="H200", **values):
    return MeasuredUnit("gpu", where, {name: Reading(value) for name, value in values.items()}, model)


def node(where, **values):
    return MeasuredUnit("node", where, {name: Reading(value) for name, value in values.items()})


def texts(units, limits=None):
    return [finding.text for finding in find(units, limits or {})]


def unfit(units, limits=None):
    return [finding.where for finding in find(units, limits or {}) if finding.unfit]


def test_alike_gpus_have_no_findings():
    assert texts([gpu(f"n1 GPU {i}", matrix_bf16_tflops=700.0 + i, driver_version="580.1") for i in range(8)]) == []


def test_a_slow_gpu_is_named_with_its_distance_from_the_median():
    units = [gpu(f"gpu{n:02} GPU {i}", matrix_bf16_tflops=775.0) for n in range(8) for i in range(8)]
    units[29] = gpu("gpu03 GPU 5", matrix_bf16_tflops=612.0)
    assert texts(units) == ["gpu03 GPU 5: matrix product in bf16 612 TFLOP/s, 21 % below the median of 64 GPUs"]
    assert unfit(units) == ["gpu03 GPU 5"]


def test_a_slow_latency_is_an_outlier_above():
    units = [node(f"n{i}", node_all_reduce_32kb_us=20.0) for i in range(3)] + [node("n9", node_all_reduce_32kb_us=50.0)]
    assert texts(units) == ["n9: all-reduce of 32 KB in the node 50.0 µs, 150 % above the median of 4 nodes"]


def test_a_fast_gpu_is_no_outlier():
    assert (
        texts([gpu("a", memory_copy_gbs=3000.0), gpu("b", memory_copy_gbs=3000.0), gpu("c", memory_copy_gbs=9e3)]) == []
    )


def test_the_slower_of_two_is_named_but_not_unfit():
    units = [gpu("a", matrix_bf16_tflops=700.0), gpu("b", matrix_bf16_tflops=560.0)]
    assert texts(units) == ["b: matrix product in bf16 560 TFLOP/s, 20 % below the other"]
    assert unfit(units) == []


def test_only_gpus_of_one_model_are_compared():
    fast = [gpu(f"h{i}", memory_copy_gbs=4000.0) for i in range(3)]
    slow = [gpu(f"a{i}", model="A100", memory_copy_gbs=1700.0) for i in range(3)]
    assert texts([*fast, *slow]) == []


def test_a_lost_link_is_an_outlier_without_any_tolerance():
    assert unfit([gpu(f"GPU {i}", nvlinks_active=18 if i else 17) for i in range(4)]) == ["GPU 0"]


def test_the_tolerance_can_be_set():
    units = [gpu(f"GPU {i}", matrix_bf16_tflops=700.0 if i else 600.0) for i in range(4)]
    assert unfit(units, {"gpu.matrix_bf16_tflops": Limit(spread=20.0)}) == []
    assert unfit(units) == ["GPU 0"]


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (Limit(min=650.0), "a: matrix product in bf16 612 TFLOP/s, below the limit of 650 TFLOP/s"),
        (Limit(max=600.0), "a: matrix product in bf16 612 TFLOP/s, above the limit of 600 TFLOP/s"),
    ],
)
def test_a_broken_limit_is_named_with_both_numbers(limit, message):
    assert texts([gpu("a", matrix_bf16_tflops=612.0)], {"gpu.matrix_bf16_tflops": limit}) == [message]


def test_a_kept_limit_is_silent_at_its_bound():
    limits = {"gpu.matrix_bf16_tflops": Limit(min=612.0, max=612.0)}
    assert texts([gpu("a", matrix_bf16_tflops=612.0)], limits) == []


def test_a_maximum_of_zero_is_a_limit():
    limits = {"gpu.xid_hardware": Limit(max=0.0)}
    assert texts([gpu("a", xid_hardware=2)], limits) == [
        "a: XID errors of the hardware since boot 2, above the limit of 0"
    ]
    assert texts([gpu("a", xid_hardware=0)], limits) == []


def test_a_figure_that_is_no_number_any_more_breaks_its_limit():
    assert unfit([gpu("a", matrix_bf16_tflops=float("nan"))], {"gpu.matrix_bf16_tflops": Limit(min=1.0)}) == ["a"]


def test_a_state_of_yes_or_no_can_be_limited():
    limits = {"gpu.remapping_pending": Limit(max=0.0), "gpu.matrix_repeats": Limit(min=1.0)}
    message = texts([gpu("a", remapping_pending=True, matrix_repeats=False)], limits)
    assert message == [
        "a: row remapping or page retirement waits for a reset: yes",
        "a: matrix products repeat bit for bit: no",
    ]
    assert texts([gpu("a", remapping_pending=False, matrix_repeats=True)], limits) == []


def test_an_unlimited_figure_keeps_every_minimum():
    assert texts([node("a", open_files=float("inf"))], {"node.open_files": Limit(min=1024.0)}) == []


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (3200.0, "n2: clock is 3.2 s ahead of rank 0, above the limit of 50 ms"),
        (-80.0, "n2: clock is 80 ms behind rank 0, above the limit of 50 ms"),
    ],
)
def test_clock_limits_hold_in_both_directions(offset, message):
    assert texts([node("n2", clock_offset_ms=offset)], {"node.clock_offset_ms": Limit(max=50.0)}) == [message]


def test_limits_are_of_a_scope():
    assert texts([gpu("a", memory_gb=80.0)], {"node.memory_gb": Limit(min=1000.0)}) == []


def test_a_unit_that_differs_is_named():
    units = [node(f"n{i}", kernel_version="6.8" if i != 3 else "5.15") for i in range(8)]
    assert texts(units) == ["n3: kernel is 5.15; 7 of 8 nodes have 6.8"]
    assert unfit(units) == ["n3"]


def test_without_a_usual_value_all_values_are_listed():
    units = [node("n1", torch_version="2.11"), node("n2", torch_version="2.12")]
    assert texts(units) == ["PyTorch differs: 2.11 on n1; 2.12 on n2"]
    assert len(unfit(units)) == 1


def test_a_failed_check_makes_unfit():
    units = [MeasuredUnit("node", "n1", {"storage_read_gbs@/data": Reading(failed="Input/output error")})]
    assert texts(units) == ["n1: storage read past the page cache (/data): Input/output error"]
    assert unfit(units) == ["n1"]


def test_a_limit_holds_for_each_path():
    units = [MeasuredUnit("node", "n1", {"storage_read_gbs@/data": Reading(0.5)})]
    assert unfit(units, {"node.storage_read_gbs": Limit(min=2.0)}) == ["n1"]


def test_checks_that_could_not_run_are_grouped_and_make_nothing_unfit():
    missing = {name: Reading(missing="not permitted") for name in ("xid_hardware", "xid_application")}
    units = [MeasuredUnit("gpu", f"n1 GPU {i}", missing) for i in range(2)]
    titles = "XID errors of the hardware since boot, XID errors of applications since boot"
    assert texts(units) == [f"n1 GPU 0, n1 GPU 1: {titles}: not permitted"]
    assert unfit(units, {"gpu.xid_hardware": Limit(max=0.0)}) == []


def test_what_makes_unfit_comes_first():
    units = [gpu("a", power_limit_w=500.0, power_limit_default_w=700.0), gpu("b", xid_hardware=1)]
    assert [f.unfit for f in find(units, {"gpu.xid_hardware": Limit(max=0.0)})] == [True, False]


def test_missing_pcie_lanes_make_unfit():
    assert texts([gpu("a", pcie_width=8, pcie_width_max=16)]) == [
        "a: the PCIe link has 8 of 16 lanes: reseat the GPU, or look at the riser"
    ]
    assert unfit([gpu("a", pcie_width=8, pcie_width_max=16)]) == ["a"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pcie_generation": 3, "pcie_generation_max": 5}, "a: the PCIe link runs at generation 3 of 5 after load"),
        (
            {"power_limit_w": 500.0, "power_limit_default_w": 700.0},
            "a: the power limit is 500 W, the board's own is 700 W",
        ),
        ({"clocks_limited": "power brake"}, "a: the clocks were held down before any load: power brake"),
        ({"mig_enabled": True}, "a: MIG is enabled: NCCL cannot join its instances"),
    ],
)
def test_other_states_are_named_but_not_unfit(values, message):
    assert texts([gpu("a", **values)]) == [message]
    assert unfit([gpu("a", **values)]) == []


def test_a_low_limit_of_open_files_is_named_but_not_unfit():
    low = [node("n1", open_files=4096.0)]
    assert texts(low) == ["n1: only 4,096 files may be open, and a large job may need 65,536: ulimit -n"]
    assert unfit(low) == []
    assert texts([node("n1", open_files=65536.0)]) == []


def test_infiniband_needs_memory_that_may_be_locked():
    assert unfit([node("n1", memlock_gb=0.008, infiniband_active=8)]) == ["n1"]
    assert unfit([node("n1", memlock_gb=0.008)]) == []
    assert unfit([node("n1", memlock_gb=float("inf"), infiniband_active=8)]) == []
