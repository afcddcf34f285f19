"""Free host memory is what cgroups and the kernel say, page cache counted as free (HAZARDS 8)."""

import pytest

from slideformer_backend.plan.host_budget import probe_host_budget

GIB = 1 << 30


@pytest.fixture
def root(tmp_path):
    """A machine of 100 GiB with 80 available, whose files tests add to."""

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("proc/meminfo", f"MemTotal: {100 * GIB // 1024} kB\nMemAvailable: {80 * GIB // 1024} kB\nSwapFree: 1024 kB\n")
    write("proc/self/cgroup", "")
    return tmp_path, write


def test_without_a_limit_the_kernels_figure_counts(root):
    folder, _ = root
    found = probe_host_budget(folder)
    assert (found.total, found.available, found.swap) == (100 * GIB, 80 * GIB, 1 << 20)
    assert "MemAvailable" in found.limited_by


def test_version_2_counts_page_cache_as_free_and_shared_memory_not(root):
    folder, write = root
    write("proc/self/cgroup", "0::/job\n")
    write("sys/fs/cgroup/job/memory.max", f"{40 * GIB}\n")
    write("sys/fs/cgroup/job/memory.current", f"{30 * GIB}\n")
    write("sys/fs/cgroup/job/memory.stat", f"anon {15 * GIB}\nfile {14 * GIB}\nshmem {2 * GIB}\n")
    found = probe_host_budget(folder)
    assert (found.total, found.available, found.swap) == (40 * GIB, (40 - 30 + 12) * GIB, 0)
    assert "cgroup" in found.limited_by


def test_the_tightest_of_a_group_and_its_parents_counts(root):
    folder, write = root
    write("proc/self/cgroup", "0::/outer/inner\n")
    for place, limit, used in (("outer", 20, 5), ("outer/inner", 30, 5)):
        write(f"sys/fs/cgroup/{place}/memory.max", str(limit * GIB))
        write(f"sys/fs/cgroup/{place}/memory.current", str(used * GIB))
    assert probe_host_budget(folder).available == 15 * GIB


def test_version_1_and_its_number_for_no_limit(root):
    folder, write = root
    write("proc/self/cgroup", "4:memory:/job\n1:cpu:/\n")
    place = "sys/fs/cgroup/memory/job/memory"
    write(f"{place}.limit_in_bytes", str((1 << 63) - 4096))
    write(f"{place}.usage_in_bytes", str(GIB))
    assert probe_host_budget(folder).available == 80 * GIB
    write(f"{place}.limit_in_bytes", str(10 * GIB))
    write(f"{place}.stat", f"cache 1\ntotal_cache {GIB // 2}\ntotal_shmem 0\n")
    assert probe_host_budget(folder).available == 9 * GIB + GIB // 2


def test_in_a_container_whose_path_is_the_hosts_the_top_counts(root):
    folder, write = root
    write("proc/self/cgroup", "0::/somewhere/on/the/host\n")
    write("sys/fs/cgroup/memory.max", str(8 * GIB))
    write("sys/fs/cgroup/memory.current", str(GIB))
    assert probe_host_budget(folder).available == 7 * GIB


def test_a_limit_above_what_the_machine_has_left_does_not_count(root):
    folder, write = root
    write("proc/self/cgroup", "0::/job\n")
    write("sys/fs/cgroup/job/memory.max", str(99 * GIB))
    write("sys/fs/cgroup/job/memory.current", str(GIB))
    assert probe_host_budget(folder).available == 80 * GIB


def test_this_machine_has_some():
    found = probe_host_budget()
    assert 0 < found.available <= found.total
