"""As many threads as the container may run at once, on however many cores."""

import math
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from onbeat.machine.cores import available_cores, cpu_quota, physical_cores, run_on_cores
from services.trainer import device


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, math.inf),  # no control groups
        ({"cpu.max": "max 100000"}, math.inf),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
    ],
)
def test_quota_of_either_version_of_control_groups(tmp_path, files, cpus):
    (tmp_path / "cpu").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert cpu_quota(tmp_path) == cpus


@pytest.mark.parametrize(
    ("quota", "num_ranks", "num_threads"), [(math.inf, 1, 6), (math.inf, 2, 3), (2.0, 1, 2), (0.5, 1, 1), (4.0, 2, 2)]
)
def test_threads_of_a_rank(monkeypatch, quota, num_ranks, num_threads):
    used: list[int] = []
    affinities = {0: set(range(6))}
    monkeypatch.setattr(os, "sched_getaffinity", affinities.__getitem__)
    monkeypatch.setattr(os, "sched_setaffinity", affinities.__setitem__)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(device, "cpu_quota", lambda: quota)
    device.first_cores.cache_clear()
    for _ in range(2):  # the second of two jobs begins with the cores that the first one has left
        assert device.pin_cores("", 0, num_ranks) == num_threads
    device.first_cores.cache_clear()
    assert used == [num_threads] * 2


def test_a_bound_thread_gets_all_cores_that_the_system_allows():
    first, last = available_cores()[0], available_cores()[-1]

    def run(text: str) -> list[int]:
        os.sched_setaffinity(0, {first})  # as OpenMP does to the main thread where OMP_PROC_BIND is set
        return run_on_cores(text)

    with ThreadPoolExecutor(1) as another_thread:
        assert another_thread.submit(run, f"{last},4000").result() == [last]
        for text in ("4000", "99999999999"):
            with pytest.raises(ValueError, match=f"none of the cores {text} may be used .*; it runs on {first}"):
                another_thread.submit(run, text).result()


def test_hardware_threads_of_one_core_count_once(tmp_path):
    for core, siblings in {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}.items():
        (topology := tmp_path / f"cpu{core}" / "topology").mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    assert physical_cores([0, 1, 2, 3], tmp_path) == [0, 1]
    assert physical_cores([2, 3], tmp_path) == [2, 3]
    assert physical_cores([0, 2], tmp_path / "not told") == [0, 2]
